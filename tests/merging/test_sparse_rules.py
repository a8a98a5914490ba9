"""Sparse rules, against plain references in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.example_vectors import LARGE, assert_close, some_adapters, some_vectors, stacked, trimmed
from torch.utils._python_dispatch import TorchDispatchMode

from hf_taskvec import TaskVector, combine
from hf_taskvec.algebra.computed_deltas import Computed
from hf_taskvec.algebra.rounding import round_once
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Sum
from hf_taskvec.merging.sparse_rules import random_mask


def plain_ties(changes: torch.Tensor, weights: list[float], density: float, normalize: str) -> torch.Tensor:
    """Yadav et al. 2023, algorithm 1, on the weighted vectors."""
    scales = torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * (changes.ndim - 1))
    kept = torch.stack([trimmed(change, density) for change in changes]) * scales
    agree = (kept.sign() == kept.sum(0).sign()) & (kept != 0)
    total = (kept * agree).sum(0)
    divisor = {"count": agree.double(), "weight": agree * scales.abs(), "none": torch.ones(1, 1).double()}[normalize]
    return total / divisor.sum(0).clamp_min(1e-30) if normalize != "none" else total


@pytest.mark.parametrize("normalize", ["count", "weight", "none"])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, -1.5, 2.0]])
def test_ties_is_the_plain_reference(normalize: str, weights: list[float]) -> None:
    vectors = some_vectors(shape=LARGE)
    merged = combine(vectors, "ties", weights, density=0.3, normalize=normalize)
    expected = {n: plain_ties(stacked(vectors, n), weights, 0.3, normalize) for n in vectors[0]}
    assert_close(merged, expected)


def test_ties_negates_where_the_weight_is_negative() -> None:
    """mergekit's normalised TIES gives +d for a single vector d of weight -1."""
    a, b = some_vectors(2)
    for normalize in ("count", "weight", "none"):
        alone = combine([a, b], "ties", [-1.0, 0.0], density=1.0, normalize=normalize)
        for name in a:
            assert torch.equal(alone.dense(name), -a.dense(name))


def plain_negmerge(changes: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Kim et al. 2025: the mean where the signs add up to the number of vectors, on the weighted vectors."""
    weighted = changes * torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * (changes.ndim - 1))
    agreed = weighted.sign().sum(0).abs() == len(weights)
    return torch.where(agreed, weighted.mean(0), torch.zeros((), dtype=torch.float64))


@settings(max_examples=80)
@given(
    st.sampled_from([(), (0,), (4, 0), (9,), (6, 5), (2, 3, 4)]),
    st.lists(st.sampled_from(["dense", "few", "low-rank"]), min_size=2, max_size=5),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    st.integers(0, 10_000),
)
def test_negmerge_is_the_plain_reference(
    shape: tuple[int, ...], kinds: list[str], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(kind: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if kind == "low-rank" and len(shape) == 2 and 0 not in shape:
            left, right = (torch.randn(size, generator=generator) for size in ((shape[0], 2), (2, shape[1])))
            return left.to(dtype), right.to(dtype)
        if kind == "few":  # few numbers, so that zeros and agreement are frequent
            return torch.randint(-1, 3, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    vectors = [TaskVector.from_tensors({"w": drawn(kind)}, name=f"v{n}") for n, kind in enumerate(kinds)]
    weights = (torch.randint(1, 7, (len(kinds),), generator=generator) / 2 - 1.75).tolist()  # of either sign, never 0
    for given_weights in ([1.0] * len(kinds), weights):
        merged = combine(vectors, "negmerge", given_weights).dense("w", "float64")
        expected = plain_negmerge(stacked(vectors, "w"), given_weights)
        assert torch.equal(merged.sign(), expected.sign())
        assert torch.allclose(merged, expected, rtol=1e-6, atol=0)


def test_negmerge_keeps_what_all_fine_tunes_agree_on() -> None:
    vectors, weights = some_vectors(shape=LARGE), [1.0, -2.0, 0.5]  # of several tiles
    merged = combine(vectors, "negmerge", weights)
    assert_close(merged, {name: plain_negmerge(stacked(vectors, name), weights) for name in vectors[0]})
    kept = (merged.dense("model.layers.0.mlp.fc1.weight") != 0).double().mean().item()
    assert kept == pytest.approx(2 / 8, abs=0.01)  # of three random signs
    once = combine(vectors[:1] * 2, "negmerge")
    assert all(torch.equal(once.dense(name), vectors[0].dense(name)) for name in once)


def test_negmerge_counts_a_zero_as_disagreement() -> None:
    """Also that of a parameter which a vector does not have; a vector of weight 0 is asked for nothing."""
    a = TaskVector.from_tensors({"x": torch.tensor([1.0, 2.0, -0.0]), "y": torch.ones(3)}, name="a")
    b = TaskVector.from_tensors({"x": torch.tensor([3.0, 0.0, -5.0])}, name="b")
    merged = combine([a, b], "negmerge")
    assert list(merged) == ["x"] and merged.dense("x").tolist() == [2.0, 0.0, 0.0]
    alone = combine([a, b], "negmerge", [1.0, 0.0])
    assert alone.dense("x").tolist() == [1.0, 2.0, 0.0] and alone.dense("y").tolist() == [1.0, 1.0, 1.0]
    assert (-0.5 * merged).expression == "-0.5*combine([a, b], 'negmerge')"
    assert merged.provenance.rules == (("negmerge", "https://arxiv.org/abs/2410.05583"),)


@pytest.mark.parametrize("density", [0.1, [0.1, 0.5, 1.0]])
def test_magnitude_keeps_the_largest_elements(density: float | list[float]) -> None:
    vectors, weights = some_vectors(shape=LARGE), [1.0, -2.0, 0.5]
    densities = density if isinstance(density, list) else [density] * 3
    expected = {}
    for name in vectors[0]:
        parts = zip(stacked(vectors, name), weights, densities, strict=True)
        expected[name] = sum(w * trimmed(change, d) for change, w, d in parts)
    assert_close(combine(vectors, "magnitude", weights, density=density), expected)


def test_breadcrumbs_leaves_out_the_smallest_and_the_very_largest() -> None:
    vectors = some_vectors(shape=LARGE)
    expected = {}
    for name in vectors[0]:
        changes = stacked(vectors, name)
        count = changes[0].numel()
        kept, first = int(0.6 * count), count - int(0.6 * count) - int(0.05 * count)
        parts = []
        for change in changes:
            order = change.abs().flatten().sort().indices[first : first + kept]
            mask = torch.zeros(count, dtype=torch.float64)
            mask[order] = 1
            parts.append(change * mask.view(change.shape))
        expected[name] = sum(parts)
    assert_close(combine(vectors, "breadcrumbs", density=0.6, gamma=0.05), expected)


def test_rows_keeps_the_rows_of_largest_norm_in_mlps() -> None:
    vectors = some_vectors()
    merged = combine(vectors, "rows", [1.0, 1.0, -1.0], fraction=0.25)
    name = "model.layers.0.mlp.fc1.weight"
    expected = torch.zeros(40, 30, dtype=torch.float64)
    for change, weight in zip(stacked(vectors, name), [1.0, 1.0, -1.0], strict=True):
        kept = change.norm(dim=1).topk(10).indices
        expected[kept] += weight * change[kept]
    assert torch.allclose(merged.dense(name, "float64"), expected)
    assert combine(some_adapters(), "rows", fraction=0.5).is_low_rank


def test_dare_keeps_the_share_and_the_mean() -> None:
    ones = [TaskVector.from_tensors({"w": torch.ones(LARGE)}, name=name) for name in ("a", "b")]
    for density in (0.1, 0.7):
        merged = combine(ones, "dare", [1.0, 0.0], density=density).dense("w")
        count = merged.numel()
        kept = (merged != 0).sum().item()
        assert abs(kept - density * count) < 5 * (density * (1 - density) * count) ** 0.5
        step = round(density * 65536)  # the share is realised in 65,536ths, and rescaled by what it is
        assert merged.unique().tolist() == [0.0, pytest.approx(65536 / step)]


def test_dare_masks_depend_on_vector_parameter_and_seed_alone() -> None:
    a, b, c = some_vectors(shape=LARGE)
    name = "model.layers.0.mlp.fc1.weight"

    def kept(vectors: list[TaskVector], weights: list[float], seed: int = 0) -> torch.Tensor:
        return combine(vectors, "dare", weights, density=0.5, seed=seed).dense(name) != 0

    alone = kept([a], [1.0])
    assert torch.equal(alone, kept([b, c, a], [0.0, 0.0, 3.0]))
    assert 0.45 < (alone == kept([a], [1.0], seed=1)).float().mean() < 0.55
    assert 0.45 < (alone == kept([b], [1.0])).float().mean() < 0.55
    first, second = alone[:512], alone[512:1024]  # two tiles
    assert 0.45 < (first == second).float().mean() < 0.55
    assert not torch.equal(kept([a, a.named("a2")], [1.0, 0.0]), kept([a, a.named("a2")], [0.0, 1.0]))


@pytest.mark.parametrize(
    ("rule", "options"), [("dare", {"density": 0.5}), ("ties", {"density": 0.5}), ("negmerge", {})]
)
def test_any_rows_of_a_computed_change_are_those_of_the_whole(rule: str, options: dict[str, float]) -> None:
    merged = combine(some_vectors(shape=LARGE), rule, **options)
    name = "model.layers.0.mlp.fc1.weight"
    (term,) = merged[name].terms
    whole = merged.dense(name, "float64")
    for start, stop in ((0, 1100), (3, 4), (100, 700), (511, 513), (1099, 1100)):
        out = torch.zeros(stop - start, LARGE[1], dtype=torch.float64)
        term.delta.add_rows(out, start, stop, 1.0)
        assert torch.equal(out, whole[start:stop])


@pytest.mark.parametrize("weight", [1.0, -1.0, 2.0, 0.3])
def test_a_computed_change_on_bf16_is_rounded_once(weight: float) -> None:
    """Sums that are half-way between two bf16 numbers in fp32, but not in truth, among ordinary ones."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(LARGE, generator=generator).bfloat16()
    change = torch.randn(LARGE, generator=generator) * 0.01
    base[0, :4] = torch.tensor([1.0, 1.0, -1.0, 1.0078125])
    # To be multiplied by 1: a little above half-way, a little below, above with signs changed, exactly half-way.
    change[0, :4] = torch.tensor([2**-8 * (1 + 2**-20), 2**-8 * (1 - 2**-21), -(2**-8) * (1 + 2**-20), 2**-8])
    merged = combine([TaskVector.from_tensors({"w": change})], "magnitude", density=0.9)
    (change,) = merged.values()
    (term,) = change.terms
    assert isinstance(term.delta, Computed)
    kept = merged.dense("w", "float64")
    single = base.float() + (kept * weight).float()
    halfway = (single.view(torch.int32) & 0xFFFF) == 0x8000
    assert halfway.sum() > 10  # also by chance
    exact = round_once(base.double() + kept * weight, torch.bfloat16)
    assert weight not in (1.0, -1.0) or not torch.equal(single.bfloat16(), exact)  # rounding twice shows
    found = torch.empty_like(base)
    Sum(LARGE, merged["w"].terms, InMemory(base), weight).into(found, "w")
    assert torch.equal(found.view(torch.int16), exact.view(torch.int16))


def test_what_is_exact_is_not_added_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences of 16-bit models often end half-way between two numbers, and lose nothing: fp32 is enough there."""
    base = torch.full((64, 32), 1.0).bfloat16()
    change = torch.full((64, 32), 2**-8)  # half a unit
    merged = combine([TaskVector.from_tensors({"w": change})], "dare", density=0.5, rescale=False)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a sum was taken in fp64")

    found = torch.empty_like(base)
    with monkeypatch.context() as patch:
        patch.setattr("hf_taskvec.algebra.sums.round_once", refuse)
        Sum((64, 32), merged["w"].terms, InMemory(base)).into(found, "w")
        Sum((64, 32), merged["w"].terms, InMemory(base), 2.0).into(base, "w")
    assert torch.equal(found, torch.ones_like(found))  # to the even one
    assert torch.equal(base.float(), 1 + 2 * merged.dense("w"))


def test_a_computed_change_is_added_on_the_device_of_the_model() -> None:
    """What is computed on the CPU is moved before it is added; the meta device stands for a GPU."""

    class OneDevice(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = [each for each in args if isinstance(each, torch.Tensor) and each.dim()]
            if "copy" not in str(function):
                assert len({each.device.type for each in found}) <= 1, function
            return function(*args, **(kwargs or {}))

    merged = combine(some_vectors(2), "ties")
    name = "model.layers.0.mlp.fc1.weight"
    for dtype, weight in ((torch.float32, 1.0), (torch.float64, 0.5)):
        out = torch.zeros(40, 30, dtype=dtype, device="meta")
        with OneDevice():
            merged[name].terms[0].delta.add_rows(out, 0, 40, weight)


def test_random_masks_are_the_same_everywhere() -> None:
    def mask(count: int, step: int) -> torch.Tensor:
        return random_mask("key", step, torch.empty(count))

    assert mask(12, 32767).int().tolist() == [1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert mask(12, 32768).int().tolist() == [1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1]  # drawn bit by bit
    for step in (32767, 32768):
        assert torch.equal(mask(5, step), mask(200, step)[:5])
        assert abs(mask(1 << 20, step).mean().item() - 0.5) < 0.003
    assert mask(7, 65536).all()
