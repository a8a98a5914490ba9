"""Exact order statistics of a parameter's magnitudes, in passes over its tiles: nothing is sorted, nothing is held.

The bits of a non-negative fp32 number, read as an integer, are in the order of the numbers. So a histogram of the upper
16 bits tells in which bin the k-th smallest magnitude lies, and one of the lower 15 within that bin tells which it is.
"""

from collections.abc import Sequence

import torch

from hf_taskvec.algebra.computed_deltas import Tiles
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.sources import numel

_LOWER = 15
_FIRST_NOT_FINITE = 0x7F800000 >> _LOWER


def order_statistics(tiles: Tiles, ranks: Sequence[int], name: str) -> list[float]:
    """The `rank`-th smallest magnitudes, counted from 0, for each of some ranks. Refuses NaN and infinities by name.

    >>> from hf_taskvec import TaskVector
    >>> v = TaskVector.from_tensors({"w": torch.tensor([3.0, -1.0, 2.0, -5.0])})
    >>> order_statistics(Tiles(v["w"].terms), [0, 3], "w")
    [1.0, 5.0]
    """
    if not numel(tiles.shape):
        return [0.0] * len(ranks)
    upper = tiles.count_magnitudes(0, _LOWER, 1 << 16)
    if upper[_FIRST_NOT_FINITE:].any():
        raise not_finite(name)
    below = upper.cumsum(0)
    wanted = torch.tensor(ranks, dtype=torch.int64, device="cpu")
    bins = torch.searchsorted(below, wanted, right=True)
    lower = {each: tiles.count_magnitudes(each << _LOWER, 0, 1 << _LOWER) for each in bins.tolist()}
    found = []
    for rank, each in zip(ranks, bins.tolist(), strict=True):
        left = rank - (int(below[each]) - int(upper[each]))
        low = int(torch.searchsorted(lower[each].cumsum(0), left, right=True))
        bits = torch.tensor([(each << _LOWER) | low], dtype=torch.int32, device="cpu")
        found.append(bits.view(torch.float32).item())
    return found
