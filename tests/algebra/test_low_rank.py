"""Compression: the best low-rank approximation, from factors and from dense matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.algebra.deltas import Dense, LowRank
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Term


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_spectrum(rows: int, columns: int, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    count = len(values)
    left = torch.linalg.qr(random(rows, count, seed=seed)).Q
    right = torch.linalg.qr(random(columns, count, seed=seed + 1)).Q
    return (left * values) @ right.T


def of_matrix(matrix: torch.Tensor) -> TaskVector:
    return TaskVector({"w": [Term(1.0, Dense((InMemory(matrix),)))]})


def of_factors(*factors: tuple[torch.Tensor, torch.Tensor], weights: tuple[float, ...] = ()) -> TaskVector:
    weights = weights or (1.0,) * len(factors)
    pairs = zip(factors, weights, strict=True)
    return TaskVector({"w": [Term(w, LowRank(InMemory(a), InMemory(b), 0.5)) for (a, b), w in pairs]})


def error(vector: TaskVector, compressed: TaskVector) -> float:
    small = compressed.dense("w", "float64") if "w" in compressed else 0.0
    return (vector.dense("w", "float64") - small).norm().item()


def best(vector: TaskVector, rank: int) -> float:
    return torch.linalg.svdvals(vector.dense("w", "float64"))[rank:].norm().item()


def assert_best(vector: TaskVector, compressed: TaskVector, rank: int, within: float = 1e-5) -> None:
    size = vector.norm()
    assert compressed.rank("w") <= rank
    assert error(vector, compressed) <= best(vector, rank) * (1 + within) + 1e-13 * size
    share = best(vector, rank) ** 2 / size**2
    assert compressed.discarded["w"] == pytest.approx(share, rel=2.5 * within, abs=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 12), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 12))
def test_factors_compress_to_the_best_rank(rows: int, columns: int, ranks: list[int], rank: int) -> None:
    factors = [(random(rows, r, seed=r), random(r, columns, seed=9 + r)) for r in ranks]
    v = of_factors(*factors, weights=(-0.6, 2.0, 0.3)[: len(ranks)])
    assert_best(v, v.compress(rank=rank, dtype="float64"), rank)


@settings(max_examples=40)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 24), st.floats(0.0, 12.0), st.integers(0, 99))
def test_dense_matrices_compress_to_the_best_rank(rows: int, columns: int, rank: int, decay: float, seed: int) -> None:
    """From flat spectra to ones that fall by twelve orders of magnitude."""
    count = min(rows, columns)
    v = of_matrix(with_spectrum(rows, columns, 10 ** -torch.linspace(0, decay, count, dtype=torch.float64), seed))
    assert_best(v, v.compress(rank=rank, dtype="float64"), rank)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (16, 16)])
def test_full_rank_is_exact(shape: tuple[int, int]) -> None:
    dense = of_matrix(random(*shape).float())
    mixed = dense + of_factors((random(shape[0], 2).float(), random(2, shape[1]).float()))
    for v in (dense, mixed):
        full = v.compress(rank=min(shape))
        assert error(v, full) == 0.0
        assert full.discarded["w"] == 0.0
    low = of_factors((random(shape[0], 3).float(), random(3, shape[1]).float()))
    assert error(low, low.compress(rank=3)) == 0.0
    assert low.compress(rank=3)["w"].terms[0].delta is low["w"].terms[0].delta


@pytest.mark.parametrize("option", [{"energy": 1.0}, {"tolerance": 0.0}])
def test_keeping_everything_is_exact_to_rounding(option: dict[str, float]) -> None:
    low = of_factors((random(30, 3), random(3, 20)), (random(30, 3), random(3, 20, seed=5)))
    dense = of_matrix(low.dense("w", "float64"))
    for v in (low, dense):
        kept = v.compress(**option, dtype="float64")
        assert error(v, kept) <= 1e-7 * v.norm()
        assert kept.rank("w") == 3  # both pairs share their left factor
        assert kept.discarded["w"] <= 1e-13


def test_factors_come_in_the_asked_dtype_and_lose_only_its_rounding() -> None:
    v = of_matrix(random(30, 20))
    for dtype, unit in ((torch.float32, 2**-24), (torch.bfloat16, 2**-8)):
        small = v.compress(rank=5, dtype=dtype)
        assert {s.dtype for s in small.sources} == {dtype}
        assert error(v, small) <= best(v, 5) + 4 * unit * v.norm()


@pytest.mark.parametrize("kind", ["factors", "dense"])
def test_energy_and_tolerance_take_the_smallest_rank_that_will_do(kind: str) -> None:
    values = 2.0 ** -torch.arange(8, dtype=torch.float64)
    matrix = with_spectrum(30, 20, values)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    v = of_matrix(matrix) if kind == "dense" else of_factors((u[:, :8] * s[:8] * 2, vh[:8]))
    total = values.square().sum()
    for rank in range(1, 8):
        left = values[rank:].square().sum()
        kept = 1 - (left / total).item()
        assert v.compress(energy=kept - 1e-9).rank("w") == rank
        assert v.compress(energy=kept + 1e-9).rank("w") == rank + 1
        relative = (left / total).sqrt().item()
        by_tolerance = v.compress(tolerance=relative * (1 + 1e-6), dtype="float64")
        assert by_tolerance.rank("w") == rank
        assert error(v, by_tolerance) <= relative * (1 + 1e-5) * v.norm()
        assert by_tolerance.discarded["w"] == pytest.approx(relative**2, rel=1e-5)


# Matrices so wide that the randomised way is taken unless exact=True.

WIDE = (700, 600)


def decaying() -> torch.Tensor:
    """A spectrum like that of a fine-tune: a few large values and a long tail."""
    return with_spectrum(*WIDE, 1.0 / (1 + torch.arange(600, dtype=torch.float64)) ** 1.0)


@pytest.mark.parametrize("transposed", [False, True])
def test_exact_compression_of_wide_matrices_is_the_best_rank(transposed: bool) -> None:
    matrix = decaying().T.contiguous() if transposed else decaying()
    v = of_matrix(matrix)
    assert_best(v, v.compress(rank=20, exact=True, dtype="float64"), 20)
    flat = of_matrix(random(*WIDE))
    assert_best(flat, flat.compress(rank=20, exact=True, dtype="float64"), 20)


def test_the_randomised_way_is_as_good_on_a_decaying_spectrum() -> None:
    v = of_matrix(decaying())
    assert_best(v, v.compress(rank=20, dtype="float64"), 20)
    again = v.compress(rank=20, dtype="float64")
    assert torch.equal(again.dense("w", "float64"), v.compress(rank=20, dtype="float64").dense("w", "float64"))


def test_the_randomised_way_on_noise_is_a_little_worse_and_says_so() -> None:
    v = of_matrix(random(*WIDE))
    small = v.compress(rank=20, dtype="float64")
    assert best(v, 20) <= error(v, small) <= best(v, 20) * 1.005
    assert small.discarded["w"] == pytest.approx(error(v, small) ** 2 / v.norm() ** 2, rel=1e-9)


def test_the_randomised_way_reaches_an_energy_or_a_tolerance() -> None:
    v = of_matrix(decaying())
    values = torch.linalg.svdvals(decaying())
    for option, allowed in (({"energy": 0.97}, 0.03), ({"tolerance": 0.1}, 0.01)):
        small = v.compress(**option, dtype="float64")
        shares = values.square().flip(0).cumsum(0).flip(0) / values.square().sum()
        needed = int((shares > allowed).sum())
        assert error(v, small) ** 2 <= allowed * (1 + 1e-6) * v.norm() ** 2
        assert needed <= small.rank("w") <= needed + 2


def test_a_matrix_of_low_rank_is_found_whole() -> None:
    v = of_matrix(with_spectrum(*WIDE, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)))
    small = v.compress(tolerance=0.0, dtype="float64")
    assert small.rank("w") == 3
    assert error(v, small) <= 1e-7 * v.norm()


# What stays as it is, and what is refused.


def test_biases_stay_dense_and_history_is_kept() -> None:
    v = TaskVector.from_tensors({"w": random(6, 5), "b": random(6), "zero": torch.zeros(4, 4)}, name="v")
    small = v.compress(rank=2)
    assert small["b"] == v["b"]
    assert "zero" not in small
    assert set(small.discarded) == {"w", "zero"}
    assert small.is_low_rank and not v.is_low_rank
    assert small.nbytes < v.nbytes
    assert small.expression == "compress(v, rank=2)"
    assert (2 * small).rank("w") == 2


@pytest.mark.parametrize("shape", [(24, 24), (40, 24), (24, 40)])
@pytest.mark.parametrize("decay", [6, 9, 12])
def test_steep_spectra_are_followed_to_the_end(shape: tuple[int, int], decay: int) -> None:
    v = of_matrix(with_spectrum(*shape, 10 ** -torch.linspace(0, decay, 24, dtype=torch.float64)))
    for rank in range(1, 24):
        assert_best(v, v.compress(rank=rank, dtype="float64"), rank)


def test_the_inputs_are_not_changed() -> None:
    left, right = random(6, 3), random(3, 5)
    v = of_factors((left, right), (left * 2, right))
    v.compress(rank=2)
    assert torch.equal(left, random(6, 3)) and torch.equal(right, random(3, 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of rank=, energy= and tolerance="),
        ({"rank": 2, "energy": 0.5}, "exactly one of"),
        ({"rank": 0}, "rank=0: .*at least 1"),
        ({"rank": -3}, "rank=-3: .*at least 1"),
        ({"rank": 2.5}, "rank=2.5: .*whole number"),
        ({"energy": 0.0}, r"energy=0.0: .*\(0, 1\]"),
        ({"energy": 1.5}, r"energy=1.5: .*\(0, 1\]"),
        ({"energy": float("nan")}, "energy=nan"),
        ({"tolerance": -0.1}, r"tolerance=-0.1: .*\[0, 1\)"),
        ({"tolerance": 1.0}, "tolerance=1.0"),
        ({"rank": 1, "dtype": "int8"}, "int8.*Use one of"),
    ],
)
def test_a_compression_that_makes_no_sense_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(TaskVectorError, match=message):
        of_matrix(random(4, 4)).compress(**options)


def test_the_norm_of_what_an_approximation_lost_is_that_of_fp64() -> None:
    """Nearly equal vectors: squares and products of them would leave no digit."""
    torch.manual_seed(0)
    vector = TaskVector.from_tensors({"w": torch.randn(60, 40), "empty": torch.zeros(3, 0)})
    small = vector.compress(rank=8)
    factors = small["w"].terms[0].delta.sources
    near = TaskVector.from_tensors({"w": (factors[0].read() * (1 + 1e-7), factors[1].read())})
    for lost in (vector - vector.compress(tolerance=0.0, dtype="float32"), vector - small, small - near):
        exact = lost.dense("w", "float64").norm().item()
        assert 0 < lost.norm() == pytest.approx(exact, rel=1e-6)
