"""Memory that a thread uses for one tile after another: fresh memory for each would cost more than the sums."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

import torch

from hf_taskvec.algebra.sources import numel
from hf_taskvec.algebra.tiles import TILE

_buffers = threading.local()


class Slot(Enum):
    """What a piece of memory is used for. Two uses at the same time need two slots."""

    #: the sum of a tile, before it is rounded
    ACCUMULATOR = auto()
    #: the steps of rounding it by torch
    CONVERTED = auto()
    #: the rounded tile
    OUTPUT = auto()
    #: what is computed of a tile, not stored
    COMPUTED = auto()
    #: a tile that is measured, and another beside it
    MEASURED = auto()
    BESIDE = auto()
    #: the rows of a tensor that is not stored as rows
    ROWS = auto()
    #: the parts of a difference, and what is kept of them
    PARTS = auto()


def buffer(
    slot: Slot, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, number: int = 0
) -> torch.Tensor:
    """This thread's memory for a use, uninitialised; for several at once, of one number. Not kept if over a tile."""
    count = numel(size)
    if count > TILE:
        return torch.empty(size, dtype=dtype, device=device)
    held: dict[tuple[int, Slot, int, torch.dtype, torch.device], torch.Tensor] = _buffers.__dict__.setdefault(
        "held", {}
    )
    key = (_level(), slot, number, dtype, device)
    if key not in held or held[key].numel() < count:
        with torch.inference_mode(False):  # what inference mode makes cannot be written to outside of it
            held[key] = torch.empty(count, dtype=dtype, device=device)
    return held[key][:count].view(size)


@contextmanager
def deeper() -> Iterator[None]:
    """A block in which this thread has other memory: for sums that are made while one is in work."""
    _buffers.level = _level() + 1
    try:
        yield
    finally:
        _buffers.level -= 1


def _level() -> int:
    found: int = _buffers.__dict__.setdefault("level", 0)
    return found
