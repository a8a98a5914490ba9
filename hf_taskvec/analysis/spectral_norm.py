"""The largest singular value of a matrix that is a product of factors, or comes in tiles.

Of factors it is that of a small core. Of other small matrices it is calculated, of larger ones Lanczos's method looks for
it: in each step every tile is read once, for the product with the matrix and with its transpose together.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_taskvec.algebra.deltas import Dense
from hf_taskvec.algebra.low_rank import stacked_factors
from hf_taskvec.algebra.measures import tiles_of
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.sums import Term

_MOST_STEPS = 64
_SETTLED = 2  # steps with a small error that end the search: one alone may have missed a direction
# Where singular values lie close, as in random matrices, the last digits take many steps. They are not waited for: after
# so many steps the search ends when so many of them in a row each gained less than so many times the tolerance.
_PATIENCE, _QUIET, _SLOW = 14, 3, 30
_NOISE = 1e-6  # a direction that is shorter, beside what it was taken from, is all rounding
_TILE = 1 << 19  # elements of a held matrix in one product and its return: they stay in the cache
_SMALL = 320  # the shorter side of a matrix of which all singular values are calculated
# A matrix of up to so many bytes (in fp32) is held while the steps go over it; a larger one is made anew, tile by tile.
_HELD_BYTES = 1 << 28
_TOTAL_BYTES = 1 << 29  # of what all threads hold

Tiles = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """Some outputs of a matrix: rows, or columns where it is stored transposed; all of them, if `index` is None."""

    name: str
    terms: tuple[Term, ...]
    transposed: bool = False
    index: tuple[range, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.terms[0].delta.shape
        outputs, inputs = (columns, rows) if self.transposed else (rows, columns)
        return (outputs if self.index is None else sum(map(len, self.index)), inputs)

    @property
    def rank(self) -> int | None:
        """The width of its factors side by side; None if it is not low-rank."""
        widths = [f.left.shape[1] for term in self.terms if (f := term.delta.factors) is not None]
        return sum(widths) if len(widths) == len(self.terms) else None

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
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
        match self.terms:
            case (Term(1.0, Dense((source,))),):
                start = 0
                for rows in source.read().split(max(1, _TILE // max(1, source.shape[1]))):
                    yield start, start + len(rows), rows
                    start += len(rows)
            case _:
                for start, stop, stacked in tiles_of([self.terms], torch.float32):
                    yield start, stop, stacked[0]


class Room(threading.local):
    """Memory for one matrix, which a thread keeps for the next: to take it anew costs as much as several products."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.float32)

    def of(self, shape: tuple[int, int]) -> torch.Tensor:
        size = math.prod(shape)
        if len(self._kept) < size:
            self._kept = torch.empty(0, dtype=torch.float32)  # given back before more is taken
            self._kept = torch.empty(size, dtype=torch.float32)
        return self._kept[:size].view(shape)


def norms_of(parts: Sequence[Part], tolerance: float, room: Room) -> tuple[float, float]:
    """The Frobenius and the spectral norm of some parts, one above the other."""
    if _has_factors(parts):
        return _norms_of_factors(parts)
    outputs, inputs = _shape(parts)
    rows, columns = (inputs, outputs) if parts[0].transposed else (outputs, inputs)  # as the tiles come
    whole = room.of((rows, columns)) if _held(parts) else None
    squares, filled = 0.0, 0
    for tile in _all_tiles(parts):
        if whole is not None:
            tile = whole[filled : filled + len(tile)].copy_(tile)
            filled += len(tile)
        squares += _norm(tile) ** 2
    if not math.isfinite(squares):
        broken = (part.name for part in parts if not all(math.isfinite(_norm(tile)) for tile in part.tiles()))
        raise not_finite(next(broken, parts[0].name))
    if squares == 0.0:
        return 0.0, 0.0
    frobenius = math.sqrt(squares)
    # In units of the norm where its fourth power, which the search takes, is out of fp32's range.
    unit = 1.0 if 1e-6 < frobenius < 1e6 else min(max(frobenius, 1e-37), 1e37)
    if whole is not None and unit != 1.0:
        whole /= unit
    pieces = () if whole is None else whole.split(max(1, _TILE // columns))

    def tiles() -> Iterable[torch.Tensor]:
        return pieces or (tile.float() / unit for tile in _all_tiles(parts))

    if whole is not None and min(rows, columns) <= _SMALL and whole.numel() <= _TILE:
        largest = _largest_of_small(whole)
    else:
        largest = _largest(tiles, columns, tolerance)
    return frobenius, min(unit * largest, frobenius)  # rounding may make it larger where it is the only singular value


def threads_for(stacks: Iterable[Sequence[Part]]) -> int:
    """How many threads may measure matrices at once: torch's number, or fewer where those would hold too much."""
    largest = max(map(_held, stacks), default=0)
    return max(1, min(torch.get_num_threads(), _TOTAL_BYTES // max(1, largest)))


def _has_factors(parts: Sequence[Part]) -> bool:
    ranks = [part.rank for part in parts]
    return None not in ranks and sum(filter(None, ranks)) < min(_shape(parts))


def _held(parts: Sequence[Part]) -> int:
    """The bytes of a matrix that is held while it is measured; 0 for one that is not."""
    size = 4 * math.prod(_shape(parts))
    return 0 if _has_factors(parts) or size > _HELD_BYTES else size


def _shape(parts: Sequence[Part]) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def _all_tiles(parts: Sequence[Part]) -> Iterator[torch.Tensor]:
    """The tiles of the parts, one after the other: a matrix that is stored transposed is one part alone."""
    return itertools.chain.from_iterable(part.tiles() for part in parts)


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def _norms_of_factors(parts: Sequence[Part]) -> tuple[float, float]:
    """Exactly: `blockdiag(L_1, …) [R_1; …]` has the singular values of a core made of triangular factors."""
    lefts, rights = zip(*(part.factors() for part in parts), strict=True)
    left = torch.block_diag(*(torch.linalg.qr(each, mode="r").R for each in lefts))
    right = torch.linalg.qr(torch.cat(rights).T, mode="r").R
    core = left @ right.T
    if not bool(core.isfinite().all()):
        raise not_finite(parts[0].name)
    return torch.linalg.matrix_norm(core).item(), torch.linalg.matrix_norm(core, 2).item()


def _largest_of_small(matrix: torch.Tensor) -> float:
    """The largest singular value of a matrix with a short side, exactly."""
    exact = matrix.double()
    gram = exact @ exact.T if len(exact) <= exact.shape[1] else exact.T @ exact
    return torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt().item()


def _largest(tiles: Tiles, size: int, tolerance: float) -> float:
    """The largest singular value, in a growing Krylov space, until it settles or hardly grows.

    Vectors are rows here: products of a tile with a row are faster than with a column, and than with several.
    """
    generator = torch.Generator().manual_seed(0)
    basis, images = torch.zeros(0, size, dtype=torch.float32), torch.zeros(0, dtype=torch.float32)
    gram = torch.zeros(0, 0, dtype=torch.float64)
    found, settled, slow = 0.0, 0, 0
    vector, _ = _beside(basis, _random(size, generator))
    for step in range(1, min(_MOST_STEPS, size) + 1):
        if vector is None:  # what is left is rounding, and may hide a direction: a random one holds something of it
            vector, _ = _beside(basis, _random(size, generator))
        if vector is None:
            break
        image, back = _both_products(tiles, vector)
        basis = torch.cat([basis, vector])
        images = torch.cat([images, image]) if images.numel() else image
        gram = _bordered(gram, (images @ image.T).double())
        squares, weights = torch.linalg.eigh(gram)
        # Of the matrix within the basis, so never too large.
        before, found = found, squares[-1].clamp_min(0).sqrt().item()
        vector, beyond = _beside(basis, back)
        settled = settled + 1 if _error(squares, beyond * weights[-1, -1].item()) <= tolerance else 0
        slow = slow + 1 if found - before <= _SLOW * tolerance * found else 0
        if settled == _SETTLED or (slow >= _QUIET and step >= _PATIENCE):
            break
    return found


def _random(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(1, size, generator=generator, dtype=torch.float32)


def _error(squares: torch.Tensor, residual: float) -> float:
    """How far, relatively, the root of the largest of these Ritz values may be off, judged by its residual."""
    largest = squares[-1].item()
    if largest <= 0:
        return 0.0 if residual == 0 else math.inf
    gap = largest - squares[-2].item() if len(squares) > 1 else 0.0
    off = abs(residual) if gap <= abs(residual) else residual**2 / gap
    return off / (2 * largest)


def _beside(basis: torch.Tensor, vector: torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """The direction and the length of what a vector has beside an orthonormal basis; no direction if it is rounding."""
    least = _NOISE * _norm(vector)
    for _ in range(2):  # twice is enough (Kahan)
        vector = vector - (vector @ basis.T) @ basis
    length = _norm(vector)
    return (vector / length, length) if length > least else (None, 0.0)


def _bordered(gram: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A Gram matrix grown by some columns, and by the same rows."""
    size = new.shape[0]
    grown = torch.zeros(size, size, dtype=gram.dtype)
    grown[: len(gram), : len(gram)] = gram
    grown[:, len(gram) :] = new
    grown[len(gram) :] = new.T
    return grown


def _both_products(tiles: Tiles, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x A'` and `x A' A`, each tile of A read once."""
    images, back = [], torch.zeros_like(vector)
    for tile in tiles():
        image = vector @ tile.T
        images.append(image)
        back.addmm_(image, tile)
    return torch.cat(images, dim=1), back
