"""The two-sample test of Kolmogorov and Smirnov, exact: TOFU's forget quality is its p-value.

Everything is counted in whole numbers, so that a p-value of 1e-239, which is what a broken model comes to, has all of
its digits.
"""

from collections.abc import Sequence
from math import comb, isnan

from hf_taskvec.errors import BadValueError


def ks_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p-value of "both samples come from one distribution".

    The largest distance between the two empirical distribution functions is compared with that of every order in which
    the n + m values could have come, all equally likely: lattice paths from (0, 0) to (n, m), counted one by one
    (Hodges 1958). `scipy.stats.ks_2samp(method="exact")` computes the same; ties count as they do there.

    Args:
        first (`Sequence[float]`):
            The one sample.
        second (`Sequence[float]`):
            The other.

    Returns:
        `float`: From 0 to 1; 1 for two equal samples. The work grows with the product of the sizes.

    Raises:
        `BadValueError`: If a sample is empty, or a value is not a number.

    Example:
        >>> ks_p_value([1, 2, 3], [1, 2, 3]), ks_p_value([1, 2, 3], [4, 5, 6])
        (1.0, 0.1)

    """
    if not len(first) or not len(second):
        raise BadValueError("a Kolmogorov-Smirnov test needs values of both samples")
    if any(map(isnan, first)) or any(map(isnan, second)):
        raise BadValueError("a Kolmogorov-Smirnov test has no place for a value that is not a number")
    n, m = len(first), len(second)
    farthest = _distance(sorted(first), sorted(second))
    if farthest == 0:
        return 1.0
    every = comb(n + m, n)
    return (every - _paths_inside(n, m, farthest)) / every  # whole numbers: rounded once, by this division


def _distance(first: list[float], second: list[float]) -> int:
    """n·m times the largest distance between the two empirical distribution functions."""
    n, m = len(first), len(second)
    i = j = farthest = 0
    while i < n and j < m:
        value = min(first[i], second[j])
        while i < n and first[i] == value:  # all that are equal, in both, before one looks
            i += 1
        while j < m and second[j] == value:
            j += 1
        farthest = max(farthest, abs(i * m - j * n))
    return farthest


def _paths_inside(n: int, m: int, farthest: int) -> int:
    """The lattice paths from (0, 0) to (n, m) on which every |i·m − j·n| is less than `farthest`."""
    row = [1 if j * n < farthest else 0 for j in range(m + 1)]
    for j in range(1, m + 1):
        row[j] = row[j] and row[j - 1]
    for i in range(1, n + 1):
        row[0] = row[0] if i * m < farthest else 0
        for j in range(1, m + 1):
            row[j] = row[j] + row[j - 1] if abs(i * m - j * n) < farthest else 0
    return row[m]
