"""-0.0 is a number of its own: the fine-tune comes back with its zeros' signs, whichever way the vector is held."""

import itertools
from pathlib import Path

import pytest
import torch
from support.tiny_models import Pair, added, make, save_pair, tensors, tuned_copy

from hf_taskvec import TaskVector
from hf_taskvec.algebra.deltas import Delta, Dense, Difference, Rows
from hf_taskvec.algebra.exact_difference import exact_parts
from hf_taskvec.algebra.sources import InMemory, Source
from hf_taskvec.algebra.sums import Term

PAIRS = list(itertools.product([0.0, -0.0, 1.0, -1.0, 1e-6], repeat=2))


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


def sides(dtype: torch.dtype, cases: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[b] for b, _ in cases], dtype=dtype), torch.tensor([[t] for _, t in cases], dtype=dtype)


# All at once; only those that one part holds; each alone.
CASES = [PAIRS, [pair for pair in PAIRS if str(pair[1]) != "-0.0" or str(pair[0]) == "-0.0"], *([p] for p in PAIRS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_sign_comes_back(dtype: torch.dtype) -> None:
    for cases in CASES:
        base, tuned = sides(dtype, cases)
        own: Source = InMemory(base)
        difference: Delta = Difference(own, InMemory(tuned))
        parts = exact_parts(tuned, base, "w")
        kinds = [difference, Rows(range(len(cases)), difference, len(cases))]
        if parts:
            kinds += [Dense(parts), Rows(tuple(range(len(cases))), Dense(parts), len(cases))]
        else:
            assert bits(base) == bits(tuned)
        for delta, target in itertools.product(kinds, (own, InMemory(base.clone()))):
            found = added(TaskVector({"w": [Term(1.0, delta)]}), "w", target)
            assert bits(found) == bits(tuned), (cases, delta)


def test_one_part_is_enough_for_zeros_that_stay() -> None:
    base, tuned = sides(torch.bfloat16, [(-0.0, -0.0), (0.0, 0.0), (1.0, 1.5), (-0.0, 0.0)])
    assert len(exact_parts(tuned, base, "w")) == 1
    base, tuned = sides(torch.bfloat16, [(1.0, -0.0), (1.0, 1.5)])
    assert len(exact_parts(tuned, base, "w")) == 2


@pytest.fixture
def pruned(tmp_path: Path) -> Pair:
    """A base with zeros of both signs, and a fine-tune of it of which more weights are masked."""
    base = make("llama", torch.bfloat16)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(torch.arange(parameter.numel()).view(parameter.shape) % 5 != 0)
    tuned = tuned_copy(base)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(torch.arange(parameter.numel()).view(parameter.shape) % 3 != 0)
    return save_pair(tmp_path, base, tuned)


def test_a_pruned_fine_tune_comes_back_from_a_saved_vector(pruned: Pair, tmp_path: Path) -> None:
    expected = tensors(pruned.tuned)
    assert any((each.read() == 0).logical_and(each.read().signbit()).any() for each in expected.values())
    vector = pruned.vector()
    vector.save(tmp_path / "vector")
    for number, each in enumerate((vector, TaskVector.load(tmp_path / "vector"))):
        each.apply(pruned.base, tmp_path / f"out{number}")
        for name, found in tensors(tmp_path / f"out{number}").items():
            assert bits(found.read()) == bits(expected[name].read()), name


def test_given_tensors_keep_their_zeros(tmp_path: Path) -> None:
    given = torch.tensor([-0.0, 0.0, 1.0])
    vector = TaskVector.from_tensors({"w": given})
    vector.save(tmp_path / "vector")
    for each in (vector, TaskVector.load(tmp_path / "vector")):
        assert bits(each.dense("w")) == bits(given)
