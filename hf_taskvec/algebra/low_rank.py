"""Low-rank approximation of one parameter's change.

Factors are recompressed by QR of the concatenated factors and the SVD of a small core, never by way of the dense
matrix. A dense matrix is approximated from products with its tiles: by a randomised range finder with power
iterations (Halko, Martinsson and Tropp 2011), or exactly, by its triangular factor.

torch decomposes on one thread, so that the bits do not hang on how many it may use.
"""

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hf_taskvec.algebra.deltas import LowRank
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.sources import InMemory, numel
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.errors import BadValueError
from hf_taskvec.threads import one_thread

# Up to this size of the smaller side, the exact way costs no more than the randomised one.
_EXACT_SIDE = 512
_OVERSAMPLING = 16
_POWER_ITERATIONS = 4


@dataclass(frozen=True)
class Target:
    """How far to compress: to a rank, to a share of the squared norm kept, or to a relative error."""

    rank: int | None = None
    energy: float | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.rank, self.energy, self.tolerance) if value is not None]
        if len(given) != 1:
            raise BadValueError("compress() takes exactly one of rank=, energy= and tolerance=.")
        if self.rank is not None and (not isinstance(self.rank, numbers.Integral) or self.rank < 1):
            raise BadValueError(f"rank={self.rank}: the rank must be a whole number, at least 1.")
        if self.energy is not None and not 0.0 < self.energy <= 1.0:
            raise BadValueError(f"energy={self.energy}: the share of energy to keep must be in (0, 1].")
        if self.tolerance is not None and not 0.0 <= self.tolerance < 1.0:
            raise BadValueError(f"tolerance={self.tolerance}: the relative error must be in [0, 1).")

    def choose(self, singular_values: torch.Tensor, total: float) -> int | None:
        """The smallest rank that meets the target, given the leading singular values; None if they are too few."""
        if self.rank is not None:
            return min(self.rank, len(singular_values))
        allowed = self.tolerance**2 if self.tolerance is not None else 1.0 - (self.energy or 1.0)
        left = total - singular_values.square().cumsum(0)
        # An exactly represented matrix leaves rounding noise, not zero.
        enough = (left <= max(allowed, 1e-14) * total).nonzero()
        return int(enough[0]) + 1 if len(enough) else None


@dataclass(frozen=True)
class Compressed:
    """A parameter's compressed terms, their rank, and the share of the squared norm that was discarded."""

    terms: tuple[Term, ...]
    rank: int
    discarded: float


@kept_subnormals()
def compress(
    name: str,
    terms: tuple[Term, ...],
    target: Target,
    dtype: torch.dtype = torch.float32,
    exact: bool | None = None,
) -> Compressed:
    """The terms of the matrix `name` replaced by one low-rank term (or kept, where that would not be smaller)."""
    shape = terms[0].delta.shape
    held = sum(term.delta.rank for term in terms)
    is_within = target.rank is not None and target.rank >= (held if are_factors(terms) else min(shape))
    if is_within or not numel(shape):
        return Compressed(terms, min(held, *shape), 0.0)
    left, values, right, total = _decompose(name, terms, target, exact)
    if total == 0.0:
        return Compressed((), 0, 0.0)
    rank = target.choose(values, total) or len(values)
    discarded = max(1.0 - values[:rank].square().sum().item() / total, 0.0)
    # The square root of a singular value goes to each factor, so that both have the same size (kind to 16 bits).
    root = values[:rank].sqrt()
    factors = LowRank(
        InMemory((left[:, :rank] * root).to(dtype).contiguous()),
        InMemory((root[:, None] * right[:rank]).to(dtype).contiguous()),
    )
    return Compressed((Term(1.0, factors),), rank, discarded)


_SVD = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@kept_subnormals()
def singular_triples(name: str, terms: tuple[Term, ...], rank: int) -> _SVD:
    """The `rank` leading singular triples (left vectors, values, right vectors in rows) of the matrix `name`, in fp64.

    There are fewer if the change is held as fewer.
    """
    left, values, right, _ = _decompose(name, terms, Target(rank=rank), None)
    return left[:, :rank], values[:rank], right[:rank]


def are_factors(terms: Iterable[Term]) -> bool:
    """Whether all terms are held as factors."""
    return all(term.delta.factors is not None for term in terms)


@one_thread()
def _decompose(
    name: str, terms: tuple[Term, ...], target: Target, exact: bool | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Singular triples, at least as many as the target needs, and the squared norm."""
    shape = terms[0].delta.shape
    if are_factors(terms) and sum(term.delta.rank for term in terms) < min(shape):
        left, values, right = _svd_of_factors(name, list(terms))
        return left, values, right, values.square().sum().item()
    return _svd_of_dense(name, Sum(shape, terms), target, exact)


def stacked_factors(terms: Iterable[Term]) -> tuple[torch.Tensor, torch.Tensor]:
    """Low-rank terms' factors side by side in fp64, with weights and scalings folded into the left one."""
    lefts, rights = [], []
    for term in terms:
        product = term.delta.factors
        assert product is not None
        lefts.append(product.left.read().double() * (term.weight * product.scaling))
        rights.append(product.right.read().double())
    return torch.cat(lefts, dim=1), torch.cat(rights, dim=0)


def _svd_of_factors(name: str, terms: list[Term]) -> _SVD:
    left, right = stacked_factors(terms)
    q_left, core_left = torch.linalg.qr(left)
    q_right, core_right = torch.linalg.qr(right.T)
    core = core_left @ core_right.T
    if not core.isfinite().all():
        raise not_finite(name)
    u, values, v = torch.linalg.svd(core, full_matrices=False)
    return q_left @ u, values, v @ q_right.T


def _svd_of_dense(
    name: str, matrix: Sum, target: Target, exact: bool | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    rows, columns = matrix.shape
    total = 0.0
    for start, stop in matrix.tiles():
        total += matrix.rows(start, stop).square_().sum().item()
    if not math.isfinite(total):
        raise not_finite(name)
    if exact or (exact is None and min(rows, columns) <= _EXACT_SIDE):
        return *_svd_by_qr(matrix), total
    size = target.rank or 32
    while True:
        sketch = size + max(_OVERSAMPLING, size // 2)
        if 2 * sketch >= min(rows, columns):
            return *_svd_by_qr(matrix), total
        left, values, right = _svd_by_sketch(matrix, sketch)
        if target.rank is not None or target.choose(values[:size], total) is not None:
            return left[:, :size], values[:size], right[:size], total
        size *= 2


def right_product(matrix: Sum, right: torch.Tensor) -> torch.Tensor:
    """`matrix @ right`, tile by tile."""
    return torch.cat([matrix.rows(start, stop) @ right for start, stop in matrix.tiles()])


def left_product(matrix: Sum, left: torch.Tensor) -> torch.Tensor:
    """`left.T @ matrix`, tile by tile."""
    result = torch.zeros(left.shape[1], matrix.shape[1], dtype=torch.float64, device="cpu")
    for start, stop in matrix.tiles():
        result.addmm_(left[start:stop].T, matrix.rows(start, stop))
    return result


def _svd_by_qr(matrix: Sum) -> _SVD:
    """All singular triples.

    A triangular factor, gathered tile by tile, keeps even the smallest accurate, which a Gram matrix would not: it
    squares the values.
    """
    rows, columns = matrix.shape
    tiny = torch.finfo(torch.float64).tiny
    if columns <= rows:
        factor, waiting = torch.zeros(0, columns, dtype=torch.float64, device="cpu"), []
        for start, stop in matrix.tiles():
            waiting.append(matrix.rows(start, stop))
            if len(waiting) * (stop - start) >= columns or stop == rows:
                factor = torch.linalg.qr(torch.cat([factor, *waiting]), mode="r").R
                waiting = []
        basis = torch.linalg.svd(factor).Vh.T
        image = right_product(matrix, basis)  # orthogonal columns, whose norms are the values
        values = torch.linalg.vector_norm(image, dim=0)
        return image / values.clamp_min(tiny), values, basis.T
    dense = torch.cat([matrix.rows(start, stop) for start, stop in matrix.tiles()])
    basis = torch.linalg.svd(torch.linalg.qr(dense.T, mode="r").R).Vh.T
    image = basis.T @ dense
    values = torch.linalg.vector_norm(image, dim=1)
    return basis, values, image / values.clamp_min(tiny)[:, None]


def _svd_by_sketch(matrix: Sum, size: int) -> _SVD:
    """The leading singular triples, by subspace iteration from a seeded random start."""
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(matrix.shape[1], size, dtype=torch.float64, device="cpu", generator=generator)
    left = torch.linalg.qr(right_product(matrix, start)).Q
    for _ in range(_POWER_ITERATIONS):
        right = torch.linalg.qr(left_product(matrix, left).T).Q
        left = torch.linalg.qr(right_product(matrix, right)).Q
    u, values, v = torch.linalg.svd(left_product(matrix, left), full_matrices=False)
    return left @ u, values, v
