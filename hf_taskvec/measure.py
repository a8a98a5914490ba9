"""Norms and inner products of one parameter's change, from its factors wherever it has factors.

`<L1 R1, L2 R2> = sum((L1' L2) * (R1 R2'))` needs two Gram matrices of the ranks' size and never the dense matrix.
"""

import math
from collections.abc import Sequence

import torch

from hf_taskvec.arithmetic import Sum, Term, not_finite
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


def norm(name: str, terms: tuple[Term, ...]) -> float:
    """The Frobenius norm of a sum of terms over the parameter `name`."""
    return max(dot(name, terms, terms), 0.0) ** 0.5


def gram(name: str, changes: Sequence[tuple[Term, ...]]) -> torch.Tensor:
    """The inner products of several changes of one parameter, each with each; dense ones are read once."""
    count = len(changes)
    result = torch.zeros(count, count, dtype=torch.float64)
    present = [number for number, terms in enumerate(changes) if terms]
    if all(isinstance(term.delta, LowRank) for terms in changes for term in terms):
        for i in present:
            for j in (each for each in present if each >= i):
                result[i, j] = result[j, i] = dot(name, changes[i], changes[j])
        return result
    sums = {number: Sum(changes[number][0].delta.shape, changes[number]) for number in present}
    for start, stop in next(iter(sums.values())).tiles():
        rows = torch.stack([sums[number].rows(start, stop).flatten() for number in present])
        result[torch.tensor(present)[:, None], torch.tensor(present)] += rows @ rows.T
    if not result.isfinite().all():
        raise not_finite(name)
    return result


_Factors = list[tuple[float, torch.Tensor, torch.Tensor]]


def _split(terms: tuple[Term, ...]) -> tuple[tuple[Term, ...], _Factors]:
    dense = tuple(term for term in terms if not isinstance(term.delta, LowRank))
    factors = [
        (t.weight * t.delta.scaling, t.delta.left.read().double(), t.delta.right.read().double())
        for t in terms
        if isinstance(t.delta, LowRank)
    ]
    return dense, factors
