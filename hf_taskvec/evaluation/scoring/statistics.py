"""How sure we are: paired bootstrap intervals, a permutation test, the AUC. All seeded, all over passages.

Sums are taken by einsum's own loops, not by BLAS, so that the number of threads cannot move the last digit.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_taskvec.errors import BadValueError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def covers(self, number: float) -> bool:
        """Whether a number lies in the interval."""
        return self.low <= number <= self.high

    def within(self, margin: float) -> bool:
        """Whether the whole interval lies inside ±margin: equivalence, not mere lack of significance."""
        return -margin <= self.low and self.high <= margin


@dataclass(frozen=True)
class Draws:
    """How often passages are drawn anew for intervals and tests, the level of the intervals, and the seed."""

    resamples: int = 2000
    level: float = 0.95
    permutations: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 1 or self.permutations < 1 or not 0 < self.level < 1:
            raise BadValueError(
                f"resamples={self.resamples} and permutations={self.permutations} must be positive, "
                f"level={self.level} in (0, 1)"
            )

    @property
    def fewest(self) -> int:
        """The fewest passages that an interval of this level can be drawn from.

        The truth lies outside of all n passages with a probability of up to 2/2ⁿ, and a bootstrap cannot reach farther
        than they do: of a single passage its interval has no width at all. At 95 % it takes six.
        """
        return math.ceil(math.log2(2 / (1 - self.level)))

    def bootstrap(self, n: int) -> "Bootstrap":
        """The resamplings of `n` passages."""
        return Bootstrap(n, self.resamples, self.level, self.seed)


@dataclass(frozen=True)
class Bootstrap:
    """Resamplings of `n` passages. The same object gives paired results: every score sees the same draws.

    Args:
        n (`int`):
            The number of passages.
        resamples (`int`):
            How many times they are drawn anew.
        level (`float`):
            Of the percentile intervals.
        seed (`int`):
            Of the draws.
    """

    n: int
    resamples: int = 2000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 1:
            raise BadValueError("no passages to draw from: a bootstrap needs at least one")
        if self.resamples < 1 or not 0 < self.level < 1:
            raise BadValueError(f"resamples={self.resamples} must be positive and level={self.level} in (0, 1)")

    def means(self, values: ArrayLike, geometric: bool = False) -> Array:
        """The mean of `values` in each resampling; the geometric mean on request."""
        table = _logs(values, geometric)
        if table.shape != (self.n,):
            raise BadValueError(f"{table.size} values for a bootstrap over {self.n} passages")
        drawn = np.einsum("bn,n->b", _draws(self.n, self.resamples, self.seed), table, optimize=False) / self.n
        return np.exp(drawn) if geometric else drawn

    def interval(self, value: float, resampled: Array) -> Interval:
        """The percentile interval around `value`."""
        return _percentiles(value, resampled, self.level)

    def mean(self, values: ArrayLike, geometric: bool = False) -> Interval:
        """The mean with its interval."""
        return self.interval(mean_score(values, geometric), self.means(values, geometric))

    def difference(self, values: ArrayLike, baseline: ArrayLike, geometric: bool = False) -> Interval:
        """The difference of the means `values − baseline` on the same passages, paired."""
        spread = self.means(values, geometric) - self.means(baseline, geometric)
        return self.interval(mean_score(values, geometric) - mean_score(baseline, geometric), spread)

    def relative(self, values: ArrayLike, baseline: ArrayLike, geometric: bool = False) -> Interval | None:
        """The change of the mean as a share of the baseline's, paired; `None` if that is 0, or in every resampling."""
        before, below = mean_score(baseline, geometric), self.means(baseline, geometric)
        usable = below != 0  # all the passages with a score may be missing from a resampling
        if before == 0 or not usable.any():
            return None
        ratios = self.means(values, geometric)[usable] / below[usable] - 1
        return self.interval(mean_score(values, geometric) / before - 1, ratios)


def mean_score(values: ArrayLike, geometric: bool = False) -> float:
    """The mean over passages, or their geometric mean.

    >>> mean_score([1, 4], geometric=True)
    2.0
    """
    table = _logs(values, geometric)
    return float(np.exp(table.mean())) if geometric else float(table.mean())


def _logs(values: ArrayLike, geometric: bool) -> Array:
    table = np.asarray(values, dtype=np.float64)
    return np.log(table) if geometric else table


@lru_cache(maxsize=8)
def _draws(n: int, resamples: int, seed: int) -> Array:
    """How often each passage is drawn in each resampling: the same for every score, which pairs them."""
    counts = np.random.default_rng(seed).multinomial(n, [1 / n] * n, size=resamples)
    return counts.astype(np.float64)


def difference_apart(first: ArrayLike, second: ArrayLike, draws: Draws, geometric: bool = False) -> Interval:
    """The difference of the means `first − second` of two groups that share no passage: each is drawn apart."""
    left = draws.bootstrap(np.size(first))
    right = replace(draws, seed=draws.seed + 1).bootstrap(np.size(second))
    spread = left.means(first, geometric) - right.means(second, geometric)
    return left.interval(mean_score(first, geometric) - mean_score(second, geometric), spread)


def permutation_test(first: ArrayLike, second: ArrayLike, permutations: int = 10_000, seed: int = 0) -> float:
    """The one-sided p-value for "the first book lost more than the second".

    Args:
        first (`ArrayLike`):
            The losses (score at λ=0 minus score at λ) of each passage of the first book.
        second (`ArrayLike`):
            The same of the second book.
        permutations (`int`):
            How often passages are dealt anew to the two books.
        seed (`int`):
            Of the dealing.
    """
    left, right = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if not len(left) or not len(right):
        raise BadValueError("a permutation test needs passages of both books")
    both, n = np.concatenate([left, right]), len(left)
    observed = left.mean() - right.mean()
    draws = np.random.default_rng(seed).permuted(np.tile(both, (permutations, 1)), axis=1)
    found = draws[:, :n].mean(axis=1) - draws[:, n:].mean(axis=1)
    # Sums in another order differ in the last bits: a tie must count as a tie.
    slack = 1e-12 * max(1.0, float(np.abs(both).max()))
    return float((1 + np.count_nonzero(found >= observed - slack)) / (1 + permutations))


def auc(positive: ArrayLike, negative: ArrayLike) -> float:
    """The probability that a positive scores above a negative, ties counting half (Mann–Whitney).

    >>> auc([0.9, 0.8], [0.1, 0.8])
    0.875
    """
    above, below = np.asarray(positive, dtype=np.float64), np.asarray(negative, dtype=np.float64)
    if not len(above) or not len(below):
        raise BadValueError("an AUC needs scores of both groups")
    _, less, most = _places(above, below)
    return float((less.sum() + most.sum()) / (2 * len(above) * len(below)))


def auc_interval(
    positive: ArrayLike, negative: ArrayLike, resamples: int = 500, level: float = 0.95, seed: int = 0
) -> Interval:
    """The AUC with a bootstrap interval; the two groups are drawn apart, as they share no passage."""
    return _percentiles(auc(positive, negative), _resampled_aucs(positive, negative, resamples, seed), level)


def auc_difference(
    first_positive: ArrayLike,
    first_negative: ArrayLike,
    second_positive: ArrayLike,
    second_negative: ArrayLike,
    draws: Draws,
) -> Interval:
    """The difference of two models' AUCs, `first − second`, on the same passages, paired.

    Both models see the same resampled passages; the two groups are drawn apart, as in `auc_interval`.

    Args:
        first_positive (`ArrayLike`):
            The first model's scores of the positive passages.
        first_negative (`ArrayLike`):
            The first model's scores of the negative passages.
        second_positive (`ArrayLike`):
            The second model's scores of the same positive passages, in the same order.
        second_negative (`ArrayLike`):
            The second model's scores of the same negative passages, in the same order.
        draws (`Draws`):
            How often the passages are drawn anew, the level of the interval, and the seed.

    Returns:
        `Interval`: The difference and its percentile interval.

    Raises:
        `BadValueError`: If a group is empty, or the two models have scores of different numbers of passages.
    """
    for group, one, other in (
        ("positive", first_positive, second_positive),
        ("negative", first_negative, second_negative),
    ):
        if np.shape(one) != np.shape(other):
            raise BadValueError(
                f"the first model has {np.size(one)} scores of {group} passages and the second {np.size(other)}: "
                "a paired difference needs the same passages for both, in the same order"
            )
    value = auc(first_positive, first_negative) - auc(second_positive, second_negative)
    spread = _resampled_aucs(first_positive, first_negative, draws.resamples, draws.seed)
    spread = spread - _resampled_aucs(second_positive, second_negative, draws.resamples, draws.seed)
    return _percentiles(value, spread, draws.level)


def priv_leak(auc: float, auc_reference: float) -> float | None:
    """MUSE's PrivLeak in percent, `100·((1−AUC) − (1−AUC_ref)) / (1−AUC_ref)`.

    0 is ideal; below 0 the text is still known, above 0 it is conspicuously avoided. (In MUSE an AUC counts members as
    the lower scores; here, as in `auc`, members score higher, hence `1 − AUC`.)

    Args:
        auc (`float`):
            Of the edited model, seen against held-out passages.
        auc_reference (`float`):
            Of the model that never saw either.

    Returns:
        `float`, or `None` where the reference's AUC is 1, which leaves nothing to divide by.

    >>> priv_leak(0.75, 0.5), priv_leak(0.5, 1.0)
    (-50.0, None)
    """
    return None if auc_reference == 1 else 100 * ((1 - auc) - (1 - auc_reference)) / (1 - auc_reference)


def _resampled_aucs(positive: ArrayLike, negative: ArrayLike, resamples: int, seed: int) -> Array:
    """The AUC in each resampling. Equal sizes and seeds give equal draws, which pairs two models."""
    above, below = np.asarray(positive, dtype=np.float64), np.asarray(negative, dtype=np.float64)
    return _kept_aucs(above.tobytes(), below.tobytes(), resamples, seed)


@lru_cache(maxsize=32)  # a reference's are asked for at every λ, and a model's for its interval and its difference
def _kept_aucs(positive: bytes, negative: bytes, resamples: int, seed: int) -> Array:
    above, below = np.frombuffer(positive), np.frombuffer(negative)
    left, right = _drawn_apart(len(above), len(below), resamples, seed)
    order, less, most = _places(above, below)
    wins = np.empty(resamples)
    rows = max(1, 100_000 // (len(above) + len(below)))  # at a time: as many as fit into a processor's cache
    for start in range(0, resamples, rows):
        part = slice(start, start + rows)
        # How often those were drawn that are not above each place: whole numbers, so that all sums are exact.
        drawn = np.zeros((len(right[part]), len(below) + 1), dtype=np.int64)
        np.cumsum(right[part, order], axis=1, out=drawn[:, 1:])
        wins[part] = ((drawn[:, less] + drawn[:, most]) * left[part]).sum(axis=1)
    aucs: Array = wins / (2 * len(above) * len(below))
    aucs.flags.writeable = False
    return aucs


def _places(above: Array, below: Array) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """The order of `below`; and for each of `above` how many of them are less, and how many less or equal."""
    order = np.argsort(below)
    known = ~np.isnan(above)  # what is not a number is above nothing
    return order, np.searchsorted(below[order], above) * known, np.searchsorted(below[order], above, "right") * known


@lru_cache(maxsize=4)
def _drawn_apart(n: int, m: int, resamples: int, seed: int) -> tuple[NDArray[np.unsignedinteger], ...]:
    """How often each passage of two groups is drawn in each resampling, in the smallest numbers that hold it."""
    draw = np.random.default_rng(seed)
    both = (draw.multinomial(size, [1 / size] * size, size=resamples) for size in (n, m))
    return tuple(counts.astype(np.min_scalar_type(counts.max())) for counts in both)


def _percentiles(value: float, resampled: Array, level: float) -> Interval:
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(float(value), float(low), float(high))
