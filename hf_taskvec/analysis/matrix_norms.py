"""The Frobenius and the spectral norm of matrices that are put together from parts.

Of factors both are those of a small core, exactly. Of other small matrices the spectral norm is calculated, of larger
ones `spectral_norm` searches for it.
"""

import math
import threading
from collections.abc import Iterable, Sequence

import torch

from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.analysis.matrix_parts import MATRIX_TILE, MatrixPart, are_factors_smaller, shape_of, tiles_of_parts
from hf_taskvec.analysis.spectral_norm import find_largest_singular_value, largest_singular_value_of_small, norm_in_fp64

_SMALL = 320  # the shorter side of a matrix of which all singular values are calculated
# A matrix of up to so many bytes (in fp32) is held during the search; a larger one is made anew in each step, in tiles.
_HELD_BYTES = 1 << 28
_TOTAL_BYTES = 1 << 29  # of what all threads hold


class MatrixBuffer(threading.local):
    """Memory for one matrix in each thread, used again for the next: allocating costs as much as several products."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.float32, device="cpu")

    def of(self, shape: tuple[int, int]) -> torch.Tensor:
        """The memory as an fp32 tensor of this shape. Its values are whatever was there before."""
        size = math.prod(shape)
        if len(self._kept) < size:
            self._kept = torch.empty(0, dtype=torch.float32, device="cpu")  # freed before more is allocated
            self._kept = torch.empty(size, dtype=torch.float32, device="cpu")
        return self._kept[:size].view(shape)


def norms_of(parts: Sequence[MatrixPart], tolerance: float, buffer: MatrixBuffer) -> tuple[float, float]:
    """The Frobenius and the spectral norm of some parts, one above the other.

    Args:
        parts (`Sequence[MatrixPart]`):
            What the matrix is made of.
        tolerance (`float`):
            The relative error at which the search for a large matrix's spectral norm ends.
        buffer (`MatrixBuffer`):
            Memory for the matrix.

    """
    if are_factors_smaller(parts):
        return _norms_of_factors(parts)
    outputs, inputs = shape_of(parts)
    rows, columns = (inputs, outputs) if parts[0].transposed else (outputs, inputs)  # as the tiles come
    whole = buffer.of((rows, columns)) if _held(parts) else None
    squares, filled = 0.0, 0
    for tile in tiles_of_parts(parts):
        if whole is not None:
            tile = whole[filled : filled + len(tile)].copy_(tile)
            filled += len(tile)
        squares += norm_in_fp64(tile) ** 2
    if not math.isfinite(squares):
        broken = (part.name for part in parts if not all(math.isfinite(norm_in_fp64(tile)) for tile in part.tiles()))
        raise not_finite(next(broken, parts[0].name))
    if squares == 0.0:
        return 0.0, 0.0
    frobenius = math.sqrt(squares)
    # In units of the norm where its fourth power, which the search takes, is out of fp32's range.
    unit = 1.0 if 1e-6 < frobenius < 1e6 else min(max(frobenius, 1e-37), 1e37)
    if whole is not None and unit != 1.0:
        whole /= unit
    pieces = () if whole is None else whole.split(max(1, MATRIX_TILE // columns))

    def tiles() -> Iterable[torch.Tensor]:
        return pieces or (tile.float() / unit for tile in tiles_of_parts(parts))

    if whole is not None and min(rows, columns) <= _SMALL and whole.numel() <= MATRIX_TILE:
        largest = largest_singular_value_of_small(whole)
    else:
        largest = find_largest_singular_value(tiles, columns, tolerance)
    return frobenius, min(unit * largest, frobenius)  # rounding may make it larger where it is the only singular value


def threads_for(stacks: Iterable[Sequence[MatrixPart]]) -> int:
    """How many threads may measure matrices at once: torch's number, or fewer where those would hold too much."""
    largest = max(map(_held, stacks), default=0)
    return max(1, min(torch.get_num_threads(), _TOTAL_BYTES // max(1, largest)))


def _held(parts: Sequence[MatrixPart]) -> int:
    """The bytes of a matrix that is held while it is measured; 0 for one that is not."""
    size = 4 * math.prod(shape_of(parts))
    return 0 if are_factors_smaller(parts) or size > _HELD_BYTES else size


def _norms_of_factors(parts: Sequence[MatrixPart]) -> tuple[float, float]:
    """Exactly: `blockdiag(L_1, …) [R_1; …]` has the singular values of a core made of triangular factors."""
    lefts, rights = zip(*(part.factors() for part in parts), strict=True)
    left = torch.block_diag(*(torch.linalg.qr(each, mode="r").R for each in lefts))
    right = torch.linalg.qr(torch.cat(rights).T, mode="r").R
    core = left @ right.T
    if not bool(core.isfinite().all()):
        raise not_finite(parts[0].name)
    return torch.linalg.matrix_norm(core).item(), torch.linalg.matrix_norm(core, 2).item()
