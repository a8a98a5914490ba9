"""Merging rules: what they give, against plain references in fp64; and that the result is a task vector like any other."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import DTYPES, TinyModels, added, make, tensors, tuned_copy
from torch.utils._python_dispatch import TorchDispatchMode

from hf_taskvec import TaskVector, combine, rules
from hf_taskvec.algebra.computed_deltas import Computed, Tiles
from hf_taskvec.algebra.deltas import LowRank
from hf_taskvec.algebra.rounding import round_once
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Sum
from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError, UnsupportedError
from hf_taskvec.merging.order_statistics import order_statistics
from hf_taskvec.merging.sparse_rules import random_mask

LARGE = (1100, 1024)  # more than two tiles
OPTIONS: dict[str, dict[str, Any]] = {"layers": {"schedule": [0.5, 1.0]}, "low_rank": {"rank": 2}}


def some_vectors(count: int = 3, shape: tuple[int, ...] = (40, 30), seed: int = 0) -> list[TaskVector]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TaskVector.from_tensors(
            {
                "model.layers.0.mlp.fc1.weight": torch.randn(shape, generator=generator),
                "model.layers.1.mlp.fc1.bias": torch.randn(shape[:1], generator=generator),
            },
            name=f"v{number}",
        )
        for number in range(count)
    ]


def some_adapters(count: int = 3, rank: int = 4) -> list[TaskVector]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"model.layers.0.mlp.fc1.weight": (40, 30), "model.layers.1.mlp.fc2.weight": (30, 40)}

    def factor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        TaskVector.from_tensors({n: (factor(s[0], rank), factor(rank, s[1])) for n, s in shapes.items()}, name=f"v{i}")
        for i in range(count)
    ]


def stacked(vectors: list[TaskVector], name: str) -> torch.Tensor:
    return torch.stack([vector.dense(name, "float64") for vector in vectors])


def assert_close(merged: TaskVector, expected: dict[str, torch.Tensor]) -> None:
    assert set(merged) == set(expected)
    for name, value in expected.items():
        found = merged.dense(name, "float64")
        assert torch.allclose(found, value, rtol=1e-6, atol=1e-6 * value.abs().max().item()), name


# The list of rules.


def test_rules_are_listed_with_what_a_card_needs() -> None:
    found = rules()
    assert list(found) == sorted(found)
    assert {"sum", "mean", "weighted", "interpolate", "layers"} <= found.keys()
    assert {"magnitude", "rows", "ties", "dare", "breadcrumbs", "low_rank", "tsv"} <= found.keys()
    assert found["ties"].paper == "https://arxiv.org/abs/2306.01708"
    assert found["ties"].options["density"] == 0.2
    assert all(each.summary.endswith(".") and "\n" not in each.summary for each in found.values())


def test_the_name_means_the_function_whatever_was_imported() -> None:
    import hf_taskvec.merging

    a, b, _ = some_vectors()
    assert hf_taskvec.merging([a, b]) == a + b


# Linear rules.


def test_linear_rules_are_expressions() -> None:
    a, b, c = some_vectors()
    weights = [1.0, -2.0, 0.5]
    assert combine([a, b, c], "sum", weights) == a - 2 * b + 0.5 * c
    assert combine([a, b, c], "mean", weights) == weights[0] / 3 * a + weights[1] / 3 * b + weights[2] / 3 * c
    assert combine([a, b, c], "weighted", weights) == 1 / 3.5 * a - 2 / 3.5 * b + 0.5 / 3.5 * c
    assert combine([a, b], "interpolate", t=0.25) == 0.75 * a + 0.25 * b
    assert combine([a, b], "sum", [1.0, -2.0]).expression == "v0 - 2*v1"


def test_linear_rules_keep_factors() -> None:
    merged = combine(some_adapters(), "mean")
    assert merged.is_low_rank and {merged.rank(name) for name in merged} == {12}


def test_layers_are_scaled_along_their_schedule() -> None:
    layers = {f"model.layers.{n}.w": torch.ones(2) for n in range(5)} | {"model.embed_tokens.weight": torch.ones(3, 2)}
    a, b = (TaskVector.from_tensors(layers, name=name) for name in "ab")
    merged = combine([a, b], "layers", [1.0, -1.0], schedule=[[0.0, 1.0], [2.0]], outside=0.5)
    assert [merged.dense(f"model.layers.{n}.w")[0].item() for n in range(4)] == [-2.0, -1.75, -1.5, -1.25]
    assert "model.embed_tokens.weight" not in [n for n in merged if merged.norm(n)]
    assert combine([a, b], "layers", schedule=[0.0, 1.0]).dense("model.layers.4.w").tolist() == [2.0, 2.0]


# Order statistics.


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40), st.data())
def test_order_statistics_are_exact(numbers: list[float], data: st.DataObject) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    ranks = data.draw(st.lists(st.integers(0, len(numbers) - 1), min_size=1, max_size=3))
    vector = TaskVector.from_tensors({"w": values})
    expected = values.abs().sort().values[ranks].tolist()
    assert order_statistics(Tiles(vector["w"]), ranks, "w") == expected


def test_order_statistics_of_many_tiles() -> None:
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(0)).bfloat16()  # with many equal ones
    tiles = Tiles(TaskVector.from_tensors({"w": values})["w"])
    ranks = [0, 17, 500_000, values.numel() - 1]
    assert order_statistics(tiles, ranks, "w") == values.float().abs().flatten().sort().values[ranks].tolist()


# Sparse rules, against plain references.


def trimmed(change: torch.Tensor, density: float) -> torch.Tensor:
    kept = max(1, int(density * change.numel()))
    cut = change.abs().flatten().sort(descending=True).values[kept - 1]
    return change * (change.abs() >= cut)


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
def test_ties(normalize: str, weights: list[float]) -> None:
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


@pytest.mark.parametrize("density", [0.1, [0.1, 0.5, 1.0]])
def test_magnitude(density: float | list[float]) -> None:
    vectors, weights = some_vectors(shape=LARGE), [1.0, -2.0, 0.5]
    densities = density if isinstance(density, list) else [density] * 3
    expected = {}
    for name in vectors[0]:
        parts = zip(stacked(vectors, name), weights, densities, strict=True)
        expected[name] = sum(w * trimmed(change, d) for change, w, d in parts)
    assert_close(combine(vectors, "magnitude", weights, density=density), expected)


def test_breadcrumbs() -> None:
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


def test_rows() -> None:
    vectors = some_vectors()
    merged = combine(vectors, "rows", [1.0, 1.0, -1.0], fraction=0.25)
    name = "model.layers.0.mlp.fc1.weight"
    expected = torch.zeros(40, 30, dtype=torch.float64)
    for change, weight in zip(stacked(vectors, name), [1.0, 1.0, -1.0], strict=True):
        kept = change.norm(dim=1).topk(10).indices
        expected[kept] += weight * change[kept]
    assert torch.allclose(merged.dense(name, "float64"), expected)
    assert combine(some_adapters(), "rows", fraction=0.5).is_low_rank


# DARE.


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


@pytest.mark.parametrize("rule", ["dare", "ties"])
def test_any_rows_can_be_asked_for(rule: str) -> None:
    merged = combine(some_vectors(shape=LARGE), rule, density=0.5)
    name = "model.layers.0.mlp.fc1.weight"
    (term,) = merged[name]
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
    ((term,),) = merged.values()
    assert isinstance(term.delta, Computed)
    kept = merged.dense("w", "float64")
    single = base.float() + (kept * weight).float()
    halfway = (single.view(torch.int32) & 0xFFFF) == 0x8000
    assert halfway.sum() > 10  # also by chance
    exact = round_once(base.double() + kept * weight, torch.bfloat16)
    assert weight not in (1.0, -1.0) or not torch.equal(single.bfloat16(), exact)  # rounding twice shows
    found = torch.empty_like(base)
    Sum(LARGE, merged["w"], InMemory(base), weight).into(found, "w")
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
        Sum((64, 32), merged["w"], InMemory(base)).into(found, "w")
        Sum((64, 32), merged["w"], InMemory(base), 2.0).into(base, "w")
    assert torch.equal(found, torch.ones_like(found))  # to the even one
    assert torch.equal(base.float(), 1 + 2 * merged.dense("w"))


def test_a_computed_change_meets_a_model_on_another_device() -> None:
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
            merged[name][0].delta.add_rows(out, 0, 40, weight)


def test_random_masks_are_the_same_everywhere() -> None:
    def mask(count: int, step: int) -> torch.Tensor:
        return random_mask("key", step, torch.empty(count))

    assert mask(12, 32767).int().tolist() == [1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert mask(12, 32768).int().tolist() == [1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1]  # drawn bit by bit
    for step in (32767, 32768):
        assert torch.equal(mask(5, step), mask(200, step)[:5])
        assert abs(mask(1 << 20, step).mean().item() - 0.5) < 0.003
    assert mask(7, 65536).all()


# Spectral rules.


def plain_tsv(changes: torch.Tensor, weights: list[float], rank: int) -> torch.Tensor:
    """Gargiulo et al. 2025, algorithm 1: truncate, concatenate, whiten by Procrustes, multiply out."""
    lefts, values, rights = [], [], []
    for change, weight in zip(changes, weights, strict=True):
        u, s, v = torch.linalg.svd(change, full_matrices=False)
        lefts.append(u[:, :rank])
        values.append(weight * s[:rank])
        rights.append(v[:rank].T)

    def whitened(matrix: torch.Tensor) -> torch.Tensor:
        p, _, q = torch.linalg.svd(matrix, full_matrices=False)
        return p @ q

    return whitened(torch.cat(lefts, 1)) @ torch.diag(torch.cat(values)) @ whitened(torch.cat(rights, 1)).T


@pytest.mark.parametrize("rank", [None, 3])
def test_tsv_of_dense_changes(rank: int | None) -> None:
    vectors, weights = some_vectors(), [1.0, -0.5, 2.0]
    merged = combine(vectors, "tsv", weights, rank=rank)
    matrix, bias = vectors[0]
    expected = {
        matrix: plain_tsv(stacked(vectors, matrix), weights, rank or 10),
        bias: (stacked(vectors, bias) * torch.tensor(weights).view(3, 1)).sum(0) / 3,
    }
    assert_close(merged, expected)
    assert merged.rank(matrix) == 3 * (rank or 10)


def test_spectral_rules_never_see_the_dense_matrix_of_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, weights = some_adapters(), [1.0, -0.5, 2.0]
    dense = {name: stacked(adapters, name) for name in adapters[0]}

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a dense matrix was formed")

    with monkeypatch.context() as patch:
        patch.setattr(Sum, "rows", refuse)
        merged = {rule: combine(adapters, rule, weights, rank=3) for rule in ("tsv", "low_rank")}
        for vector in merged.values():
            assert vector.is_low_rank and {vector.rank(name) for name in vector} == {9}
            vector.norm()
    assert_close(merged["tsv"], {n: plain_tsv(d, weights, 3) for n, d in dense.items()})
    cut = {n: sum(w * plain_tsv(c[None], [1.0], 3) for c, w in zip(d, weights, strict=True)) for n, d in dense.items()}
    assert_close(merged["low_rank"], cut)


# Every rule.


@pytest.mark.parametrize("rule", sorted(rules()))
def test_negative_weights_negate(rule: str) -> None:
    """All weights with the other sign give the other sign, exactly; a weight of 0 leaves a vector out."""
    vectors = some_vectors(2)
    options = OPTIONS.get(rule, {})
    for weights in ([1.0, 0.5], [1.0, -0.5]):
        merged = combine(vectors, rule, weights, **options)
        negated = combine(vectors, rule, [-w for w in weights], **options)
        assert merged.norm() > 0
        for name in merged:
            assert torch.equal(negated.dense(name), -merged.dense(name)), name
    without = combine(vectors, rule, [1.0, 0.0], **options)
    assert without.cosine(vectors[0]) > 0.1
    assert combine(vectors, rule, [-1.0, 0.0], **options).cosine(vectors[0]) < -0.1


@pytest.mark.parametrize("rule", sorted(rules()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merged_vector_is_the_same_streamed_live_and_saved(
    rule: str, dtype: torch.dtype, models: TinyModels, tmp_path: Path
) -> None:
    base = make("phi", dtype)
    base.save_pretrained(tmp_path / "base")
    vectors = []
    for seed in (1, 2):
        tuned_copy(base, seed=seed).save_pretrained(tmp_path / f"tuned{seed}")
        vectors.append(TaskVector.from_finetuned(tmp_path / "base", tmp_path / f"tuned{seed}"))
    merged = combine(vectors, rule, [1.0, -0.5], **OPTIONS.get(rule, {}))
    merged.apply(tmp_path / "base", tmp_path / "out", scale=0.7, threads=2)
    merged.save(tmp_path / "vector")
    loaded = TaskVector.load(tmp_path / "vector")
    streamed = tensors(tmp_path / "out")
    with merged.applied_to(base, 0.7):
        live = {name: value.clone() for name, value in base.state_dict().items()}
    for name, source in tensors(tmp_path / "base").items():
        again = added(loaded, name, source, 0.7)
        assert torch.equal(streamed[name].read(), again), name
        assert torch.equal(streamed[name].read(), live[name]), name
    assert loaded.provenance == merged.provenance


def test_the_rule_and_its_paper_are_in_the_provenance(tmp_path: Path) -> None:
    a, b = some_vectors(2)
    merged = 0.5 * combine([a, -b], "ties", [1.0, 2.0], density=0.5)
    assert merged.expression == "0.5*combine([v0, -v1], 'ties', weights=[1.0, 2.0], density=0.5)"
    merged.save(tmp_path / "merged")
    document = json.loads((tmp_path / "merged" / "taskvec.json").read_text())
    assert document["provenance"]["rules"] == {"ties": "https://arxiv.org/abs/2306.01708"}
    assert (merged + a).named("c").compress(rank=1).provenance.rules == merged.provenance.rules


def test_the_card_shows_the_rule_its_paper_and_code_that_merges_again(models: TinyModels, tmp_path: Path) -> None:
    from hf_taskvec.publishing.model_card import card_for
    from hf_taskvec.publishing.notation import evaluate_expression
    from hf_taskvec.publishing.written_folder import open_artifact

    pair = models.pair("phi")
    vectors = {name: pair.vector(name=name) for name in ("a", "b")}
    merged = combine([vectors["a"], vectors["b"].filter(include="*.weight")], "ties", [1.0, -0.5], density=0.5)
    merged.apply(pair.base, tmp_path / "model")
    card = card_for(open_artifact(tmp_path / "model"))
    assert "The rule `ties` merged vectors: see [its paper](https://arxiv.org/abs/2306.01708)." in card
    assert "from hf_taskvec import combine\n" in card
    code = "vector = combine([a, b.filter(include=['*.weight'])], 'ties', weights=[1.0, -0.5], density=0.5)"
    assert code in card
    # The notation is what the command line takes.
    again = evaluate_expression(merged.expression, vectors)
    name = "model.layers.0.mlp.fc1.weight"
    assert again.expression == merged.expression and torch.equal(again.dense(name), merged.dense(name))
    with pytest.raises(MissingNameError, match="Did you mean 'ties'"):
        evaluate_expression("combine([a, b], 'tise')", vectors)
    with pytest.raises(BadValueError, match="takes a plain value"):
        evaluate_expression("combine([a, b], 'ties', density=a)", vectors)
    with pytest.raises(BadValueError, match="no place in an expression"):
        evaluate_expression("combine(a, b)", vectors)


@pytest.mark.parametrize("rule", sorted(rules()))
@pytest.mark.parametrize("weights", [None, [0.5, 1.75], [1.0, -0.5], [1.0, 0.0]])
def test_the_expression_merges_again(rule: str, weights: list[float] | None) -> None:
    """To the last bit, or to the twelve digits of the coefficients of a sum; also where two vectors had one name."""
    from hf_taskvec.publishing.notation import evaluate_expression

    a, b = (vector.named("v") for vector in some_vectors(2))
    options = OPTIONS.get(rule, {}) | ({"normalize": "weight"} if rule == "ties" else {})
    merged = combine([a, b], rule, weights, **options)
    again = evaluate_expression(merged.expression, {"v": a, "v_2": b.named("v_2")})
    assert set(again) == set(merged) and again.expression == merged.expression
    most = 1e-11 if rules()[rule].linear else 0.0
    for name in merged:
        one, other = (vector.dense(name, "float64") for vector in (merged, again))
        assert (one - other).abs().max() <= most * one.abs().max(), name


def test_papers_of_linear_rules_reach_the_provenance() -> None:
    a, b = some_vectors(2)
    assert combine([a, b]).provenance.rules == (("sum", "https://arxiv.org/abs/2212.04089"),)
    both = combine([combine([a, b], "ties"), b], "mean").provenance
    assert [name for name, _ in both.rules] == ["ties", "mean"] and both.expression.startswith("0.5*combine(")


def test_vectors_of_one_label_get_another_in_the_expression() -> None:
    a, b = some_vectors(2)
    merged = combine([a.named("v"), b.named("v")], "ties")
    assert merged.expression == "combine([v, v_2], 'ties')"


def test_merged_vectors_are_compared_and_fingerprinted_by_what_they_do() -> None:
    a, b = some_vectors(2)
    merged = combine([a, b], "ties", density=0.5)
    assert merged == combine([a, b], "ties", density=0.5)
    assert merged.fingerprint == combine([a, b], "ties", density=0.5).fingerprint
    others = [
        combine([a, b], "ties", density=0.4),
        combine([a, b], "ties", [1.0, 2.0], density=0.5),
        combine([a, 2 * b], "ties", density=0.5),
        combine([a, b], "magnitude", density=0.5),
        combine([a, b], "tsv"),
        combine([a, b], "tsv", rank=2),
    ]
    assert len({each.fingerprint for each in (merged, *others)}) == 7
    assert len({merged, *others}) == 7
    assert len(merged - combine([a, b], "ties", density=0.5)) == 0


def test_merged_vectors_take_part_in_the_algebra() -> None:
    a, b, c = some_vectors()
    merged = combine([a, b], "ties", density=0.5)
    name = "model.layers.0.mlp.fc1.weight"
    expected = merged.dense(name, "float64") - 0.5 * c.dense(name, "float64")
    assert torch.allclose((merged - 0.5 * c).dense(name, "float64"), expected)
    small = (merged - 0.5 * c).compress(rank=5)
    assert small.rank(name) == 5 and 0 < small.discarded[name] < 1
    again = combine([merged, c], "magnitude", density=0.5)
    kept = trimmed(merged.dense(name, "float64"), 0.5) + trimmed(c.dense(name, "float64"), 0.5)
    assert torch.allclose(again.dense(name, "float64"), kept)
    assert merged.cosine(a) > 0.1 and merged.nbytes == a.nbytes + b.nbytes


def test_a_merge_of_adapters_is_exported_as_an_adapter(tmp_path: Path) -> None:
    merged = combine(some_adapters(), "tsv", rank=2)
    merged.to_adapter(tmp_path / "adapter")
    again = TaskVector.from_adapter(tmp_path / "adapter")
    assert all(isinstance(term.delta, LowRank) for name in again for term in again[name])
    for name in merged:
        assert torch.allclose(again.dense(name), merged.dense(name), atol=1e-6)


def test_nothing_is_read_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = some_vectors()

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a tensor was read")

    with monkeypatch.context() as patch:
        patch.setattr("hf_taskvec.algebra.sources.InMemory.read", refuse)
        # Which rows `rows` keeps must be known at once, as its docstring tells.
        merged = {
            rule: combine(vectors, rule, **OPTIONS.get(rule, {}))
            for rule in rules()
            if rule not in ("rows", "interpolate")
        }
        with pytest.raises(AssertionError, match="a tensor was read"):
            combine(vectors, "rows")
    kinds = {rule: type(vector["model.layers.0.mlp.fc1.weight"][0].delta) for rule, vector in merged.items()}
    assert {rule for rule, kind in kinds.items() if kind is Computed} == {"breadcrumbs", "dare", "magnitude", "ties"}
    assert {rule for rule, kind in kinds.items() if kind is LowRank} == {"low_rank", "tsv"}


def test_rows_of_what_has_no_rows_of_its_own() -> None:
    """The result of another rule, pruned: the kept rows in memory, in fp64."""
    a, b = some_vectors(2)
    ties = combine([a, b], "ties", density=0.5)
    name = "model.layers.0.mlp.fc1.weight"
    dense = ties.dense(name, "float64")
    kept = dense.norm(dim=1).topk(10).indices
    expected = torch.zeros_like(dense)
    expected[kept] = dense[kept]
    assert torch.equal(combine([ties], "rows", fraction=0.25).dense(name, "float64"), expected)


def test_computed_factors_do_not_outlive_their_vector() -> None:
    """Neither they nor what they were computed from."""
    vectors = some_adapters()
    merged = combine(vectors, "tsv", rank=2)
    merged.norm()
    alive = [weakref.ref(source.tensor) for vector in vectors for source in vector.sources]  # type: ignore[attr-defined]
    factor = weakref.ref(merged.sources[0].read())
    assert all(each() is not None for each in (*alive, factor))
    del vectors, merged
    gc.collect()
    assert not any(each() is not None for each in (*alive, factor))


def test_the_last_computed_factors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for."""
    made = []
    monkeypatch.setattr("hf_taskvec.merging.spectral_rules._orthonormal", lambda each: (made.append(1), each)[1])
    first, second = combine(some_adapters(), "tsv", rank=2), combine(some_adapters(), "tsv", rank=1)
    name = "model.layers.0.mlp.fc1.weight"
    for vector in (first, first, second, first):
        vector.dense(name)
    assert len(made) == 2 * 2  # left and right, of each
    monkeypatch.setattr("hf_taskvec.algebra.computed_deltas._KEPT", 1)
    for vector in (second, second, first, second):
        vector.dense(name)
    assert len(made) == 2 * 2 + 2 * 2


def test_vectors_may_change_different_parameters() -> None:
    a = TaskVector.from_tensors({"x": torch.ones(3), "y": torch.ones(3)}, name="a")
    b = TaskVector.from_tensors({"y": 3 * torch.ones(3), "z": torch.ones(3)}, name="b")
    merged = combine([a, b], "ties", density=1.0)
    assert {name: merged.dense(name)[0].item() for name in merged} == {"x": 1.0, "y": 2.0, "z": 1.0}


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Four models of 100 MB by TIES: the peak of anonymous memory does not follow their size.

    glibc gives freed memory back at once here: otherwise it keeps tens of megabytes, more or fewer by chance.
    """
    base = make(
        "llama",
        torch.bfloat16,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=2,
        vocab_size=8000,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    base.save_pretrained(tmp_path / "base")
    for number in range(4):
        tuned_copy(base, seed=number).save_pretrained(tmp_path / f"tuned{number}")
    size = sum(path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors")) / 2**20
    script = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from hf_taskvec import TaskVector, combine\n"
        "import hf_taskvec.application.to_checkpoint\n"
        "def anonymous():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
        "folder = Path(sys.argv[1])\n"
        "vectors = [TaskVector.from_finetuned(folder / 'base', folder / f'tuned{n}') for n in range(4)]\n"
        "before, peak, done = anonymous(), [0], []\n"
        "def watch():\n"
        "    while not done:\n"
        "        peak[0] = max(peak[0], anonymous()); time.sleep(0.002)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "combine(vectors, 'ties', density=0.2).apply(folder / 'base', folder / 'out', threads=1)\n"
        "done.append(1); thread.join()\n"
        "print((peak[0] - before) / 1024)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert size > 90
    assert float(result.stdout.splitlines()[-1]) < 30


# Bad input.


def test_bad_input_is_refused_by_name(models: TinyModels) -> None:
    a, b, c = some_vectors()
    with pytest.raises(MissingNameError, match=r"no merging rule 'tise'. Did you mean 'ties'\?"):
        combine([a, b], "tise")
    with pytest.raises(BadValueError, match=r"rule=\[0.5, 0.5\] must be the name.*Weights are given as weights="):
        combine([a, b], [0.5, 0.5])  # type: ignore[arg-type]
    for wrong in ("x", float("nan"), True):
        with pytest.raises(BadValueError, match=f"outside={wrong!r} must be a finite number"):
            combine([a, b], "layers", schedule=[1.0], outside=wrong)
    with pytest.raises(BadValueError, match="rescale='no' must be True or False"):
        combine([a, b], "dare", rescale="no")
    with pytest.raises(BadValueError, match="seed='x' must be a whole number"):
        combine([a, b], "dare", seed="x")
    with pytest.raises(BadValueError, match="at least 2 vectors, and there is 1"):
        combine([a], "ties")
    with pytest.raises(BadValueError, match="at least 1 vector, and there are 0"):
        combine([], "dare")
    with pytest.raises(BadValueError, match="takes a list of task vectors, not a TaskVector"):
        combine(a)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="not a str"):
        combine([a, "b"])  # type: ignore[list-item]
    with pytest.raises(BadValueError, match="3 vectors and 2 weights"):
        combine([a, b, c], weights=[1.0, 1.0])
    for weights in (0.5, "abc", {1.0, 2.0, 3.0}):
        with pytest.raises(BadValueError, match="must be a list of numbers, one for each vector"):
            combine([a, b, c], weights=weights)  # type: ignore[arg-type]
    assert combine([a, b], weights=torch.tensor([1.0, -0.5])) == combine([a, b], weights=[1.0, -0.5])  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="weight of nan"):
        combine([a, b], weights=[1.0, float("nan")])
    with pytest.raises(MissingNameError, match=r"'ties' has no option 'densty'. Did you mean 'density'\?"):
        combine([a, b], "ties", densty=0.5)
    with pytest.raises(MissingNameError, match="It takes no options"):
        combine([a, b], "sum", density=0.5)
    with pytest.raises(BadValueError, match="needs schedule="):
        combine([a, b], "layers")
    with pytest.raises(BadValueError, match="2 schedules for 3 vectors"):
        combine([a, b, c], "layers", schedule=[[1.0], [1.0]])
    with pytest.raises(BadValueError, match="list of numbers"):
        combine([a, b, c], "layers", schedule="up")
    for density in (0.0, 1.5, -0.2, float("nan"), "0.5", True):
        for rule in ("ties", "dare", "magnitude", "breadcrumbs"):
            with pytest.raises(BadValueError, match="above 0 and at most 1"):
                combine([a, b], rule, density=density)
    with pytest.raises(BadValueError, match="density has 3 numbers for 2 vectors"):
        combine([a, b], "ties", density=[0.1, 0.2, 0.3])
    with pytest.raises(MissingNameError, match=r"no normalize='counts'. Did you mean 'count'\?"):
        combine([a, b], "ties", normalize="counts")
    with pytest.raises(BadValueError, match=r"gamma=1\.0"):
        combine([a, b], "breadcrumbs", gamma=1.0)
    with pytest.raises(BadValueError, match="between two vectors, not 3"):
        combine([a, b, c], "interpolate")
    with pytest.raises(BadValueError, match="rank=0"):
        combine([a, b], "tsv", rank=0)
    with pytest.raises(BadValueError, match="not 0"):
        combine([a, b], "weighted", [0.0, 0.0])


def test_vectors_that_do_not_belong_together_are_refused(models: TinyModels) -> None:
    phi = models.pair("phi").vector()
    with pytest.raises(MismatchError, match=r"different architectures \(PhiForCausalLM, LlamaForCausalLM\)"):
        combine([phi, models.pair("llama").vector()])
    with pytest.raises(MismatchError, match=r"shapes \[20\] and \[24\].*vocabulary sizes differ"):
        combine([phi, models.pair("phi", vocab_size=24).vector()])
    with pytest.raises(MismatchError, match="none of the parameters"):
        combine([TaskVector.from_tensors({"x": torch.ones(2)}), TaskVector.from_tensors({"y": torch.ones(2)})])


def test_vectors_of_different_tokenizers_are_refused(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    vectors = {}
    for name, tokens in {"a": ["x", "y"], "b": ["y", "x"], "c": ["x", "y"]}.items():
        shutil.copytree(pair.tuned, tmp_path / name)
        tokenizer = {"model": {"vocab": {t: n for n, t in enumerate(tokens)}}, "padding": name}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        vectors[name] = TaskVector.from_finetuned(pair.base, tmp_path / name)
    combine([vectors["a"], vectors["c"], pair.vector()])
    with pytest.raises(MismatchError, match="a and b come from models of different tokenizers"):
        combine([vectors["a"], vectors["b"]])
    # SentencePiece's own file tells nothing of a list of tokens, but of another such file.
    for name in ("d", "e"):
        shutil.copytree(pair.tuned, tmp_path / name)
        (tmp_path / name / "tokenizer.model").write_bytes(name.encode())
        vectors[name] = TaskVector.from_finetuned(pair.base, tmp_path / name)
    combine([vectors["a"], vectors["d"]])
    with pytest.raises(MismatchError, match="d and e come from models of different tokenizers"):
        combine([vectors["a"], vectors["d"], vectors["e"]])


def test_what_is_not_finite_is_refused_by_name() -> None:
    good = TaskVector.from_tensors({"w": torch.ones(4, 4)}, name="good")
    for value in (float("nan"), float("inf")):
        bad = TaskVector.from_tensors({"w": torch.full((4, 4), value)}, name="bad")
        for rule in sorted(rules()):
            if rule == "rows":
                continue  # of MLPs alone
            with pytest.raises(BadValueError, match="w: the weights contain NaN"):
                combine([good, bad], rule, **OPTIONS.get(rule, {})).dense("w")


def test_a_computed_vector_cannot_be_a_reference(models: TinyModels, tmp_path: Path) -> None:
    v = models.pair("phi").vector()
    with pytest.raises(UnsupportedError, match="computed by a merging rule"):
        combine([v, v.named("again")], "ties").save(tmp_path / "v", reference=True)
