"""The largest singular value of a matrix that is a product of factors, or comes in tiles.

Of factors it is that of a small core. Otherwise Lanczos's method looks for it: in each step every tile is read once, for
the product with the matrix and with its transpose together.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_taskvec.arithmetic import Term, not_finite
from hf_taskvec.compress import stacked_factors
from hf_taskvec.delta import LowRank
from hf_taskvec.measure import tiles_of

_MOST_STEPS = 64
_QUIET = 3  # steps without a change that end the search: one alone may be a standstill
_NOISE = 1e-6  # a direction that is shorter, beside what it was taken from, is all rounding
_ROWS = 128  # of a held matrix in one product and its return: they stay in the cache
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
        widths = [term.delta.left.shape[1] for term in self.terms if isinstance(term.delta, LowRank)]
        return sum(widths) if len(widths) == len(self.terms) else None

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = stacked_factors(self.terms)
        if self.transposed:
            left, right = right.T, left.T
        return (left if self.index is None else torch.cat([left[r.start : r.stop] for r in self.index])), right

    def tiles(self) -> Iterator[torch.Tensor]:
        """Pieces in fp32, each with all inputs; of a transposed matrix, pieces of its transpose with all outputs."""
        for start, stop, stacked in tiles_of([self.terms], torch.float32):
            rows = stacked[0]
            if self.index is None:
                yield rows
            elif self.transposed:
                yield torch.cat([rows[:, r.start : r.stop] for r in self.index], dim=1)
            else:
                inside = [range(max(r.start, start), min(r.stop, stop)) for r in self.index]
                kept = [rows[r.start - start : r.stop - start] for r in inside if len(r)]
                if kept:
                    yield torch.cat(kept)


def norms_of(parts: Sequence[Part], tolerance: float) -> tuple[float, float]:
    """The Frobenius and the spectral norm of some parts, one above the other."""
    if _has_factors(parts):
        return _norms_of_factors(parts)
    transposed = parts[0].transposed
    whole = _room(parts) if _held(parts) else None
    squares, filled = 0.0, 0
    for tile in _all_tiles(parts):
        squares += torch.linalg.vector_norm(tile, dtype=torch.float64).item() ** 2
        if whole is not None:
            whole[filled : filled + len(tile)] = tile
            filled += len(tile)
    if not math.isfinite(squares):
        raise not_finite(parts[0].name)
    if squares == 0.0:
        return 0.0, 0.0
    # In units of its own norm, so that no square of a tiny change underflows.
    unit = math.sqrt(squares)

    def tiles() -> Iterable[torch.Tensor]:
        return _all_tiles(parts) if whole is None else whole.split(_ROWS)

    size = _shape(parts)[0] if transposed else _shape(parts)[1]
    return unit, _largest(tiles, size, unit, tolerance)


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


def _room(parts: Sequence[Part]) -> torch.Tensor:
    outputs, inputs = _shape(parts)
    return torch.empty(inputs, outputs) if parts[0].transposed else torch.empty(outputs, inputs)


def _shape(parts: Sequence[Part]) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def _all_tiles(parts: Sequence[Part]) -> Iterator[torch.Tensor]:
    """Tiles of the stacked parts with all inputs each; of transposed ones, tiles of the transpose with all outputs."""
    if not parts[0].transposed or len(parts) == 1:
        for part in parts:
            yield from part.tiles()
        return
    for pieces in zip(*(part.tiles() for part in parts), strict=True):
        yield torch.cat(pieces, dim=1)


def _norms_of_factors(parts: Sequence[Part]) -> tuple[float, float]:
    """Exactly: `blockdiag(L_1, …) [R_1; …]` has the singular values of a core made of triangular factors."""
    lefts, rights = zip(*(part.factors() for part in parts), strict=True)
    left = torch.block_diag(*(torch.linalg.qr(each, mode="r").R for each in lefts))
    right = torch.linalg.qr(torch.cat(rights).T, mode="r").R
    core = left @ right.T
    if not bool(core.isfinite().all()):
        raise not_finite(parts[0].name)
    return torch.linalg.matrix_norm(core).item(), torch.linalg.matrix_norm(core, 2).item()


def _largest(tiles: Tiles, size: int, unit: float, tolerance: float) -> float:
    """The largest singular value, in a growing Krylov space, until three steps in a row hardly change it.

    Vectors are rows here: products of a tile with a row are faster than with a column, and than with several.
    """
    generator = torch.Generator().manual_seed(0)
    back = torch.randn(1, size, generator=generator)
    basis, images = torch.zeros(0, size), torch.zeros(0)
    gram = torch.zeros(0, 0, dtype=torch.float64)
    found, quiet = 0.0, 0
    for _ in range(min(_MOST_STEPS, size)):
        vector = _beside(basis, back)
        if vector is None:  # what is left is rounding, and may hide a direction: a random one holds something of it
            vector = _beside(basis, torch.randn(1, size, generator=generator))
        if vector is None:
            break
        basis = torch.cat([basis, vector])
        image, back = _both_products(tiles, vector, unit)
        images = torch.cat([images, image]) if images.numel() else image
        gram = _bordered(gram, (images @ image.T).double())
        # Of the matrix within the basis, so never too large.
        before, found = found, torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt().item()
        quiet = quiet + 1 if found - before <= tolerance * found else 0
        if quiet == _QUIET:
            break
    return found * unit


def _beside(basis: torch.Tensor, vector: torch.Tensor) -> torch.Tensor | None:
    """The direction of what a vector has beside an orthonormal basis; None if that is nothing but rounding."""
    least = _NOISE * vector.norm().item()
    for _ in range(2):  # twice is enough (Kahan)
        vector = vector - (vector @ basis.T) @ basis
    length = vector.norm().item()
    return vector / length if length > least else None


def _bordered(gram: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A Gram matrix grown by some columns, and by the same rows."""
    size = new.shape[0]
    grown = torch.zeros(size, size, dtype=gram.dtype)
    grown[: len(gram), : len(gram)] = gram
    grown[:, len(gram) :] = new
    grown[len(gram) :] = new.T
    return grown


def _both_products(tiles: Tiles, vector: torch.Tensor, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`x A'` and `x A' A`, each tile of A read once."""
    images, back = [], torch.zeros_like(vector)
    for tile in tiles():
        image = vector @ tile.T / unit
        images.append(image)
        back.addmm_(image, tile, alpha=1 / unit)
    return torch.cat(images, dim=1), back
