"""How sure several seeds make us. The seed is the unit of evidence, not the passage: one seed is one experiment.

Passages of one seed share a model, a tokenizer and a vector; a thousand of them are still one experiment. All tests
here are exact, and say no more than so few numbers can: of n seeds that all agree, a one-sided test gives 1/2ⁿ at best.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.statistics import Array, Interval

Side = Literal["greater", "two_sided"]
# Up to here every pattern of signs is looked at: 2²⁰, about a million.
EXACT_SEEDS = 20


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds.

    Args:
        value (`float`):
            The mean.
        interval (`Interval`, *optional*):
            Student's t interval around it; `None` of a single seed, which tells nothing of others.
        seeds (`int`):
            How many seeds it rests on.
    """

    value: float
    interval: Interval | None
    seeds: int


def sign_test(differences: Sequence[float], side: Side = "greater") -> float:
    """The p-value of the exact sign test: how surprising is it that so many seeds agree, if each tosses a coin?

    Args:
        differences (`Sequence[float]`):
            One for each seed. A difference of 0 takes no side and is left out, as usual.
        side (`"greater"` or `"two_sided"`, *optional*, defaults to `"greater"`):
            Whether they are asked to be above 0, or on either side of it.

    Returns:
        `float`: The p-value; 1 if no seed takes a side.

    Raises:
        `BadValueError`: If a difference is not a finite number, or there is no such side.

    Example:
        >>> sign_test([0.2, 0.1, 0.3, 0.1, 0.2]), sign_test([0.2, 0.1, 0.3, 0.1, 0.2], "two_sided")
        (0.03125, 0.0625)

    """
    values = _finite(differences)
    above, below = int(np.count_nonzero(values > 0)), int(np.count_nonzero(values < 0))
    if _two_sided(side):
        return min(1.0, 2 * _at_least(max(above, below), above + below))
    return _at_least(above, above + below)


def sign_flip_test(
    differences: Sequence[float], side: Side = "greater", *, draws: int = 10_000, seed: int = 0
) -> float:
    """The p-value of the paired permutation test: how often is the mean as large if every seed's sign is a coin toss?

    It uses the sizes of the differences, where the sign test only counts. Up to 20 seeds all 2ⁿ patterns of signs are
    looked at, and the p-value is exact; of more seeds, patterns are drawn.

    Args:
        differences (`Sequence[float]`):
            One for each seed.
        side (`"greater"` or `"two_sided"`, *optional*, defaults to `"greater"`):
            Whether the mean is asked to be above 0, or on either side of it.
        draws (`int`, *optional*, defaults to 10,000):
            How many patterns are drawn of more than 20 seeds.
        seed (`int`, *optional*, defaults to 0):
            Of those draws.

    Returns:
        `float`: The p-value; 1 without seeds.

    Raises:
        `BadValueError`: If a difference is not a finite number, `draws` is not positive, or there is no such side.

    Example:
        >>> sign_flip_test([0.3, 0.1, 0.2]), sign_flip_test([0.3, -0.1, 0.2])
        (0.125, 0.25)

    """
    values = _finite(differences)
    if draws < 1:
        raise BadValueError(f"draws={draws} must be positive: so many patterns of signs are drawn of many seeds")
    exact = len(values) <= EXACT_SEEDS
    sums = _all_flips(values) if exact else _drawn_flips(values, draws, seed)
    observed = float(values.sum())
    if _two_sided(side):
        sums, observed = np.abs(sums), abs(observed)
    # Sums in another order differ in the last bits: a tie must count as a tie.
    count = int(np.count_nonzero(sums >= observed - 1e-12 * float(np.abs(values).sum())))
    return count / len(sums) if exact else (1 + count) / (1 + len(sums))


def smallest_p(seeds: int, side: Side = "greater") -> float:
    """The smallest p-value that so many seeds can give, all of them agreeing.

    Args:
        seeds (`int`):
            How many.
        side (`"greater"` or `"two_sided"`, *optional*, defaults to `"greater"`):
            Of which test.

    Returns:
        `float`: 1/2ⁿ, or twice that.

    Example:
        >>> smallest_p(5), smallest_p(5, "two_sided")
        (0.03125, 0.0625)

    """
    return min(1.0, (2 if _two_sided(side) else 1) * 0.5**seeds)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """P-values corrected for how many there are, by Holm's step-down rule (Holm 1979).

    Whoever calls everything below 0.05 after this is wrong about any of them with a probability of at most 0.05,
    however they depend on each other.

    Args:
        p_values (`Mapping[str, float]`):
            All tests that were made, by name.

    Returns:
        `dict[str, float]`: The adjusted p-values, in the same order.

    Raises:
        `BadValueError`: If a p-value is not between 0 and 1.

    Example:
        >>> holm({"forget": 0.01, "aligned": 0.04, "other": 0.03})
        {'forget': 0.03, 'aligned': 0.06, 'other': 0.06}

    """
    for name, value in p_values.items():
        if not 0 <= value <= 1:
            raise BadValueError(f"the p-value of {name!r} is {value}: it must be between 0 and 1")
    adjusted: dict[str, float] = {}
    reached = 0.0
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        reached = max(reached, min(1.0, (len(p_values) - place) * p_values[name]))
        adjusted[name] = reached
    return {name: adjusted[name] for name in p_values}


def mean_over_seeds(values: Sequence[float], level: float = 0.95) -> SeedMean:
    """The mean of one number for each seed, with Student's t interval.

    The interval takes the seeds' numbers as draws from a normal distribution. That cannot be checked on five of them;
    a bootstrap of five would be too narrow, and the sign-flip test cannot reach 95 % with fewer than six.

    Args:
        values (`Sequence[float]`):
            One for each seed.
        level (`float`, *optional*, defaults to 0.95):
            Of the interval.

    Returns:
        `SeedMean`: The mean, its interval (`None` of a single seed), and the number of seeds.

    Raises:
        `BadValueError`: If there are no values, one is not finite, or, of several, the level is not between 0 and 1.

    Example:
        >>> found = mean_over_seeds([0.9, 1.1, 1.0])
        >>> f"{found.value:.2f} [{found.interval.low:.2f}, {found.interval.high:.2f}]"
        '1.00 [0.75, 1.25]'

    """
    found = _finite(values)
    if not len(found):
        raise BadValueError("no values: a mean over seeds needs at least one seed")
    mean = math.fsum(found) / len(found)
    if len(found) == 1:
        return SeedMean(mean, None, 1)
    spread = math.sqrt(math.fsum((found - mean) ** 2) / (len(found) - 1) / len(found))
    reach = t_quantile(level, len(found) - 1) * spread
    return SeedMean(mean, Interval(mean, mean - reach, mean + reach), len(found))


def t_quantile(level: float, freedom: int) -> float:
    """How many standard errors to either side Student's t interval reaches.

    Args:
        level (`float`):
            Of the interval, such as 0.95.
        freedom (`int`):
            The degrees of freedom: one less than the numbers that a mean is of.

    Returns:
        `float`: The number t with P(|T| ≤ t) = `level`.

    Raises:
        `BadValueError`: If the level is not between 0 and 1, or there is no degree of freedom.

    Example:
        >>> round(t_quantile(0.95, 4), 4)
        2.7764

    """
    if not 0 < level < 1 or freedom < 1:
        raise BadValueError(f"level={level} must be between 0 and 1, as 0.95 is, and freedom={freedom} at least 1")
    # The angle atan(t/√ν) is found by bisection: P grows with it.
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _t_within(angle: float, freedom: int) -> float:
    """P(|T| ≤ √ν·tan(angle)) for a whole number ν of degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):  # the powers of the cosine up to ν − 2
        total += term
        term *= square * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _two_sided(side: Side) -> bool:
    if side not in ("greater", "two_sided"):
        raise BadValueError(f"no side {side!r}: use 'greater' or 'two_sided'")
    return side == "two_sided"


def _finite(values: Sequence[float]) -> Array:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise BadValueError(f"{list(values)!r} must be one finite number for each seed; leave a seed without one out")
    return found


def _at_least(heads: int, tosses: int) -> float:
    """The probability of so many heads or more."""
    return sum(math.comb(tosses, k) for k in range(heads, tosses + 1)) / 2**tosses


def _all_flips(values: Array) -> Array:
    """The sum under each of the 2ⁿ patterns of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def _drawn_flips(values: Array, draws: int, seed: int) -> Array:
    """The sum under drawn patterns of signs."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(draws, len(values)))
    flipped: Array = np.einsum("bn,n->b", signs, values, optimize=False)  # not by BLAS: no thread moves a digit
    return flipped
