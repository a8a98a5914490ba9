"""Norms and inner products of one parameter's change, from its factors wherever it has factors.

`<L1 R1, L2 R2> = sum((L1' L2) * (R1 R2'))` needs two Gram matrices of the ranks' size and never the dense matrix.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from hf_taskvec.algebra.deltas import Parts
from hf_taskvec.algebra.low_rank import are_factors, stacked_factors
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.sources import Source, numel
from hf_taskvec.algebra.sums import Sum, Term

# Elements in a tile of a measure: a few of them stay in a core's cache.
_TILE = 1 << 16


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
            if not any(term.delta.changes(start, stop) for term in (*a_dense, *b_dense)):
                continue
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

    Each tile of each dense change is made once, whatever the number of pairs. Weights of 16 bits go through fp32, which
    costs the cosines about 1e-7.
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
    dense = {i: terms for i, (terms, _) in enumerate(split) if terms}
    owners = torch.tensor(list(dense))
    for start, stop, rows in tiles_of(list(dense.values())):
        flat = rows.flatten(1)
        result[owners[:, None], owners] += (flat @ flat.T).double()
        for j, weight, left, right in factors:
            for i, tile in zip(dense, rows, strict=True):
                value = weight * ((tile.double() @ right.T) * left[start:stop]).sum().item()
                result[i, j] += value
                result[j, i] += value
    if not bool(result.isfinite().all()):
        raise not_finite(name)
    return result


def tiles_of(
    vectors: Sequence[tuple[Term, ...]], dtype: torch.dtype | None = None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Runs of rows of several sums over one parameter, stacked: each stored tensor is read and converted once for all.

    In fp32 if all that is stored has 16 bits, else in fp64, unless a `dtype` is given.

    This is the one place beside `Sum` that adds stored tensors up, and its numbers never become weights. It serves
    norms and cosines of many vectors, where a tensor that several of them share shall be converted once, and where
    tiles that stay in a core's cache count for more than the last bit.
    """
    if not vectors:
        return
    shape = vectors[0][0].delta.shape
    sources = [source for terms in vectors for term in terms for source in term.delta.sources]
    if dtype is None:
        dtype = torch.float32 if all(source.dtype.itemsize == 2 for source in sources) else torch.float64
    stored = {s: s.read() for terms in vectors for t in terms for _, s in t.delta.parts or ()}
    others = [[term for term in terms if term.delta.parts is None] for terms in vectors]
    sums = [Sum(shape, terms) if terms else None for terms in others]
    length = shape[0] if shape else 1
    step = max(1, _TILE // max(1, numel(shape[1:])))
    for start in range(0, length, step):
        stop = min(start + step, length)
        rows = {s: (tensor[start:stop] if shape else tensor).to(dtype) for s, tensor in stored.items()}
        out = torch.zeros(len(vectors), *((stop - start, *shape[1:]) if shape else ()), dtype=dtype)
        for tile, terms, other in zip(out, vectors, sums, strict=True):
            if other is not None:
                tile += other.rows(start, stop)
            for term in terms:
                if term.delta.parts is not None:
                    tile.add_(_difference(term.delta.parts, rows), alpha=term.weight)
        yield start, stop, out


def _difference(parts: Parts, rows: Mapping[Source, torch.Tensor]) -> torch.Tensor:
    """The parts added up before any weight, so that nothing large is added to be taken away again."""
    (sign, first), *rest = parts
    change = rows[first] if sign == 1 else -rows[first]
    for sign, source in rest:
        change = change + rows[source] if sign == 1 else change - rows[source]
    return change


def row_norms(name: str, terms: tuple[Term, ...], axis: int = 0) -> torch.Tensor:
    """The norm of each row of a matrix (of each column, with `axis=1`), in fp64, from factors where it has them."""
    shape = terms[0].delta.shape
    if are_factors(terms):
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
    return float(max(dot(name, terms, terms), 0.0) ** 0.5)


_Factors = list[tuple[float, torch.Tensor, torch.Tensor]]


def _split(terms: tuple[Term, ...]) -> tuple[tuple[Term, ...], _Factors]:
    dense, factors = [], []
    for term in terms:
        if (product := term.delta.factors) is None:
            dense.append(term)
        else:
            left, right = product.left.read().double(), product.right.read().double()
            factors.append((term.weight * product.scaling, left, right))
    return tuple(dense), factors
