"""A vector without the span of others, against least squares and projections by numpy, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.example_vectors import LARGE, some_adapters, some_vectors
from support.kinds_of_change import KINDS
from support.random_vectors import random_vector
from support.tiny_models import DTYPES, TinyModels, added, low_rank, make, tensors, tuned_copy

from hf_taskvec import TaskVector, combine, rules
from hf_taskvec.algebra import projection
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError
from hf_taskvec.publishing.notation import evaluate_expression

Kind = Literal["dense", "low-rank", "mixed"]
Side = Literal["both", "left", "right"]
SIDES: tuple[Side, ...] = ("both", "left", "right")
MATRIX, BIAS = "model.layers.0.mlp.fc1.weight", "model.layers.1.mlp.fc1.bias"


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def drawn(seed: int, shape: tuple[int, ...], kind: Kind, dtype: torch.dtype, rank: int = 2) -> TaskVector:
    """A vector of one parameter; what is not a matrix is dense."""
    g = torch.Generator().manual_seed(seed)
    dense = TaskVector.from_tensors({"w": draw(g, *shape, dtype=dtype)}, name=f"d{seed}")
    if kind == "dense" or len(shape) != 2 or 0 in shape:
        return dense
    factors = (draw(g, shape[0], rank, dtype=dtype), draw(g, rank, shape[1], dtype=dtype))
    low = TaskVector.from_tensors({"w": factors}, name=f"l{seed}")
    return low if kind == "low-rank" else dense - 0.5 * low


def numbers(vector: TaskVector, shape: tuple[int, ...], name: str = "w") -> np.ndarray[Any, Any]:
    dense = vector.dense(name, "float64") if name in vector else torch.zeros(shape, dtype=torch.float64)
    return dense.numpy()


def left_by_least_squares(v: np.ndarray[Any, Any], others: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    columns = np.stack([each.ravel() for each in others], axis=1)
    lengths = np.linalg.norm(columns, axis=0)
    columns = columns / np.where(lengths > 0, lengths, 1.0)
    return v - (columns @ np.linalg.lstsq(columns, v.ravel(), rcond=1e-9)[0]).reshape(v.shape)


KIND = st.sampled_from(["dense", "low-rank", "mixed"])
SHAPE = st.sampled_from([(), (0,), (4, 0), (1,), (9,), (5, 1), (6, 5), (12, 7), (2, 3, 4)])
DTYPE = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])


@settings(max_examples=120)
@given(SHAPE, KIND, st.lists(KIND, min_size=1, max_size=4), DTYPE, st.booleans(), st.integers(0, 10_000))
def test_by_tensor_is_least_squares(
    shape: tuple[int, ...], kind: Kind, kinds: list[Kind], dtype: torch.dtype, dependent: bool, seed: int
) -> None:
    v = drawn(seed, shape, kind, dtype)
    others = [drawn(seed + n, shape, each, dtype) for n, each in enumerate(kinds, 1)]
    if dependent:  # some of them twice, of another length, or zero
        others = [*others, 3e4 * others[0], sum(others[1:], start=-1e-3 * others[0]), 0 * others[0]]
    left = v.without(others)
    size = v.norm()
    expected = left_by_least_squares(numbers(v, shape), [numbers(each, shape) for each in others])
    assert np.linalg.norm(numbers(left, shape) - expected) <= 1e-11 * size
    for other in others:
        assert abs(left.dot(other)) <= 1e-13 * size * other.norm()
    assert (left.without(others) - left).norm() <= 1e-13 * size
    if all(each.is_low_rank for each in (v, *others)):
        assert left.is_low_rank


@settings(max_examples=60)
@given(SHAPE, st.lists(KIND, min_size=1, max_size=4), DTYPE, st.integers(0, 10_000))
def test_nothing_is_left_of_what_is_in_the_span(
    shape: tuple[int, ...], kinds: list[Kind], dtype: torch.dtype, seed: int
) -> None:
    others = [drawn(seed + n, shape, each, dtype) for n, each in enumerate(kinds, 1)]
    v = sum((weight * other for weight, other in zip((0.3, -7.0, 1e-4, 2.0), others, strict=False)), TaskVector({}))
    assert len(v.without(others)) == 0 or 0 in shape
    rounded = TaskVector.from_tensors({"w": v.dense("w", "float64")}, name="stored")
    assert rounded.without(others).norm() <= 1e-12 * rounded.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_change_is_projected(kind: str) -> None:
    g = torch.Generator().manual_seed(3)
    delta, value = KINDS[kind](g)
    v = TaskVector({"w": [Term(2.0, delta)]})
    others = [KINDS[each](g) for each in KINDS]
    for taken in (others[:3], others[3:5], others[5:]):
        left = v.without([TaskVector({"w": [Term(1.0, other)]}) for other, _ in taken])
        expected = left_by_least_squares(2.0 * value.numpy(), [each.numpy() for _, each in taken])
        assert np.allclose(numbers(left, v.shape("w")), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["dense", "low-rank"])
@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-4])
def test_others_that_are_nearly_the_same_cost_another_pass_and_no_digits(
    kind: Kind, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    columns = projection._columns
    monkeypatch.setattr(projection, "_columns", lambda vectors: (passes.append(1), columns(vectors))[1])
    v, u, noise = (drawn(seed, (40, 30), kind, torch.float64) for seed in range(3))
    others = [u, u + apart * noise]
    left = v.without(others)
    assert len(passes) == (1 if apart == 1.0 else 2)
    for other in (*others, noise):
        assert abs(left.dot(other)) <= 4e-16 / apart * v.norm() * other.norm()


def test_others_that_differ_by_rounding_count_as_one() -> None:
    v, u = some_vectors(2)
    again = TaskVector.from_tensors({n: (0.3 * u).dense(n) for n in u}, name="rounded")
    left = v.without([u, again])
    assert max(abs(term.weight) for name in left for term in left[name].terms) < 10
    assert abs(left.cosine(u)) < 1e-7


def test_a_sum_that_reads_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of factors no dense matrix is formed, and the result is made of the terms that were given."""
    adapters = some_adapters()

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a dense matrix was formed")

    with monkeypatch.context() as patch:
        patch.setattr(Sum, "rows", refuse)
        left = adapters[0].without(adapters[1:])
        assert abs(left.dot(adapters[1])) < 1e-13 * left.norm() * adapters[1].norm()
    given_deltas = {term.delta for vector in adapters for name in vector for term in vector[name].terms}
    assert {term.delta for name in left for term in left[name].terms} == given_deltas
    assert all(left[name].terms[0].weight == 1.0 for name in left)


def test_a_parameter_of_many_tiles_is_projected() -> None:
    v, *others = some_vectors(3, shape=LARGE)
    left = v.without(others)
    expected = left_by_least_squares(numbers(v, LARGE, MATRIX), [numbers(each, LARGE, MATRIX) for each in others])
    assert np.allclose(numbers(left, LARGE, MATRIX), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("by", ["tensor", "subspace"])
def test_parameters_that_only_one_side_changes(by: Literal["tensor", "subspace"]) -> None:
    v, u = some_vectors(2)
    for other in (u.filter(include=BIAS), u.filter(include=BIAS) + random_vector(0, "dense").filter(include="*fc2*")):
        left = v.without(other, by=by)
        assert list(left) == list(v) and left[MATRIX].terms == v[MATRIX].terms
        assert abs(left.dot(other, BIAS)) < 1e-13
    assert list(v.filter(include=BIAS).without(u)) == [BIAS]
    assert len((v - v).without(u)) == 0


def test_a_vector_without_itself_is_empty() -> None:
    v, u = some_vectors(2)
    assert len(v.without(v)) == 0
    assert len((-2 * v).without([u, 0.3 * v])) == 0
    assert v.without(0 * u) == v


def test_the_first_weight_scales_and_the_others_do_not_matter() -> None:
    v, u, t = some_vectors()
    left = combine([v, u, t], "without", [-0.6, 3.0, -5.0])
    for name in v:
        assert torch.equal(left.dense(name, "float64"), (-0.6 * v.without([u, t])).dense(name, "float64"))
    assert combine([v, u, t], "without", [1.0, 0.0, 1.0]) == v.without(t)
    assert len(combine([v, u], "without", [0.0, 1.0])) == 0


# By subspace.


def projections(others: list[np.ndarray[Any, Any]], ranks: list[int]) -> tuple[np.ndarray[Any, Any], ...]:
    lefts, rights = [], []
    for each, rank in zip(others, ranks, strict=True):
        u, _, v = np.linalg.svd(each)
        lefts.append(u[:, :rank])
        rights.append(v[:rank].T)
    found = []
    for vectors in (np.concatenate(lefts, axis=1), np.concatenate(rights, axis=1)):
        found.append(vectors @ np.linalg.pinv(vectors, rcond=1e-9))
    return tuple(found)


def left_by_projection(
    v: np.ndarray[Any, Any], p: np.ndarray[Any, Any], q: np.ndarray[Any, Any], side: str
) -> np.ndarray[Any, Any]:
    return v - {"both": p @ v @ q, "left": p @ v, "right": v @ q}[side]


@settings(max_examples=80)
@given(
    st.sampled_from([(12, 7), (9, 20), (1, 6), (8, 8)]),
    KIND,
    st.lists(KIND, min_size=1, max_size=3),
    DTYPE,
    st.integers(1, 3),
    st.sampled_from(SIDES),
    st.integers(0, 10_000),
)
def test_by_subspace_is_the_projection(
    shape: tuple[int, int], kind: Kind, kinds: list[Kind], dtype: torch.dtype, rank: int, side: Side, seed: int
) -> None:
    v = 0.5 * drawn(seed, shape, kind, dtype)
    others = [drawn(seed + n, shape, each, dtype) for n, each in enumerate(kinds, 1)]
    left = v.without(others, by="subspace", rank=rank, side=side)
    ranks = [min(rank, other.rank("w")) for other in others]
    p, q = projections([numbers(each, shape) for each in others], ranks)
    expected = left_by_projection(numbers(v, shape), p, q, side)
    assert np.linalg.norm(numbers(left, shape) - expected) <= 1e-6 * v.norm()
    assert (left.without(others, by="subspace", rank=rank, side=side) - left).norm() <= 1e-6 * v.norm()
    assert left.is_low_rank == v.is_low_rank
    if v.is_low_rank and 2 * v.rank("w") <= min(shape):
        assert left.rank("w") == v.rank("w") * (2 if side == "both" else 1)
    if not v.is_low_rank:  # untouched, beside a correction
        assert left["w"].terms[: len(v["w"].terms)] == v["w"].terms


@pytest.mark.parametrize("side", SIDES)
def test_factors_in_the_subspace_leave_nothing(side: Side) -> None:
    a, b, c = some_adapters()
    left = (2 * a - b).without([a, b, c], by="subspace", side=side)
    assert left.norm() <= 1e-12 * a.norm()
    dense = TaskVector.from_tensors({name: (2 * a - b).dense(name) for name in a}, name="stored")
    assert dense.without([a, b, c], by="subspace", side=side).norm() <= 1e-6 * a.norm()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["dense", "low-rank"])
def test_no_direction_is_made_up(kind: Kind, side: Side) -> None:
    """Others that are zero, the same, or of a lower rank than was asked for have no more directions."""
    shape = (20, 16)
    v, u = drawn(0, shape, kind, torch.float32), drawn(1, shape, "low-rank", torch.float32)
    zero = TaskVector.from_tensors({"w": (torch.zeros(20, 3), torch.ones(3, 16))}, name="zero")
    stored = TaskVector.from_tensors({"w": u.dense("w", "float64")}, name="stored")
    p, q = projections([numbers(u, shape)], [2])
    expected = left_by_projection(numbers(v, shape), p, q, side)
    for others in ([u, u], [zero, u], [stored, u], [2 * stored]):
        left = v.without(others, by="subspace", rank=5, side=side)
        assert np.allclose(numbers(left, shape), expected, rtol=0, atol=2e-6), others
    nothing = TaskVector.from_tensors({"w": (torch.ones(20, 0), torch.ones(0, 16))}, name="nothing")
    for none in (zero, nothing):
        assert np.allclose(numbers(v.without(none, by="subspace", side=side), shape), numbers(v, shape), atol=1e-6)
    assert v.without(nothing, by="subspace", side=side) == v


def test_by_subspace_reads_nothing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    v, *others = (vector.filter(include=MATRIX) for vector in some_vectors())

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a tensor was read")

    with monkeypatch.context() as patch:
        patch.setattr("hf_taskvec.algebra.sources.InMemory.read", refuse)
        left = v.without(others, by="subspace", rank=2)
        with pytest.raises(AssertionError, match="a tensor was read"):
            v.without(others)
    assert left.rank(MATRIX) == 30 and left.norm() < v.norm()


def test_what_is_read_and_written_by_the_others_is_left_alone() -> None:
    """For inputs in the others' row space, and for outputs in their column space, the edit does nothing."""
    tau, kept = some_vectors(1)[0], some_adapters(1)[0]
    matrix = kept.dense(MATRIX, "float64")
    reads = tau.without(kept.filter(include=MATRIX), by="subspace", side="right").dense(MATRIX, "float64")
    writes = tau.without(kept.filter(include=MATRIX), by="subspace", side="left").dense(MATRIX, "float64")
    x = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (reads @ (matrix.T @ x)).norm() <= 1e-6 * (matrix.T @ x).norm() * tau.norm()
    assert (matrix.T @ writes).norm() <= 1e-6 * matrix.norm() * tau.norm()


# What becomes of it.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [None, *SIDES])
def test_the_same_streamed_live_and_saved(side: Side | None, dtype: torch.dtype, tmp_path: Path) -> None:
    base = make("phi", dtype)
    base.save_pretrained(tmp_path / "base")
    vectors = []
    for name in ("tau", "aligned", "retain"):
        tuned_copy(base, seed=len(vectors)).save_pretrained(tmp_path / name)
        vectors.append(TaskVector.from_finetuned(tmp_path / "base", tmp_path / name))
    tau, aligned, retain = vectors
    left = tau.without([aligned, retain], **({} if side is None else {"by": "subspace", "rank": 2, "side": side}))
    edit = -1.2 * left + 0.5 * (aligned + retain)
    edit.apply(tmp_path / "base", tmp_path / "out", threads=2)
    loaded = TaskVector.load(edit.save(tmp_path / "vector"))
    streamed = tensors(tmp_path / "out")
    with edit.applied_to(base):
        live = {name: value.clone() for name, value in base.state_dict().items()}
    for name, source in tensors(tmp_path / "base").items():
        assert torch.equal(streamed[name].read(), added(loaded, name, source)), name
        assert torch.equal(streamed[name].read(), live[name]), name
    assert loaded.provenance == edit.provenance
    again = evaluate_expression(edit.expression, {"tau": tau, "aligned": aligned, "retain": retain})
    assert again.expression == edit.expression and again == edit


@pytest.mark.parametrize("options", [{}, {"by": "subspace"}, {"by": "subspace", "side": "left"}])
def test_low_rank_vectors_are_exported_as_adapters(options: dict[str, Any], tmp_path: Path) -> None:
    v = low_rank(make("llama")).filter(include="*proj*")
    left = v.without(v.noise(seed=1), **options)
    assert left.norm() > 0 and left.is_low_rank
    again = TaskVector.from_adapter(left.to_adapter(tmp_path / "adapter"))
    for name in left:
        assert torch.allclose(again.dense(name), left.dense(name), atol=1e-6)


def test_the_expression_tells_how_it_was_made() -> None:
    v, u, t = some_vectors()
    assert (-1.2 * v.without([u, t]) + u).expression == "-1.2*combine([v0, v1, v2], 'without') + v1"
    by_subspace = v.without(2 * u, by="subspace", rank=4, side="left")
    assert by_subspace.expression == "combine([v0, 2*v1], 'without', by='subspace', rank=4, side='left')"
    assert str(rules()["without"]).startswith("without(by='tensor', rank=None, side='both'): The first vector without")


# Bad input.


def test_what_makes_no_sense_is_refused(models: TinyModels) -> None:
    v, u = some_vectors(2)
    with pytest.raises(BadValueError, match="at least one other vector"):
        v.without([])
    with pytest.raises(BadValueError, match="'without' combines at least 2 vectors, and there is 1"):
        combine([v], "without")
    with pytest.raises(MissingNameError, match=r"no by='tensors'. Did you mean 'tensor'\?.*one of tensor, subspace"):
        v.without(u, by="tensors")  # type: ignore[arg-type]
    with pytest.raises(MissingNameError, match=r"no side='lefft'. Did you mean 'left'\?"):
        v.without(u, by="subspace", rank=1, side="lefft")  # type: ignore[arg-type]
    for rank in (0, -1, 1.5):
        with pytest.raises(BadValueError, match=f"rank={rank}: the rank must be a whole number"):
            v.without(u, by="subspace", rank=rank)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="rank=3 is an option of by='subspace'"):
        v.without(u, rank=3)
    with pytest.raises(BadValueError, match="side='left' is an option of by='subspace'"):
        v.without(u, side="left")
    with pytest.raises(BadValueError, match=rf"{MATRIX}: v1 is not held as factors.*rank="):
        v.without(u, by="subspace")
    with pytest.raises(BadValueError, match="not a str"):
        v.without(["u"])  # type: ignore[list-item]
    with pytest.raises(MismatchError, match="different architectures"):
        models.pair("phi").vector().without(models.pair("llama").vector())
    with pytest.raises(MismatchError, match=rf"{MATRIX}: shapes \[40, 30\] and \[12, 6\]"):
        v.without(random_vector(0, "dense"))
    with pytest.raises(MismatchError, match="none of the parameters"):
        v.without(TaskVector.from_tensors({"x": torch.ones(2)}))


@pytest.mark.parametrize("kind", ["dense", "low-rank"])
@pytest.mark.parametrize("by", ["tensor", "subspace"])
def test_what_is_not_finite_is_refused_by_name(kind: Kind, by: Literal["tensor", "subspace"]) -> None:
    v = drawn(0, (6, 5), kind, torch.float32)
    bad = TaskVector.from_tensors({"w": (torch.full((6, 1), float("nan")), torch.ones(1, 5))}, name="bad")
    for one, other in ((v, bad), (bad, v)):
        with pytest.raises(BadValueError, match="w: the weights contain NaN"):
            one.without(other, by=by, rank=1 if by == "subspace" else None).dense("w")
