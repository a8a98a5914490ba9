"""How fast this machine is, and so how long work on a model takes, roughly: told before it.

A pass through a model multiplies each token with each weight, and reads each weight once; the slower of the two
decides, and each layer costs some time of its own. What all three take is measured here, in a tenth of a second, as
busy as the machine is. Told times are right within a factor of two or three: they are to tell minutes from hours.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

# How many products of small matrices take as long as a layer of transformers through which next to nothing goes.
_SMALL_PRODUCTS = 400
# The part of the speed of a plain product that a model reaches: attention, norms and copies take the rest.
_REACHED = 0.4


@dataclass(frozen=True)
class MachineSpeed:
    """What was measured.

    Args:
        multiplications (`float`):
            Multiplications and additions of matrix products, a second.
        reading (`float`):
            Bytes of memory read, a second.
        layer (`float`):
            Seconds that a layer takes however little goes through it.
    """

    multiplications: float
    reading: float
    layer: float

    def forward(self, parameters: int, layers: int, tokens: int, element_bytes: int = 4) -> float:
        """Seconds of one pass of so many tokens through a model.

        >>> MachineSpeed(multiplications=2e9, reading=1e9, layer=0.0).forward(1_000_000, 2, tokens=1000)
        1.0
        """
        products = 2 * parameters * tokens / self.multiplications
        return max(products, parameters * element_bytes / self.reading) + layers * self.layer


@cache
def machine_speed(device: str = "cpu", dtype: torch.dtype = torch.float32) -> MachineSpeed:
    """The speed of a device with numbers of a dtype, measured once in a process.

    Args:
        device (`str`, *optional*, defaults to `"cpu"`):
            Its type.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Of the model.
    """
    size = 512
    with torch.inference_mode():
        rows = torch.ones(128, size, device=device, dtype=dtype)
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        product = _seconds(lambda: torch.nn.functional.linear(rows, matrix), device)
        large = torch.ones(64_000_000 // dtype.itemsize, device=device, dtype=dtype)  # more than a cache holds
        reading = _seconds(large.sum, device)
        small = torch.ones(8, 8, device=device, dtype=dtype)
        one = _seconds(lambda: torch.nn.functional.linear(small, small), device)
    return MachineSpeed(
        multiplications=_REACHED * 2 * rows.numel() * size / product,
        reading=large.numel() * dtype.itemsize / reading,
        layer=_SMALL_PRODUCTS * one,
    )


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(8.2), duration(150), duration(11_000)
    ('8 seconds', '2.5 minutes', '3.1 hours')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} second{'s' if round(seconds) > 1 else ''}"
    for size, word in ((60, "minutes"), (3600, "hours"), (86_400, "days")):
        if seconds < 90 * size or word == "days":
            return f"{seconds / size:.2g} {word}"
    raise AssertionError


def _seconds(work: Callable[[], object], device: str, least: float = 0.03) -> float:
    """How long a piece of work takes once it is warm, as other work lets it: the mean of some."""
    work()
    count, begin = 0, time.perf_counter()
    while count < 4 or time.perf_counter() - begin < least:
        work()
        count += 1
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count
