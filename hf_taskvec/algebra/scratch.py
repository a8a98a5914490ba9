"""Memory that a thread uses for one tile after another: fresh memory for each would cost more than the sums."""

import threading
from enum import Enum, auto

import torch

from hf_taskvec.algebra.sources import numel
from hf_taskvec.algebra.tiles import TILE

_buffers = threading.local()


class Slot(Enum):
    """What a piece of memory is used for. Two uses at the same time need two slots."""

    #: the sum of a tile, before it is rounded
    ACCUMULATOR = auto()
    #: one summand, before it is added
    SUMMAND = auto()
    #: stored rows in another dtype and, when the sum is complete, the steps of rounding it
    CONVERTED = auto()
    #: the rounded tile
    OUTPUT = auto()
    #: base, total, part and rest of Knuth's TwoSum
    BASE = auto()
    TOTAL = auto()
    PART = auto()
    REST = auto()


def buffer(slot: Slot, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """This thread's memory for a use, uninitialised. What is larger than a tile is not kept."""
    count = numel(size)
    if count > TILE:
        return torch.empty(size, dtype=dtype, device=device)
    held: dict[tuple[Slot, torch.dtype, torch.device], torch.Tensor] = _buffers.__dict__.setdefault("held", {})
    key = (slot, dtype, device)
    if key not in held or held[key].numel() < count:
        with torch.inference_mode(False):  # what inference mode makes cannot be written to outside of it
            held[key] = torch.empty(count, dtype=dtype, device=device)
    return held[key][:count].view(size)
