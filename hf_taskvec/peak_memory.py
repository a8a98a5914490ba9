"""How much memory a piece of work takes beyond what was held before it."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_SELF = Path("/proc/self")


@dataclass
class PeakMemory:
    """What was measured, once the work is done.

    Args:
        bytes (`int`, *optional*):
            The most that was held at once, beyond what was held before; `None` where nothing tells.
    """

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device | None = None) -> Iterator[PeakMemory]:
    """Measure the peak of the work inside: of a GPU's memory if that is the device, else of the process's own.

    The process's high-water mark can be set back on Linux only; elsewhere nothing is measured. What other threads of
    the process take counts as well.

    Args:
        device (`torch.device`, *optional*):
            Where the work is done; the CPU without it.

    Example:
        >>> with peak_memory() as peak:
        ...     held = torch.ones(4_000_000)
        >>> peak.bytes is None or peak.bytes >= 8_000_000
        True

    """
    found = PeakMemory()
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    give_back_memory()
    try:
        (_SELF / "clear_refs").write_text("5")  # sets the high-water mark back to what is held now
        start = _status("VmRSS")
    except OSError:  # not Linux, or not allowed
        yield found
        return
    yield found
    found.bytes = max(0, _status("VmHWM") - start)


def give_back_memory() -> None:
    """Return to the system what was freed but is held for later, where the C library can; else work would reuse it."""
    gc.collect()
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    lines = (_SELF / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
