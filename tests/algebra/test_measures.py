"""Inner products of a tensor in memory with changes of every kind."""

from __future__ import annotations

import pytest
import torch
from support.kinds_of_change import KINDS, SHAPE

from hf_taskvec.algebra.deltas import Dense, LowRank
from hf_taskvec.algebra.measures import products_with
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Term


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_is_multiplied_with_every_kind_of_change(dtype: torch.dtype) -> None:
    """All at once, each weighted, and as one sum."""
    draw = torch.Generator().manual_seed(0)
    made = [make(draw) for make in KINDS.values()]
    tensor = torch.randn(SHAPE, generator=draw).to(dtype)
    weights = [0.5 - number for number in range(len(made))]
    terms = [Term(weight, delta) for weight, (delta, _) in zip(weights, made, strict=True)]
    values = [weight * value for weight, (_, value) in zip(weights, made, strict=True)]
    found = products_with(tensor, [*((term,) for term in terms), tuple(terms), ()])
    expected = [(tensor.double() * value).sum().item() for value in [*values, sum(values), torch.zeros(SHAPE)]]
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_large_and_scalar_parameters_are_multiplied() -> None:
    """Several tiles; and none of a matrix's axes."""
    draw = torch.Generator().manual_seed(0)
    tensor, left, right = (torch.randn(shape, generator=draw) for shape in ((1100, 1024), (1100, 2), (2, 1024)))
    change = torch.randn(1100, 1024, generator=draw)
    terms = (Term(2.0, LowRank(InMemory(left), InMemory(right))), Term(-0.5, Dense((InMemory(change),))))
    dense = 2.0 * left.double() @ right.double() - 0.5 * change.double()
    assert products_with(tensor, [terms]) == pytest.approx([(tensor.double() * dense).sum().item()], rel=1e-10)
    scalar = Term(3.0, Dense((InMemory(torch.tensor(0.5)),)))
    assert products_with(torch.tensor(4.0), [(scalar,)]) == [6.0]
