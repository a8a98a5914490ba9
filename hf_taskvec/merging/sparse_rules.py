"""Sparse rules: each vector keeps some of its elements, and what is kept is merged.

A share of elements is counted in each parameter by itself, as breadcrumbs' paper and mergekit do. (TIES' own code
counts it over all of a model at once, so that some layers keep more than others.) Elements of equal magnitude are kept
or left out together: 16-bit weights have many of them, and no order among them would mean anything.
"""

import hashlib
import math
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch

from hf_taskvec.algebra.computed_deltas import ElementFunction, Statistic, Tiles, borrowed
from hf_taskvec.algebra.elementwise import Element
from hf_taskvec.algebra.formulas import FormulaBuilder
from hf_taskvec.algebra.row_pruning import is_first_of_mlp
from hf_taskvec.algebra.sources import numel
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.merging.option_checks import checked_below, checked_each, checked_share, checked_shares
from hf_taskvec.merging.order_statistics import order_statistics
from hf_taskvec.merging.rule_registry import Parameter, rule

Densities = float | Sequence[float]


@rule("magnitude", paper="https://arxiv.org/abs/1506.02626", at_least=1)
def magnitude_rule(parameter: Parameter, density: Densities = 0.2) -> list[Term]:
    """The weighted sum of vectors of which only the largest elements are kept.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        density (`float` or `Sequence[float]`, *optional*, defaults to 0.2):
            The share of elements to keep in each parameter: one number, or one for each vector.

    """
    densities = checked_shares("density", density, parameter.vectors)
    if min(densities) == 1.0:
        return parameter.sum()
    cuts = [_cut(parameter, densities[change.index]) for change in parameter.changes]
    return parameter.elementwise(_weighted_sum(parameter, _at_least), cuts)


@rule("rows", paper="https://arxiv.org/abs/2504.10957", at_least=1)
def rows_rule(parameter: Parameter, fraction: float = 0.2) -> list[Term]:
    """The weighted sum of vectors of which only the neurons of largest norm are kept in each MLP's first matrix.

    Corollary 2 of Li et al. 2025. Factors stay factors; all other parameters stay whole.

    Which rows these are is found out at once, so `combine` reads the MLPs of all vectors, a parameter at a time; their
    numbers are read when they are used, and stay exact. Only of what has no rows of its own to read (DoRA, the result
    of another rule) the kept rows are held in memory.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        fraction (`float`, *optional*, defaults to 0.2):
            The share of rows to keep.

    """
    kept = checked_share("fraction", fraction)
    if not is_first_of_mlp(parameter.name) or len(parameter.shape) != 2:
        return parameter.sum()
    pruned = [TaskVector({parameter.name: change.terms}).prune_rows(kept) for change in parameter.changes]
    pairs = zip(parameter.changes, pruned, strict=True)
    return [
        Term(change.weight * term.weight, term.delta)
        for change, vector in pairs
        for term in vector.terms_of(parameter.name)
    ]


@rule("breadcrumbs", paper="https://arxiv.org/abs/2312.06795", at_least=1)
def breadcrumbs_rule(parameter: Parameter, density: Densities = 0.9, gamma: Densities = 0.01) -> list[Term]:
    """The weighted sum of vectors without their smallest elements, and without their very largest.

    A density of 1 - gamma or more leaves fewer of the largest out, so that as many are kept as it says.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        density (`float` or `Sequence[float]`, *optional*, defaults to 0.9):
            The share of all elements to keep: one number, or one for each vector.
        gamma (`float` or `Sequence[float]`, *optional*, defaults to 0.01):
            The share of largest elements to leave out.

    """
    found = breadcrumbs_bounds(parameter, density, gamma)
    if min(checked_shares("density", density, parameter.vectors)) == 1.0:
        return parameter.sum()
    return parameter.elementwise(_weighted_sum(parameter, within_bounds), found)


def breadcrumbs_bounds(parameter: Parameter, density: Densities, gamma: Densities) -> list[Statistic]:
    """Find the smallest and the largest magnitude that breadcrumbs keeps of each change."""
    largest = checked_each("gamma", gamma, parameter.vectors, partial(checked_below, limit=1.0))
    densities = checked_shares("density", density, parameter.vectors)
    count = numel(parameter.shape)

    def bounds(share: float, left_out: float) -> Statistic:
        if share == 1.0:
            return lambda tiles: (0.0, math.inf)
        kept = int(share * count)
        first = max(0, count - kept - int(left_out * count))

        def find(tiles: Tiles) -> tuple[float, ...] | None:  # None: a small parameter, of which nothing is kept
            return tuple(order_statistics(tiles, [first, first + kept - 1], parameter.name)) if kept else None

        return find

    return [bounds(densities[change.index], largest[change.index]) for change in parameter.changes]


def within_bounds(build: FormulaBuilder, change: Element, bound: tuple[float, float] | None) -> Element:
    """The change, or 0 where its magnitude, in fp32, is not within the bounds."""
    if bound is None:
        return build.number(0.0)
    low, high = (build.number(each, torch.float32) for each in bound)
    kept = (abs(change.single()) > high).choose(build.number(0.0), change)
    return (low > abs(change.single())).choose(build.number(0.0), kept)


@rule("dare", paper="https://arxiv.org/abs/2311.03099", at_least=1)
def dare_rule(parameter: Parameter, density: Densities = 0.5, seed: int = 0, rescale: bool = True) -> list[Term]:
    """The weighted sum of vectors of which random elements are dropped, and the others scaled up to make up for it.

    Which elements are kept depends on the seed, the vector's expression and the parameter's name: not on the order of
    the vectors, nor on threads or processes.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        density (`float` or `Sequence[float]`, *optional*, defaults to 0.5):
            The share of elements to keep, on average: one number, or one for each vector.
        seed (`int`, *optional*, defaults to 0):
            Chooses the elements.
        rescale (`bool`, *optional*, defaults to `True`):
            Divide what is kept by the density.

    """
    checked_seed(seed, rescale)
    densities = checked_shares("density", density, parameter.vectors)
    steps = [max(1, round(densities[change.index] * 65536)) for change in parameter.changes]
    if min(steps) == 65536:
        return parameter.sum()
    parts = list(zip(parameter.changes, steps, strict=True))
    weights = [change.weight * (65536 / step if rescale else 1.0) for change, step in parts]
    keys = [f"{int(seed)}|{change.label}|{parameter.name}" for change in parameter.changes]

    def merge(tiles: list[torch.Tensor], _: list[Any], start: int) -> torch.Tensor:
        result, *others = tiles
        with borrowed(1, tuple(result.shape), result.dtype) as (mask,):
            result.mul_(random_mask(f"{keys[0]}|{start}", steps[0], mask)).mul_(weights[0])
            for tile, weight, key, step in zip(others, weights[1:], keys[1:], steps[1:], strict=True):
                result.addcmul_(tile, random_mask(f"{key}|{start}", step, mask), value=weight)
        return result

    return parameter.computed(merge)


def checked_seed(seed: Any, rescale: Any) -> None:
    """Refuse what is no seed, or no answer to whether what is kept is scaled up."""
    if not isinstance(rescale, bool):
        raise BadValueError(f"rescale={rescale!r} must be True or False.")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise BadValueError(f"seed={seed!r} must be a whole number.")


def random_uniform(key: str, out: torch.Tensor) -> torch.Tensor:
    """Random numbers from 0 to below 1, of which there are 65,536. The same for the same key, anywhere."""
    draws = _draws(key, -(-out.numel() // 4))
    out.view(-1).copy_(torch.from_numpy(draws.view("<i2"))[: out.numel()])
    return out.add_(32768.0).div_(65536.0)


def _draws(key: str, count: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """So many times 64 random bits."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    drawn = np.random.Generator(np.random.SFC64(seed)).integers(0, 1 << 64, count, dtype=np.uint64)
    return drawn.astype("<u8", copy=False)


def random_mask(key: str, step: int, out: torch.Tensor) -> torch.Tensor:
    """Random zeros and ones, of which `step` in 65,536 are ones on average. The same for the same key, anywhere.

    Drawing is what costs: sixteen bits for each number, or one where half of them are ones.
    """
    count, flat = out.numel(), out.view(-1)
    bits = 1 if step == 32768 else 16
    draws = _draws(key, -(-count * bits // 64))
    # As floats, which multiply much faster than booleans.
    if bits == 1:
        flat.copy_(torch.from_numpy(np.unpackbits(draws.view(np.uint8), count=count, bitorder="little")))
    else:
        flat.copy_(torch.from_numpy(draws.view("<i2"))[:count]).lt_(step - 32768)
    return out


Normalisation = Literal["count", "weight", "none"]
_NORMALISATIONS: tuple[str, ...] = get_args(Normalisation)


@rule("ties", paper="https://arxiv.org/abs/2306.01708")
def ties_rule(parameter: Parameter, density: Densities = 0.2, normalize: Normalisation = "count") -> list[Term]:
    """Trim, elect a sign for each element, and average the vectors that agree with it (TIES-Merging).

    Each vector keeps the share `density` of its elements with the largest magnitude and is multiplied by its weight;
    the sign of an element is that of the sum; and those that have it are merged. So a negative weight negates: it takes
    part in the election with its own sign. Where the sum is exactly 0, nothing is changed.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        density (`float` or `Sequence[float]`, *optional*, defaults to 0.2):
            The share of elements to keep: one number, or one for each vector.
        normalize (`str`, *optional*, defaults to `"count"`):
            `"count"` divides by the number of vectors that agree (the paper; twice the weights give twice the result),
            `"weight"` by the sum of their weights' magnitudes (mergekit's default, at positive weights), `"none"` gives
            their sum.

    """
    parts = checked_normalisation(parameter, normalize)
    densities = checked_shares("density", density, parameter.vectors)
    cuts = [_cut(parameter, densities[change.index]) for change in parameter.changes]
    return parameter.elementwise(elected(parameter, _at_least, parts), cuts)


def checked_normalisation(parameter: Parameter, normalize: Any) -> list[float] | None:
    """What each vector that agrees counts in the divisor; none if nothing is divided."""
    if normalize not in _NORMALISATIONS:
        hint = did_you_mean(str(normalize), _NORMALISATIONS)
        raise MissingNameError(f"no normalize={normalize!r}.{hint} It is one of {', '.join(_NORMALISATIONS)}.")
    weights = [change.weight for change in parameter.changes]
    return {"count": [1.0] * len(weights), "weight": [abs(weight) for weight in weights], "none": None}[normalize]


def elected(
    parameter: Parameter, keep: Callable[[FormulaBuilder, Element, Any], Element], parts: list[float] | None
) -> ElementFunction:
    """The merge of what `keep` leaves of each change, given its statistic: those of the sign that the sum has."""
    weights = [change.weight for change in parameter.changes]

    def merge(build: FormulaBuilder, changes: list[Element], statistics: list[Any]) -> Element:
        # What is positive and what is negative, apart: the larger of the two sums wins the election, and is the merge.
        # NaN counts as negative, and comes through.
        zero, nobody = build.number(0.0), build.number(_NO_VOTES)
        positive = negative = votes_for = votes_against = zero
        for number, (change, weight, found) in enumerate(zip(changes, weights, statistics, strict=True)):
            kept = build.times(weight, keep(build, change, found))
            positive = positive + (kept > zero).choose(kept, zero)
            negative = negative + (kept > zero).choose(zero, kept)
            if parts is not None:
                part = build.number(parts[number])
                votes_for = votes_for + (kept > zero).choose(part, zero)
                votes_against = votes_against + (zero > kept).choose(part, zero)
        total = positive + negative
        undecided = total - total  # 0, or NaN
        merged = (total > zero).choose(positive, (zero > total).choose(negative, undecided))
        if parts is None:
            return merged
        votes = (total > zero).choose(votes_for, votes_against)
        return merged / (votes > nobody).choose(votes, nobody)

    return merge


# The divisor where no vector has a say: 0 divided by it is 0. It is far below any weight.
_NO_VOTES = 1e-30


@rule("negmerge", paper="https://arxiv.org/abs/2410.05583")
def negmerge_rule(parameter: Parameter) -> list[Term]:
    """The mean of the vectors where all of them have one sign, and 0 elsewhere (NegMerge): to be negated.

    For forgetting, from several fine-tunes on the same text with other seeds or hyperparameters: what all of them agree
    on is due to the text rather than to how it was trained on. The result is not negated yet: it takes
    `-λ * combine([...], "negmerge")` to forget.

    A zero has no sign and agrees with nothing, as in the authors' code: an element that one vector leaves as it is
    stays as it is, and so does a parameter that one of them does not have. A weight (the paper has none) multiplies its
    vector before signs are compared, so that a negative one turns them; the sum is divided by the number of vectors
    whose weight is not 0. The others are left out and have no say.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.

    Example:
        >>> from hf_taskvec import combine
        >>> a = TaskVector.from_tensors({"w": torch.tensor([1.0, -1.0, 1.0, 0.0])}, name="a")
        >>> b = TaskVector.from_tensors({"w": torch.tensor([3.0, -2.0, -1.0, 4.0])}, name="b")
        >>> combine([a, b], "negmerge").dense("w")
        tensor([ 2.0000, -1.5000,  0.0000,  0.0000])

    """
    weights = [change.weight for change in parameter.changes]
    if len(weights) < sum(weight != 0.0 for weight in parameter.weights):
        return []

    def merge(tiles: list[torch.Tensor], _: list[Any], start: int) -> torch.Tensor:
        result, *others = (tile.mul_(weight) for tile, weight in zip(tiles, weights, strict=True))
        with borrowed(2, tuple(result.shape), result.dtype) as (smallest, largest):
            smallest.copy_(result)
            largest.copy_(result)
            for tile in others:
                result.add_(tile)
                torch.minimum(smallest, tile, out=smallest)
                torch.maximum(largest, tile, out=largest)
            agreed = smallest.gt(0.0).logical_or_(largest.lt(0.0))
            return result.mul_(agreed).div_(len(weights))  # a product, so that NaN and infinities stay to be refused

    return parameter.computed(merge)


def _cut(parameter: Parameter, share: float) -> Statistic:
    """Finds the smallest magnitude that is among the share of largest ones."""
    count = numel(parameter.shape)
    rank = count - max(1, int(share * count))
    return lambda tiles: order_statistics(tiles, [rank], parameter.name)[0] if rank > 0 else 0.0


def _at_least(build: FormulaBuilder, change: Element, cut: float) -> Element:
    """The change, or 0 where its magnitude, in fp32, is below the cut."""
    if cut <= 0.0:
        return change
    return (build.number(cut, torch.float32) > abs(change.single())).choose(build.number(0.0), change)


def _weighted_sum(parameter: Parameter, keep: Callable[[FormulaBuilder, Element, Any], Element]) -> ElementFunction:
    """The weighted sum of what `keep` leaves of each change, given its statistic."""
    weights = [change.weight for change in parameter.changes]

    def merge(build: FormulaBuilder, changes: list[Element], statistics: list[Any]) -> Element:
        parts = zip(changes, statistics, weights, strict=True)
        first, *others = (build.times(weight, keep(build, each, found)) for each, found, weight in parts)
        for other in others:
            first = first + other
        return first

    return merge
