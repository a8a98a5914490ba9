"""Changes of every kind, each with its dense value worked out here, by other means."""

from collections.abc import Callable

import torch

from hf_taskvec.algebra.deltas import Delta, Dense, Difference, DoRA, LowRank, Rows
from hf_taskvec.algebra.sources import InMemory, RowsOf, Transposed
from hf_taskvec.algebra.sparse_tensors import Sparse

ROWS, COLUMNS = 6, 5
SHAPE = (ROWS, COLUMNS)


def _tensor(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _dense(g: torch.Generator) -> tuple[Delta, torch.Tensor]:
    tensor = _tensor(g, *SHAPE, dtype=torch.bfloat16)
    return Dense((InMemory(tensor),)), tensor.double()


def _high_low(g: torch.Generator) -> tuple[Delta, torch.Tensor]:
    high, low = _tensor(g, *SHAPE), _tensor(g, *SHAPE) * 2**-24
    return Dense((InMemory(high), InMemory(low))), high.double() + low.double()


def _sparse_low(g: torch.Generator) -> tuple[Delta, torch.Tensor]:
    high, low = _tensor(g, *SHAPE), torch.zeros(SHAPE)
    low.view(-1)[[3, 17, 18]] = torch.tensor([2.0**-30, -(2.0**-28), -0.0])
    counts, offsets = torch.tensor([3], dtype=torch.int32), torch.tensor([3, 17, 18], dtype=torch.uint16)
    sparse = Sparse(SHAPE, InMemory(counts), InMemory(offsets), InMemory(low.view(-1)[[3, 17, 18]]))
    return Dense((InMemory(high), sparse)), high.double() + low.double()


def _difference(g: torch.Generator) -> tuple[Delta, torch.Tensor]:
    base, tuned = _tensor(g, *SHAPE, dtype=torch.bfloat16), _tensor(g, *SHAPE)
    return Difference(InMemory(base), InMemory(tuned)), tuned.double() - base.double()


def _low_rank(g: torch.Generator) -> tuple[Delta, torch.Tensor]:
    left, right = _tensor(g, ROWS, 2, dtype=torch.float16), _tensor(g, 2, COLUMNS, dtype=torch.bfloat16)
    return LowRank(InMemory(left), InMemory(right), 0.75), 0.75 * left.double() @ right.double()


def _transposed(g: torch.Generator) -> tuple[Delta, torch.Tensor]:
    down, up = _tensor(g, 3, ROWS), _tensor(g, COLUMNS, 3)
    return LowRank(Transposed(InMemory(down)), Transposed(InMemory(up)), -2.0), -2.0 * down.double().T @ up.double().T


def _some_rows(g: torch.Generator) -> tuple[Delta, torch.Tensor]:
    base, tuned, index = _tensor(g, *SHAPE), _tensor(g, 3, COLUMNS), (4, 0, 2)
    value = torch.zeros(SHAPE, dtype=torch.float64)
    for position, row in enumerate(index):
        value[row] = tuned[position].double() - base[row].double()
    return Rows(index, Difference(RowsOf(InMemory(base), index), InMemory(tuned)), ROWS), value


def _first_rows(g: torch.Generator) -> tuple[Delta, torch.Tensor]:
    tensor = _tensor(g, 8, COLUMNS)
    value = torch.zeros(SHAPE, dtype=torch.float64)
    value[1:4] = tensor[1:4].double()
    return Rows(range(1, 4), Dense((RowsOf(InMemory(tensor), range(1, 4)),)), ROWS), value


def _dora(axis: int) -> Callable[[torch.Generator], tuple[Delta, torch.Tensor]]:
    def make(g: torch.Generator) -> tuple[Delta, torch.Tensor]:
        base, left, right = _tensor(g, *SHAPE), _tensor(g, ROWS, 2), _tensor(g, 2, COLUMNS)
        magnitude = _tensor(g, SHAPE[axis]).abs() + 0.5
        low_rank = LowRank(InMemory(left), InMemory(right), 0.5)
        direction = base.double() + 0.5 * left.double() @ right.double()
        gain = magnitude.double() / direction.norm(dim=1 - axis)
        merged = direction * (gain[:, None] if axis == 0 else gain[None, :])
        return DoRA(InMemory(base), low_rank, InMemory(magnitude), axis), merged - base.double()

    return make


KINDS = {
    "dense": _dense,
    "high and low": _high_low,
    "high and sparse low": _sparse_low,
    "difference": _difference,
    "low rank": _low_rank,
    "transposed low rank": _transposed,
    "scattered rows": _some_rows,
    "a range of rows": _first_rows,
    "DoRA of Linear": _dora(0),
    "DoRA of Conv1D": _dora(1),
}
