"""The k-th smallest magnitude is exact, whatever the numbers and however many tiles."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.example_vectors import LARGE

from hf_taskvec import TaskVector
from hf_taskvec.algebra.computed_deltas import Tiles
from hf_taskvec.merging.order_statistics import order_statistics


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40), st.data())
def test_order_statistics_are_exact(numbers: list[float], data: st.DataObject) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    ranks = data.draw(st.lists(st.integers(0, len(numbers) - 1), min_size=1, max_size=3))
    vector = TaskVector.from_tensors({"w": values})
    expected = values.abs().sort().values[ranks].tolist()
    assert order_statistics(Tiles(vector["w"].terms), ranks, "w") == expected


def test_order_statistics_of_many_tiles_are_those_of_the_sorted_whole() -> None:
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(0)).bfloat16()  # with many equal ones
    tiles = Tiles(TaskVector.from_tensors({"w": values})["w"].terms)
    ranks = [0, 17, 500_000, values.numel() - 1]
    assert order_statistics(tiles, ranks, "w") == values.float().abs().flatten().sort().values[ranks].tolist()
