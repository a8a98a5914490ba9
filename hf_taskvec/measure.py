"""Norms and inner products of one parameter's change, from its factors wherever it has factors.

`<L1 R1, L2 R2> = sum((L1' L2) * (R1 R2'))` needs two Gram matrices of the ranks' size and never the dense matrix.
"""

import math
from collections.abc import Sequence

import torch

from hf_taskvec.arithmetic import Sum, Term, not_finite
from hf_taskvec.compress import stacked_factors
from hf_taskvec.delta import LowRank


def dot(name: str, a: tuple[Term, ...], b: tuple[Term, ...]) -> float:
    """The inner product of two sums of terms over the parameter `name`, in fp64."""
    if not a or not b:
        return 0.0
    shape = a[0].delta.shape
    a_dense, a_factors = _split(a)
    b_dense, b_factors = _split(b)
    result = 0.0
    for weight, left, right in a_factors:
        for other_weight, other_left, other_right in b_factors:
            grams = (left.T @ other_left) * (right @ other_right.T)
            result += weight * other_weight * grams.sum().item()
    if a_dense or b_dense:
        same = a_dense == b_dense
        sum_a, sum_b = Sum(shape, a_dense), Sum(shape, b_dense)
        for start, stop in sum_a.tiles():
            rows_a = sum_a.rows(start, stop)
            rows_b = rows_a if same else sum_b.rows(start, stop)
            result += torch.dot(rows_a.flatten(), rows_b.flatten()).item()
            for weight, left, right in b_factors if a_dense else ():
                result += weight * ((rows_a @ right.T) * left[start:stop]).sum().item()
            for weight, left, right in a_factors if b_dense else ():
                result += weight * ((rows_b @ right.T) * left[start:stop]).sum().item()
    if not math.isfinite(result):
        raise not_finite(name)
    return result


def gram(name: str, vectors: Sequence[tuple[Term, ...]]) -> torch.Tensor:
    """All inner products between several sums of terms over the parameter `name`, in fp64 and in one pass.

    Each tile of each dense change is made once, whatever the number of pairs, and so is the Gram matrix of all factors.
    """
    result = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    split = [_split(terms) for terms in vectors]
    factors = [(owner, *each) for owner, (_, found) in enumerate(split) for each in found]
    for one, (i, weight, left, right) in enumerate(factors):
        for two, (j, other_weight, other_left, other_right) in enumerate(factors[: one + 1]):
            value = weight * other_weight * ((left.T @ other_left) * (right @ other_right.T)).sum().item()
            result[i, j] += value
            if one != two:
                result[j, i] += value
    sums = {
        i: Sum(terms[0].delta.shape, dense)
        for i, ((dense, _), terms) in enumerate(zip(split, vectors, strict=True))
        if dense
    }
    owners = list(sums)
    for start, stop in next(iter(sums.values())).tiles() if sums else ():
        rows = [each.rows(start, stop) for each in sums.values()]
        flat = torch.stack([each.flatten() for each in rows])
        result[torch.tensor(owners)[:, None], torch.tensor(owners)] += flat @ flat.T
        for i, tile in zip(owners, rows, strict=True):
            for j, weight, left, right in factors:
                value = weight * ((tile @ right.T) * left[start:stop]).sum().item()
                result[i, j] += value
                result[j, i] += value
    if not bool(result.isfinite().all()):
        raise not_finite(name)
    return result


def row_norms(name: str, terms: tuple[Term, ...], axis: int = 0) -> torch.Tensor:
    """The norm of each row of a matrix (or of each column, with `axis=1`), in fp64, from its factors where it has them."""
    shape = terms[0].delta.shape
    if all(isinstance(term.delta, LowRank) for term in terms):
        left, right = stacked_factors(terms)
        if axis:
            left, right = right.T, left.T
        squares = ((left @ (right @ right.T)) * left).sum(dim=1)
    else:
        squares = torch.zeros(shape[axis], dtype=torch.float64)
        matrix = Sum(shape, terms)
        for start, stop in matrix.tiles():
            found = matrix.rows(start, stop).square_().sum(dim=1 - axis)
            if axis:
                squares += found
            else:
                squares[start:stop] = found
    if not bool(squares.isfinite().all()):
        raise not_finite(name)
    return squares.clamp_min_(0).sqrt_()


def norm(name: str, terms: tuple[Term, ...]) -> float:
    """The Frobenius norm of a sum of terms over the parameter `name`."""
    return max(dot(name, terms, terms), 0.0) ** 0.5


_Factors = list[tuple[float, torch.Tensor, torch.Tensor]]


def _split(terms: tuple[Term, ...]) -> tuple[tuple[Term, ...], _Factors]:
    dense = tuple(term for term in terms if not isinstance(term.delta, LowRank))
    factors = [
        (t.weight * t.delta.scaling, t.delta.left.read().double(), t.delta.right.read().double())
        for t in terms
        if isinstance(t.delta, LowRank)
    ]
    return dense, factors
