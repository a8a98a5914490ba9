"""Norms and inner products of one parameter's change, from its factors wherever it has factors.

`<L1 R1, L2 R2> = sum((L1' L2) * (R1 R2'))` needs two Gram matrices of the ranks' size and never the dense matrix.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from hf_taskvec.algebra import formulas
from hf_taskvec.algebra.low_rank import are_factors, stacked_factors
from hf_taskvec.algebra.machine_code import WIDTH
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.scratch import Slot, buffer
from hf_taskvec.algebra.sources import numel
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.tiles import tiles_of_shape
from hf_taskvec.threads import one_thread

# Elements in a tile of a measure: a few of them stay in a core's cache.
_TILE = 1 << 16


@one_thread()
@kept_subnormals()
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
            rows_a = _tile(sum_a, start, stop, Slot.MEASURED)
            rows_b = rows_a if same else _tile(sum_b, start, stop, Slot.BESIDE)
            result += torch.dot(rows_a.flatten(), rows_b.flatten()).item()
            for weight, left, right in b_factors if a_dense else ():
                result += weight * ((rows_a @ right.T) * left[start:stop]).sum().item()
            for weight, left, right in a_factors if b_dense else ():
                result += weight * ((rows_b @ right.T) * left[start:stop]).sum().item()
    if not math.isfinite(result):
        raise not_finite(name)
    return result


@kept_subnormals()
def gram(name: str, vectors: Sequence[tuple[Term, ...]]) -> torch.Tensor:
    """All inner products between several sums of terms over the parameter `name`, in fp64 and in one pass.

    Each tile of each dense change is made once, whatever the number of pairs.
    """
    result = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device="cpu")
    split = [_split(terms) for terms in vectors]
    factors = [(owner, *each) for owner, (_, found) in enumerate(split) for each in found]
    for one, (i, weight, left, right) in enumerate(factors):
        for two, (j, other_weight, other_left, other_right) in enumerate(factors[: one + 1]):
            value = weight * other_weight * ((left.T @ other_left) * (right @ other_right.T)).sum().item()
            result[i, j] += value
            if one != two:
                result[j, i] += value
    dense = {i: terms for i, (terms, _) in enumerate(split) if terms}
    owners = torch.tensor(list(dense), dtype=torch.int64, device="cpu")
    if dense and not factors and (products := _products(list(dense.values()))) is not None:
        result[owners[:, None], owners] = products
        dense = {}
    for start, stop, rows in tiles_of(list(dense.values())):
        flat = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
        result[owners[:, None], owners] += flat @ flat.T
        for j, weight, left, right in factors:
            for i, tile in zip(dense, rows, strict=True):
                value = weight * ((tile @ right.T) * left[start:stop]).sum().item()
                result[i, j] += value
                result[j, i] += value
    if not bool(result.isfinite().all()):
        raise not_finite(name)
    return result


def _products(vectors: Sequence[tuple[Term, ...]]) -> torch.Tensor | None:
    """All inner products of sums of stored tensors, if machine code can make them: each tensor is read once."""
    shape = vectors[0][0].delta.shape
    if numel(shape[1:]) < WIDTH:  # every tile has a row at least
        return None
    build = formulas.FormulaBuilder()
    elements = [element for terms in vectors if (element := Sum(shape, terms).element(build)) is not None]
    if len(elements) < len(vectors):
        return None
    first, *others = elements
    whole = build.formula(first)
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device="cpu")
    for start, stop in tiles_of_shape(shape):
        found = whole.products(others, start, stop)
        if found is None:
            return None
        total += found
    return total


@kept_subnormals()
def products_with(tensor: torch.Tensor, vectors: Sequence[tuple[Term, ...]]) -> list[float]:
    """The inner products of a tensor in memory, such as a gradient, with several sums of terms, in fp64 on its device.

    `<G, L R> = sum((G R') * L)` needs no dense product. Each tile of the tensor is converted once for all of them.
    """
    split = [_split(terms) for terms in vectors]
    shape, device = tuple(tensor.shape), tensor.device
    sums = [Sum(shape, dense, device=device) if dense else None for dense, _ in split]
    factors = [[(w, left.to(device), right.T.to(device)) for w, left, right in found] for _, found in split]
    totals = [torch.zeros((), dtype=torch.float64, device=device) for _ in vectors]
    for start, stop in tiles_of_shape(shape):
        rows = (tensor[start:stop] if shape else tensor).double()
        for number, (dense, _) in enumerate(split):
            whole = sums[number]
            if whole is not None and any(term.delta.changes(start, stop) for term in dense):
                totals[number] += torch.dot(whole.rows(start, stop).flatten(), rows.flatten())
            for weight, left, right in factors[number]:
                totals[number] += weight * ((rows @ right) * left[start:stop]).sum()
    return torch.stack(totals).tolist() if totals else []


def tiles_of(
    vectors: Sequence[tuple[Term, ...]], dtype: torch.dtype = torch.float64
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Runs of rows of several sums over one parameter, stacked, in tiles that stay in a core's cache.

    Each is valid until the next one is asked for: fresh memory for each would cost more than the sums.
    """
    if not vectors:
        return
    shape = vectors[0][0].delta.shape
    sums = [Sum(shape, terms) for terms in vectors]
    length = shape[0] if shape else 1
    step = max(1, min(length, _TILE // max(1, numel(shape[1:]))))
    memory = torch.empty(len(vectors), *((step, *shape[1:]) if shape else ()), dtype=dtype, device="cpu")
    for start in range(0, length, step):
        stop = min(start + step, length)
        out = memory[:, : stop - start] if shape else memory
        for tile, whole in zip(out, sums, strict=True):
            whole.rows_into(tile, start, stop)
        yield start, stop, out


def _tile(whole: Sum, start: int, stop: int, slot: Slot) -> torch.Tensor:
    """A tile in fp64, in this thread's memory for it."""
    size = (stop - start, *whole.shape[1:]) if whole.shape else ()
    return whole.rows_into(buffer(slot, size, torch.float64, whole.device), start, stop)


@kept_subnormals()
def row_norms(name: str, terms: tuple[Term, ...], axis: int = 0) -> torch.Tensor:
    """The norm of each row of a matrix (of each column, with `axis=1`), in fp64, from factors where it has them."""
    shape = terms[0].delta.shape
    if are_factors(terms):
        left, right = stacked_factors(terms)
        if axis:
            left, right = right.T, left.T
        squares = ((left @ (right @ right.T)) * left).sum(dim=1)
    else:
        squares = torch.zeros(shape[axis], dtype=torch.float64, device="cpu")
        matrix = Sum(shape, terms)
        for start, stop in matrix.tiles():
            found = _tile(matrix, start, stop, Slot.MEASURED).square_().sum(dim=1 - axis)
            if axis:
                squares += found
            else:
                squares[start:stop] = found
    if not bool(squares.isfinite().all()):
        raise not_finite(name)
    return squares.clamp_min_(0).sqrt_()


@one_thread()
@kept_subnormals()
def norm(name: str, terms: tuple[Term, ...]) -> float:
    """The Frobenius norm of a sum of terms over the parameter `name`.

    What may cancel, as in `v - v.compress(rank=8)`, is added up before it is squared: of inner products too few digits
    would be left.
    """
    if len(terms) == 1:
        return float(max(dot(name, terms, terms), 0.0) ** 0.5)
    if are_factors(terms):
        left, right = stacked_factors(terms)
        core = torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right.T, mode="r").R.T
        square = core.square_().sum().item()
    else:
        whole = Sum(terms[0].delta.shape, terms)
        tiles = (tile for tile in whole.tiles() if any(term.delta.changes(*tile) for term in terms))
        square = math.fsum(_tile(whole, *tile, Slot.MEASURED).square_().sum().item() for tile in tiles)
    if not math.isfinite(square):
        raise not_finite(name)
    return math.sqrt(square)


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
