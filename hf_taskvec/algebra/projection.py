"""How much of other changes is in a change: the coefficients of its projection onto their span."""

import math
from collections.abc import Iterator, Sequence

import torch

from hf_taskvec.algebra.low_rank import are_factors, stacked_factors
from hf_taskvec.algebra.measures import tiles_of
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.sums import Term
from hf_taskvec.threads import one_thread

#: directions that differ by less than this count as one: what tells them apart is the rounding of fp32
SAME_DIRECTION = 1e-6

# What is left of a change in the span of others, beside the change itself: nothing but the rounding of fp64.
_NOTHING = 1e-13
_MOST_PASSES = 4

_Terms = tuple[Term, ...]


@one_thread()
@kept_subnormals()
def span_coefficients(name: str, change: _Terms, others: Sequence[_Terms]) -> list[float] | None:
    """The numbers `c` for which `change - sum(c * others)` is orthogonal to all others, over the parameter `name`.

    They solve the normal equations, in fp64. Where these lose digits (others that are nearly dependent, a change that
    is nearly all in their span) what is left of the change is projected again, tile by tile: a second pass over the
    tensors, rarely a third. Others that are zero or depend on each other are welcome.

    Args:
        name (`str`):
            The parameter, for an error.
        change (`tuple[Term, ...]`):
            What is projected.
        others (`Sequence[tuple[Term, ...]]`):
            What spans the space, at least one, each of at least one term.

    Returns:
        `list[float]` or None: One number for each of the others; None if the change is in their span, so that nothing
            but rounding would be left of it.

    Raises:
        `BadValueError`: If a change is not finite.
    """
    found = torch.zeros(len(others), dtype=torch.float64, device="cpu")
    whole = 0.0
    for number in range(_MOST_PASSES):
        gram = torch.zeros(len(others) + 1, len(others) + 1, dtype=torch.float64, device="cpu")
        for rows in _columns([change, *others]):
            if number:
                rows[0] -= found @ rows[1:]
            gram += rows @ rows.T
        if not bool(gram.isfinite().all()):
            raise not_finite(name)
        rest = math.sqrt(gram[0, 0].item())
        whole = whole if number else rest
        if rest <= _NOTHING * whole:
            return None
        step, condition = _solved(gram[1:, 1:], gram[1:, 0])
        found += step
        removed = max(0.0, torch.dot(step, gram[1:, 0]).item())
        error = torch.finfo(torch.float64).eps * condition * math.sqrt(removed)
        if error <= _NOTHING * math.sqrt(max(0.0, rest**2 - removed)):
            break
    return [float(each) for each in found]


@one_thread()
@kept_subnormals()
def inner_products(name: str, changes: Sequence[_Terms]) -> torch.Tensor:
    """The inner products of changes of one parameter with each other, in fp64.

    Args:
        name (`str`):
            The parameter, for an error.
        changes (`Sequence[tuple[Term, ...]]`):
            At least one, each of at least one term.

    Returns:
        `torch.Tensor`: A symmetric matrix with a row for each change.

    Raises:
        `BadValueError`: If a change is not finite.
    """
    gram = torch.zeros(len(changes), len(changes), dtype=torch.float64, device="cpu")
    for rows in _columns(changes):
        gram += rows @ rows.T
    if not bool(gram.isfinite().all()):
        raise not_finite(name)
    return gram


def _columns(vectors: Sequence[_Terms]) -> Iterator[torch.Tensor]:
    """Changes of one parameter as rows of numbers, a run of them at a time, which may be written to.

    Of factors alone there are few: each product is written in the bases of all left and all right factors, which are
    orthonormal, so inner products stay what they are.
    """
    if not all(map(are_factors, vectors)):
        for _, _, rows in tiles_of(vectors):
            yield rows.flatten(1) if rows.ndim > 1 else rows[:, None]
        return
    pairs = [stacked_factors(terms) for terms in vectors]
    sizes = [left.shape[1] for left, _ in pairs]
    left, right = torch.cat([left for left, _ in pairs], dim=1), torch.cat([right for _, right in pairs])
    columns = (torch.linalg.qr(each, mode="r").R.split(sizes, dim=1) for each in (left, right.T))
    yield torch.stack([(one @ other.T).flatten() for one, other in zip(*columns, strict=True)])


def _solved(gram: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The smallest solution of the normal equations, and the condition of what was solved.

    The others are brought to one length first: which of them depend on each other is a matter of angles.
    """
    lengths = gram.diagonal().sqrt()
    scales = torch.where(lengths > 0.0, 1.0 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(scales[:, None] * gram * scales)
    kept = values > SAME_DIRECTION**2 * values[-1]
    if not bool(kept.any()):
        return torch.zeros_like(right), 1.0
    values, vectors = values[kept], vectors[:, kept]
    return scales * (vectors @ ((vectors.T @ (scales * right)) / values)), (values[-1] / values[0]).item()
