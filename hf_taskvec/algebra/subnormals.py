"""Numbers below the smallest normal one, which a processor can be told to take for zero.

`torch.set_flush_denormal(True)` does so for the calling thread and the threads that it starts. Weights of that size,
below 1.2e-38 in bf16 and fp32, would then be lost silently.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_taskvec.threads import one_thread

_SMALLEST = 5e-324


@contextmanager
def kept_subnormals() -> Iterator[None]:
    """A block in which subnormal numbers are numbers, whatever was set; afterwards that is set again.

    Where they were flushed, torch uses one thread in the block: its others may have been started with the setting.
    """
    if _SMALLEST * 1.0 != 0.0 and _SMALLEST + 0.0 != 0.0:
        yield
        return
    torch.set_flush_denormal(False)
    try:
        with one_thread():
            yield
    finally:
        torch.set_flush_denormal(True)
