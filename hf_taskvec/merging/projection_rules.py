"""Projection: a vector without what lies in the span of others."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch.nn.functional import pad

from hf_taskvec.algebra.low_rank import Target, left_product, right_product, singular_triples, stacked_factors
from hf_taskvec.algebra.projection import SAME_DIRECTION, span_coefficients
from hf_taskvec.algebra.sources import numel
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.merging.rule_registry import Change, Parameter, rule

ProjectedBy = Literal["tensor", "subspace"]
ProjectedSide = Literal["both", "left", "right"]

_Factors = tuple[torch.Tensor, torch.Tensor]


@rule("without")
def without_rule(
    parameter: Parameter, by: ProjectedBy = "tensor", rank: int | None = None, side: ProjectedSide = "both"
) -> list[Term]:
    """The first vector without what lies in the span of the others, parameter by parameter.

    The first vector's weight scales the result. Any other weight but 0, which leaves its vector out, changes nothing:
    the span is the same. A parameter that the others do not change stays as it is, and one that lies in their span
    altogether is no longer changed: a vector without itself is empty.

    `by="tensor"` gives `v - c1 u1 - c2 u2 ...` for each parameter, orthogonal to each of the others: a sum, exact and
    lazy, in which factors stay factors. The coefficients are found out at once, so `combine` reads all vectors, in
    tiles. Others that differ by less than a millionth count as one.

    `by="subspace"` takes more away: with the projections P and Q onto the leading left and right singular vectors of
    all others, `v - P v Q` is orthogonal to whatever maps from the one space to the other. It is computed when it is
    used: factors stay factors, of up to twice the rank (of the same with `side="left"` or `"right"`), and a dense
    change stays as it is beside fp32 factors that correct it. What is not a matrix is projected by tensor.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        by (`str`, *optional*, defaults to `"tensor"`):
            `"tensor"` or `"subspace"`.
        rank (`int`, *optional*):
            By subspace: how many singular vectors of each of the others count. The default is all of them, for changes
            that are held as factors; dense ones need a number, since all of theirs span everything.
        side (`str`, *optional*, defaults to `"both"`):
            By subspace: `"both"` gives `v - P v Q`, `"left"` gives `v - P v`, which no longer writes where the others
            write, `"right"` gives `v - v Q`, which no longer reads what they read. (For `Linear` weights; those of
            `Conv1D` are stored transposed.)

    """
    _check_options(by, rank, side)
    first = [change for change in parameter.changes if change.index == 0]
    others = [change for change in parameter.changes if change.index > 0]
    if not first or not others:
        return _weighted(first)
    if by == "subspace" and len(parameter.shape) == 2 and numel(parameter.shape):
        return _without_subspace(parameter, first[0], others, rank, side)
    found = span_coefficients(parameter.name, first[0].terms, [change.terms for change in others])
    return [] if found is None else parameter.sum([first[0].weight * each for each in (1.0, *(-c for c in found))])


def _check_options(by: Any, rank: Any, side: Any) -> None:
    for name, value, known in (("by", by, get_args(ProjectedBy)), ("side", side, get_args(ProjectedSide))):
        if value not in known:
            hint = did_you_mean(str(value), known)
            raise MissingNameError(f"no {name}={value!r}.{hint} It is one of {', '.join(known)}.")
    if rank is not None:
        Target(rank=rank)  # refuses what is no rank
    if by == "tensor" and (rank is not None or side != "both"):
        given = f"rank={rank}" if rank is not None else f"side={side!r}"
        raise BadValueError(f"{given} is an option of by='subspace', which by='tensor' does not have.")


def _weighted(changes: Sequence[Change]) -> list[Term]:
    return [Term(change.weight * term.weight, term.delta) for change in changes for term in change.terms]


def _without_subspace(
    parameter: Parameter, first: Change, others: list[Change], rank: int | None, side: ProjectedSide
) -> list[Term]:
    rows, columns = parameter.shape
    counts = [_count(parameter, change, rank) for change in others]
    spanned = [(change, count) for change, count in zip(others, counts, strict=True) if count]
    if not spanned:
        return _weighted([first])

    def bases() -> _Factors:
        """Orthonormal columns that span the others' leading left and right singular vectors."""
        lefts, rights = [], []
        for change, count in spanned:
            left, values, right = singular_triples(parameter.name, change.terms, count)
            there = values > SAME_DIRECTION * values.max()  # a change of lower rank has no more directions
            lefts.append(left[:, there])
            rights.append(right[there].T)
        return _spanning(torch.cat(lefts, dim=1)), _spanning(torch.cat(rights, dim=1))

    width = sum(term.delta.factors.left.shape[1] for term in first.terms if term.delta.factors)
    kept = 2 * width if side == "both" else width
    if first.is_low_rank and kept <= min(rows, columns):  # else they would take more than the matrix itself
        return parameter.factored(kept, lambda: _projected_factors(first, bases(), side))
    left, right = min(sum(counts), rows), min(sum(counts), columns)
    size = {"left": left, "right": right, "both": min(left, right)}[side]
    correction = parameter.factored(size, _padded(size, lambda: _taken_away(first, bases(), side)))
    return [*_weighted([first]), *correction]


def _count(parameter: Parameter, change: Change, rank: int | None) -> int:
    if rank is None and not change.is_low_rank:
        raise BadValueError(
            f"{parameter.name}: {change.label} is not held as factors, and all of its singular vectors would span "
            "everything. Give by='subspace' a rank=, the number of leading ones that count."
        )
    held = sum(term.delta.rank for term in change.terms)
    return min(held if rank is None else rank, held, *parameter.shape)


def _spanning(vectors: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns of the same span."""
    basis, values, _ = torch.linalg.svd(vectors, full_matrices=False)
    return basis[:, values > SAME_DIRECTION]


def _projected_factors(change: Change, bases: _Factors, side: ProjectedSide) -> _Factors:
    """The factors of what is left. Nothing large is added to be taken away again, so that little is left accurately."""
    left, right = stacked_factors(_weighted([change]))
    inside = bases[0] @ (bases[0].T @ left)
    outside = right - (right @ bases[1]) @ bases[1].T
    if side == "left":
        return left - inside, right
    if side == "right":
        return left, outside
    # v - P v Q = (v - P v) + P (v - v Q)
    return torch.cat([left - inside, inside], dim=1), torch.cat([right, outside])


def _taken_away(change: Change, bases: _Factors, side: ProjectedSide) -> _Factors:
    """The factors of minus what is taken away from a change, `-P v Q`, which is read once."""
    (left, right), matrix = bases, Sum(change.terms[0].delta.shape, _weighted([change]))
    if side == "left":
        return -left, left_product(matrix, left)
    if side == "right":
        return -right_product(matrix, right), right.T
    core = left_product(matrix, left) @ right
    return (-left, core @ right.T) if left.shape[1] <= right.shape[1] else (-left @ core, right.T)


def _padded(size: int, function: Callable[[], _Factors]) -> Callable[[], _Factors]:
    """Factors with zeros up to a rank that is known beforehand: there may be fewer directions than were asked for."""

    def padded() -> _Factors:
        left, right = function()
        missing = size - left.shape[1]
        return pad(left, (0, missing)), pad(right, (0, 0, 0, missing))

    return padded
