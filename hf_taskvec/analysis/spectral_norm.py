"""The largest singular value of a matrix that comes in tiles.

Of a small matrix it is calculated. Of a larger one Lanczos's method searches for it: in each step every tile is read
once, for the product with the matrix and with its transpose together.
"""

import math
from collections.abc import Callable, Iterable

import torch

_MOST_STEPS = 64
_SETTLED = 2  # steps with a small error that end the search: one alone may have missed a direction
# Where singular values lie close, as in random matrices, the last digits take many steps. So after _PATIENCE steps the
# search ends when _QUIET of them in a row each gained less than _SLOW times the tolerance.
_PATIENCE, _QUIET, _SLOW = 14, 3, 30
_NOISE = 1e-6  # a direction that is shorter, beside what it was taken from, is all rounding

#: Gives all tiles of a matrix, one after the other, each with all columns.
MatrixTiles = Callable[[], Iterable[torch.Tensor]]


def norm_in_fp64(tensor: torch.Tensor) -> float:
    """The root of the sum of all squares, added up in fp64."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def largest_singular_value_of_small(matrix: torch.Tensor) -> float:
    """The largest singular value of a matrix with a short side, exactly."""
    exact = matrix.double()
    gram = exact @ exact.T if len(exact) <= exact.shape[1] else exact.T @ exact
    return torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt().item()


def find_largest_singular_value(tiles: MatrixTiles, size: int, tolerance: float) -> float:
    """The largest singular value, in a growing Krylov space, until it settles or hardly grows.

    Vectors are rows here: products of a tile with a row are faster than with a column, and than with several.

    Args:
        tiles (`Callable`):
            Gives the tiles of the matrix, once for each step.
        size (`int`):
            The number of columns.
        tolerance (`float`):
            The relative error, by the search's own estimate, at which it ends.

    """
    generator = torch.Generator("cpu").manual_seed(0)
    basis = torch.zeros(0, size, dtype=torch.float32, device="cpu")
    images = torch.zeros(0, dtype=torch.float32, device="cpu")
    gram = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
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
    return torch.randn(1, size, generator=generator, dtype=torch.float32, device="cpu")


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
    least = _NOISE * norm_in_fp64(vector)
    for _ in range(2):  # twice is enough (Kahan)
        vector = vector - (vector @ basis.T) @ basis
    length = norm_in_fp64(vector)
    return (vector / length, length) if length > least else (None, 0.0)


def _bordered(gram: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A Gram matrix grown by some columns, and by the same rows."""
    size = new.shape[0]
    grown = torch.zeros(size, size, dtype=gram.dtype, device="cpu")
    grown[: len(gram), : len(gram)] = gram
    grown[:, len(gram) :] = new
    grown[len(gram) :] = new.T
    return grown


def _both_products(tiles: MatrixTiles, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x A'` and `x A' A`, each tile of A read once."""
    images, back = [], torch.zeros_like(vector)
    for tile in tiles():
        image = vector @ tile.T
        images.append(image)
        back.addmm_(image, tile)
    return torch.cat(images, dim=1), back
