"""A change to some columns of a matrix: the neurons of a layer that is stored transposed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from hf_taskvec.algebra.deltas import Delta, DeltaWriter, Dense, Difference, LowRank, ReadSource, read_delta
from hf_taskvec.algebra.sources import InMemory, RowsOf, Source, Transposed, are_rows
from hf_taskvec.errors import MismatchError, some
from hf_taskvec.typed_values import typed


@dataclass(frozen=True)
class Columns(Delta):
    """A change to some columns of a matrix of `n_columns`, in the order of `inner`'s; the others stay as they are."""

    kind = "columns"

    index: tuple[int, ...]
    inner: Delta
    n_columns: int

    def __post_init__(self) -> None:
        shape = self.inner.shape
        if len(shape) != 2 or shape[1] != len(self.index) or not are_rows(self.index, self.n_columns):
            raise MismatchError(
                f"a change to columns {some(map(str, self.index))} of {self.n_columns} has the shape {list(shape)}: "
                "there must be as many, within the matrix, and each once."
            )

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return (self.inner.shape[0], self.n_columns)

    @property
    @override
    def sources(self) -> tuple[Source, ...]:
        return self.inner.sources

    @property
    @override
    def rank(self) -> int:
        return self.inner.rank

    @override
    def changes(self, start: int, stop: int) -> bool:
        return self.inner.changes(start, stop)

    @override
    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        columns = torch.tensor(self.index, dtype=torch.int64, device=out.device)
        changed = out.index_select(1, columns)
        self.inner.add_rows(changed, start, stop, weight)
        out.index_copy_(1, columns, changed)

    @override
    def owned(self, name: str) -> Delta | None:
        inner = self.inner.owned(name)
        return inner and Columns(self.index, inner, self.n_columns)

    @override
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any] | None:
        inner = self.inner.to_record(key, name, writer)
        return inner and {"kind": self.kind, "columns": list(self.index), "of": self.n_columns, "change": inner}

    @classmethod
    @override
    def from_record(cls, entry: Mapping[str, Any], source: ReadSource) -> Delta:
        index = tuple(typed(int, column, "columns") for column in entry["columns"])
        return cls(index, read_delta(entry["change"], source), typed(int, entry["of"], "of"))


def only_columns(delta: Delta, kept: tuple[int, ...]) -> Delta:
    """The change to the columns `kept` alone. Factors stay factors; stored tensors are read when they are used.

    Of what has no columns of its own to read (DoRA, the result of a rule) they are computed, in fp64.
    """

    def columns_of(source: Source) -> Source:
        return Transposed(RowsOf(Transposed(source), kept))

    match delta:
        case LowRank(left, right, scaling):
            whole = right.read()
            only = torch.zeros_like(whole)
            only[:, list(kept)] = whole[:, list(kept)]
            return LowRank(left, InMemory(only), scaling)
        case Dense(tensors):
            inner: Delta = Dense(tuple(map(columns_of, tensors)))
        case Difference(base, tuned):
            inner = Difference(columns_of(base), columns_of(tuned))
        case _:
            change = torch.zeros(delta.shape, dtype=torch.float64, device="cpu")
            delta.add_rows(change, 0, delta.shape[0], 1.0)
            inner = Dense((InMemory(change[:, list(kept)].contiguous()),))
    return Columns(kept, inner, delta.shape[1])
