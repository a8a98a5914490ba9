"""Sparse rules with an election, and DELLA: against their definitions on dense fp64 tensors."""

from __future__ import annotations

import pytest
import torch
from support.example_vectors import LARGE, assert_close, some_vectors, stacked

from hf_taskvec import TaskVector, combine
from hf_taskvec.errors import BadValueError

WEIGHTS = [1.0, -0.5, 0.75]


def elected(kept: torch.Tensor, normalize: str = "count") -> torch.Tensor:
    """TIES' election of weighted changes, as its paper has it."""
    agrees = kept.sign() == kept.sum(0).sign()
    total = (kept * agrees).sum(0)
    if normalize == "none":
        return total
    parts = torch.tensor([1.0] * 3 if normalize == "count" else [abs(weight) for weight in WEIGHTS]).double()
    votes = ((kept != 0) & agrees).double() * parts.reshape(-1, *[1] * (kept.ndim - 1))
    return total / votes.sum(0).clamp(min=1e-30)


def weighted(vectors: list[TaskVector], rule: str, name: str, **options: object) -> torch.Tensor:
    """What a rule without an election keeps of each vector by itself, weighted."""
    alone = [combine([vector], rule, **options).dense(name, "float64") for vector in vectors]
    return torch.stack([weight * each for weight, each in zip(WEIGHTS, alone, strict=True)])


@pytest.mark.parametrize("normalize", ["count", "weight", "none"])
@pytest.mark.parametrize(
    ("rule", "plain", "options"),
    [
        ("breadcrumbs_ties", "breadcrumbs", {"density": 0.6, "gamma": 0.05}),
        ("dare_ties", "dare", {"density": 0.5, "seed": 3}),
        ("della_ties", "della", {"density": 0.6, "epsilon": 0.2, "seed": 3}),
    ],
)
def test_an_election_over_what_each_vector_keeps(rule: str, plain: str, options: dict, normalize: str) -> None:
    vectors = some_vectors(3)
    expected = {name: elected(weighted(vectors, plain, name, **options), normalize) for name in vectors[0]}
    merged = combine(vectors, rule, WEIGHTS, normalize=normalize, **options)
    assert_close(merged, expected)
    assert any((each == 0).any() for each in expected.values())  # something was dropped or outvoted


def test_della_keeps_large_elements_more_often_and_scales_each_by_its_probability() -> None:
    (vector,) = some_vectors(1, shape=LARGE)
    name = "model.layers.0.mlp.fc1.weight"
    change, kept = vector.dense(name), combine([vector], "della", density=0.5, epsilon=0.3).dense(name)
    ranks = change.abs().argsort(dim=1, stable=True).argsort(1).double() / (change.shape[1] - 1)
    probability = 0.2 + 0.6 * ranks
    there = kept != 0
    assert torch.allclose(kept[there], (change / probability)[there].float(), rtol=1e-5)
    for low in (0.0, 0.25, 0.5, 0.75):  # each quarter of the ranks
        quarter = (ranks >= low) & (ranks < low + 0.25)
        assert there[quarter].double().mean().item() == pytest.approx(0.2 + 0.6 * (low + 0.125), abs=0.01)
    assert kept.double().sum(1).mean() == pytest.approx(change.double().sum(1).mean().item(), abs=3)
    again = combine([vector], "della", density=0.5, epsilon=0.3, seed=1).dense(name)
    assert not torch.equal(kept, again)


def test_what_each_keeps_hangs_on_no_order() -> None:
    vectors = some_vectors(3)
    for rule in ("della", "della_ties", "dare_ties"):
        one, other = combine(vectors, rule, WEIGHTS), combine(vectors[::-1], rule, WEIGHTS[::-1])
        for name in one:
            assert torch.allclose(one.dense(name), other.dense(name), atol=1e-6)


def test_all_is_kept_at_a_density_of_one() -> None:
    vectors = some_vectors(2)
    for rule in ("della", "dare"):
        found, expected = combine(vectors, rule, density=1.0), combine(vectors, "sum")
        for name in found:
            assert torch.allclose(found.dense(name), expected.dense(name), atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("della", {"epsilon": 0.5}, "epsilon=0.5 must be at least 0 and below 0.5"),
        ("della", {"density": 0.2, "epsilon": 0.3}, "density=0.2 and epsilon=0.3: the density must be above"),
        ("della_ties", {"density": 0.0}, "density"),
        ("dare_ties", {"seed": 1.5}, "seed=1.5 must be a whole number"),
        ("dare_ties", {"rescale": "no"}, "rescale='no' must be True or False"),
        ("breadcrumbs_ties", {"gamma": 1.0}, "gamma=1.0"),
        ("breadcrumbs_ties", {"normalize": "weights"}, "Did you mean 'weight'"),
    ],
)
def test_bad_options_are_refused(rule: str, options: dict, message: str) -> None:
    with pytest.raises((BadValueError, LookupError), match=message):
        combine(some_vectors(2), rule, **options)


def of_sce(changes: torch.Tensor, density: float) -> torch.Tensor:
    """By the paper's formulas, of all vectors at once, in fp64."""
    spread = changes.var(0, unbiased=False)
    kept = int(density * int((spread > 0).sum()))
    mask = (
        torch.zeros(spread.numel(), dtype=torch.float64)
        .index_fill(0, spread.flatten().topk(kept).indices, 1.0)
        .reshape(spread.shape)
    )
    left = changes * mask
    energies = left.square().flatten(1).sum(1)
    shares = (energies / energies.sum()).reshape(-1, *[1] * spread.ndim)
    agrees = (left * left.sum(0)) > 0
    divisor = (shares * agrees).sum(0)
    return (shares * left * agrees).sum(0) / torch.where(divisor > 0, divisor, 1.0)


@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, -0.5, 2.0]])
def test_sce_is_the_papers(density: float, weights: list[float]) -> None:
    vectors = some_vectors(3, shape=LARGE)
    factors = torch.tensor(weights, dtype=torch.float64)
    expected = {}
    for name in vectors[0]:
        changes = stacked(vectors, name)
        expected[name] = of_sce(changes * factors.reshape(-1, *[1] * (changes.ndim - 1)), density)
    assert_close(combine(vectors, "sce", weights, density=density), expected)


def test_sce_counts_a_vector_that_leaves_a_parameter_as_it_is() -> None:
    one = TaskVector.from_tensors({"w": torch.tensor([4.0, 1.0, 0.0, -3.0]), "u": torch.ones(1)}, name="one")
    other = TaskVector.from_tensors({"u": torch.ones(1)}, name="other")
    merged = combine([one, other], "sce", density=0.4)  # one of the three elements that differ
    assert merged.dense("w").tolist() == [4.0, 0.0, 0.0, 0.0]
    assert combine([one, one.named("same")], "sce", density=0.4).norm() == 0.0  # nothing differs
