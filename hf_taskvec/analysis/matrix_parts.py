"""Matrices that are put together from parts: Q, K and V one above the other, or some rows of a fused QKV.

A part is given in tiles, or as its factors if it is low-rank, and never as a whole.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_taskvec.algebra.deltas import Dense
from hf_taskvec.algebra.low_rank import stacked_factors
from hf_taskvec.algebra.measures import tiles_of
from hf_taskvec.algebra.sources import rows_of
from hf_taskvec.algebra.sums import Term

#: Elements of a tile: one product with it and its return stay in the cache.
MATRIX_TILE = 1 << 19


@dataclass(frozen=True)
class MatrixPart:
    """Some outputs of a matrix: rows, or columns where it is stored transposed; all of them, if `index` is None."""

    name: str
    terms: tuple[Term, ...]
    transposed: bool = False
    index: tuple[range, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, however the matrix is stored."""
        rows, columns = self.terms[0].delta.shape
        outputs, inputs = (columns, rows) if self.transposed else (rows, columns)
        return (outputs if self.index is None else sum(map(len, self.index)), inputs)

    @property
    def rank(self) -> int | None:
        """The width of its factors side by side; None if it is not low-rank."""
        widths = [f.left.shape[1] for term in self.terms if (f := term.delta.factors) is not None]
        return sum(widths) if len(widths) == len(self.terms) else None

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two factors of a low-rank part, outputs along the rows of the first."""
        left, right = stacked_factors(self.terms)
        if self.transposed:
            left, right = right.T, left.T
        return (left if self.index is None else torch.cat([left[r.start : r.stop] for r in self.index])), right

    def tiles(self) -> Iterator[torch.Tensor]:
        """Pieces, each with all inputs; of a transposed matrix, pieces of its transpose with all outputs.

        In fp32, or as they are stored where nothing has to be calculated.
        """
        for start, stop, rows in self._rows():
            if self.index is None:
                yield rows
            elif self.transposed:
                yield torch.cat([rows[:, r.start : r.stop] for r in self.index], dim=1)
            else:
                inside = [range(max(r.start, start), min(r.stop, stop)) for r in self.index]
                kept = [rows[r.start - start : r.stop - start] for r in inside if len(r)]
                if kept:
                    yield torch.cat(kept)

    def _rows(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Runs of rows as they are stored.

        This is the one place of the analysis that makes a matrix's numbers beside `Sum`, which makes the bits of
        weights. A norm does not depend on those bits, but each step of a search goes over all numbers: so what is
        stored is taken as it is, and a sum of terms is made in fp32, in tiles that stay in a core's cache
        (`measures.tiles_of`).
        """
        match self.terms:
            case (Term(1.0, Dense((source,))),):
                opened, step = source.readable(), max(1, MATRIX_TILE // max(1, source.shape[1]))
                for start in range(0, source.shape[0], step):
                    stop = min(start + step, source.shape[0])
                    yield start, stop, rows_of(opened, start, stop)
            case _:
                for start, stop, stacked in tiles_of([self.terms], torch.float32):
                    yield start, stop, stacked[0]


def shape_of(parts: Sequence[MatrixPart]) -> tuple[int, int]:
    """Outputs and inputs of parts one above the other."""
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def tiles_of_parts(parts: Sequence[MatrixPart]) -> Iterator[torch.Tensor]:
    """The tiles of the parts, one after the other: a matrix that is stored transposed is one part alone."""
    return itertools.chain.from_iterable(part.tiles() for part in parts)


def are_factors_smaller(parts: Sequence[MatrixPart]) -> bool:
    """Whether all parts are low-rank, and their factors narrower than the matrix that they make."""
    ranks = [part.rank for part in parts]
    return None not in ranks and sum(filter(None, ranks)) < min(shape_of(parts))
