"""Memory that a thread uses again and again."""

import threading

import torch

from hf_taskvec.algebra.deltas import TILE
from hf_taskvec.algebra.sources import numel

_buffers = threading.local()


def buffer(slot: int, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of this thread, by number: fresh memory for each tile would cost more than the sums.

    Number 2 is that of `rounding`, the others those of `arithmetic`. What is larger than a tile is not kept.
    """
    count = numel(size)
    if count > TILE:
        return torch.empty(size, dtype=dtype, device=device)
    held: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = _buffers.__dict__.setdefault("held", {})
    key = (slot, dtype, device)
    if key not in held or held[key].numel() < count:
        with torch.inference_mode(False):  # what inference mode makes cannot be written to outside of it
            held[key] = torch.empty(count, dtype=dtype, device=device)
    return held[key][:count].view(size)
