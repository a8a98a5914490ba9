"""Both norms of matrices made of parts against dense fp64: held, in tiles, or as factors."""

import math
import threading

import pytest
import torch

from hf_taskvec import TaskVector
from hf_taskvec.algebra.tiles import tile_rows
from hf_taskvec.analysis import matrix_norms, matrix_parts, ranks, stable_ranks
from hf_taskvec.errors import BadValueError
from hf_taskvec.threads import workers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [0, 1 << 28])
@pytest.mark.parametrize("shape", [(700, 900), (900, 700), (1100, 3)])
def test_norms_are_the_same_in_one_tile_or_many(
    monkeypatch: pytest.MonkeyPatch, held: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Held or made anew in each step, as stored or calculated; a flat spectrum is the hard case."""
    monkeypatch.setattr(matrix_norms, "_HELD_BYTES", held)
    monkeypatch.setattr(matrix_parts, "MATRIX_TILE", 1 << 16)
    monkeypatch.setattr(matrix_norms, "MATRIX_TILE", 1 << 16)
    torch.manual_seed(0)
    matrix = torch.randn(shape).to(dtype)
    assert tile_rows(shape) < shape[0] or shape[1] == 3
    name = "model.layers.0.self_attn.o_proj.weight"
    stored = TaskVector.from_tensors({name: matrix})
    for vector, factor in ((stored, 1.0), (3 * stored, 3.0), (stored + 1e-9 * stored, 1.0)):
        (found,) = stable_ranks(vector, tolerance=1e-6).matrices
        assert found.spectral == pytest.approx(factor * torch.linalg.matrix_norm(matrix.double(), 2).item(), rel=1e-3)
        assert found.frobenius == pytest.approx(factor * matrix.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("held", [0, 1 << 28])
def test_the_default_dtype_changes_nothing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, held: int) -> None:
    monkeypatch.setattr(matrix_norms, "_HELD_BYTES", held)
    matrix = 20 * torch.randn(400, 350, generator=torch.Generator().manual_seed(0))
    vector = TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": matrix})
    expected = stable_ranks(vector)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert stable_ranks(vector) == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("shape", [(1, 500_000), (500_000, 1), (400, 3000), (3000, 400)])
def test_a_matrix_of_rank_one_has_stable_rank_one(shape: tuple[int, int]) -> None:
    """Equal numbers are what sums in fp32 are worst at; a stable rank is never below 1."""
    vector = TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": torch.full(shape, 0.1)})
    (found,) = stable_ranks(vector).matrices
    assert 1 <= found.stable_rank < 1 + 1e-3
    assert found.frobenius == pytest.approx(torch.tensor(0.1).item() * math.prod(shape) ** 0.5, rel=1e-9)


def test_a_matrix_without_columns_has_norm_zero() -> None:
    (found,) = stable_ranks(
        TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": torch.zeros(5, 0)})
    ).matrices
    assert (found.frobenius, found.spectral) == (0, 0) and math.isnan(found.stable_rank)


def test_low_rank_norms_are_exact_and_so_are_those_of_stacks() -> None:
    torch.manual_seed(0)
    names = [f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qkv"]
    factors = {name: (torch.randn(40, 3), torch.randn(3, 30)) for name in names}
    vector = TaskVector.from_tensors(factors)
    found = {m.kind: m for m in stable_ranks(vector).matrices}
    stacked = torch.cat([vector.dense(name, torch.float64) for name in names])
    assert found["QKV"].spectral == pytest.approx(torch.linalg.matrix_norm(stacked, 2).item(), rel=1e-12)
    assert found["QKV"].frobenius == pytest.approx(stacked.norm().item(), rel=1e-12)


def test_the_broken_part_of_a_stack_is_named() -> None:
    weights = {f"model.layers.0.mlp.{name}_proj.weight": torch.ones(8, 6) for name in ("gate", "up")}
    weights["model.layers.0.mlp.up_proj.weight"][3, 2] = float("nan")
    with pytest.raises(BadValueError, match=r"up_proj.weight: the weights contain NaN"):
        stable_ranks(TaskVector.from_tensors(weights))


def test_each_thread_uses_its_own_memory_again() -> None:
    buffer = matrix_norms.MatrixBuffer()
    first = buffer.of((30, 20))
    assert first.shape == (30, 20)
    assert buffer.of((10, 50)).data_ptr() == first.data_ptr()
    assert buffer.of((40, 50)).shape == (40, 50)
    others = []
    thread = threading.Thread(target=lambda: others.append(buffer.of((3, 2)).data_ptr()))
    thread.start()
    thread.join()
    assert others != [buffer.of((3, 2)).data_ptr()]


@pytest.mark.parametrize(("total", "expected"), [(10_000, 1), (4 * 60 * 50 * 3, 3), (1 << 29, 8)])
def test_few_threads_hold_large_matrices(monkeypatch: pytest.MonkeyPatch, total: int, expected: int) -> None:
    """What all threads hold stays within a budget, however many torch has."""
    used = []

    def watched(threads: int) -> object:
        used.append(threads)
        return workers(1)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(ranks, "workers", watched)
    monkeypatch.setattr(matrix_norms, "_TOTAL_BYTES", total)
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(3)]
    dense = TaskVector.from_tensors({name: torch.ones(60, 50) for name in names})
    low = TaskVector.from_tensors({name: (torch.ones(60, 1), torch.ones(1, 50)) for name in names})
    for vector in (dense, low):
        stable_ranks(vector, progress=False)
    monkeypatch.setattr(matrix_norms, "_HELD_BYTES", 0)
    stable_ranks(dense, progress=False)
    assert used == [expected, 8, 8]  # factors and tiles are not held
