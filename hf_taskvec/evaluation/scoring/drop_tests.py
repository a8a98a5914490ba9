"""Did one book lose more than another? Losses are shares of each book's own score at λ=0."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.statistics import Array, Draws, Interval, difference_apart, permutation_test
from hf_taskvec.evaluation.texts.books import Role

# The experiment's signature: forget ≈ aligned ≫ retain. Which role is asked to have lost more than which.
PAIRS: tuple[tuple[Role, Role], ...] = (("forget", "retain"), ("aligned", "retain"), ("forget", "aligned"))


@dataclass(frozen=True)
class LossTest:
    """Did the book `first` lose more of `metric` than the book `second` at λ=`scale`?

    Args:
        first, second (`str`):
            The books: a forget or aligned one, and a retained or aligned one.
        scale (`float`):
            λ.
        metric (`str`):
            What is lost.
        first_loss, second_loss (`float`):
            The share of its score at λ=0 that each book lost (0.3: 30 %); for
            perplexity the logarithm of its growth.
        difference (`Interval`):
            `first_loss − second_loss`. The books share no passage: drawn apart.
        p_value (`float`):
            Of the one-sided permutation test for `first_loss > second_loss`.
        passages (`tuple[int, int]`):
            How many of each book it rests on.
    """

    first: str
    second: str
    scale: float
    metric: str
    first_loss: float
    second_loss: float
    difference: Interval
    p_value: float
    passages: tuple[int, ...]


def losses(before: Array, after: Array, metric: MetricInfo) -> Array:
    """What each passage lost, in shares of the book's mean at λ=0; positive: less is remembered."""
    if metric.geometric:  # a ratio of perplexities is a difference of logarithms
        grown: Array = np.log(after) - np.log(before)
        return -grown if metric.higher else grown
    lost = before - after if metric.higher else after - before
    level = before.mean() if len(before) and not metric.nats else 0.0
    return lost / abs(level) if level else lost


def loss_tests(
    books: Sequence[tuple[str, Role]],
    scale: float,
    metric: MetricInfo,
    column: Callable[[str, float], Array],
    draws: Draws,
) -> tuple[LossTest, ...]:
    """A `LossTest` at one λ for every two books whose roles are in `PAIRS`.

    Args:
        books (`Sequence[tuple[str, str]]`):
            Names and roles.
        scale (`float`):
            λ.
        metric (`MetricInfo`):
            A memory metric.
        column (`Callable[[str, float], ndarray]`):
            The values of a book's passages at some λ, by the book's name.
        draws (`Draws`):
            For the interval and the test.
    """
    lost = {name: losses(column(name, 0.0), column(name, scale), metric) for name, _ in books}
    found = []
    for roles in PAIRS:
        firsts, seconds = ([name for name, role in books if role == wanted and len(lost[name])] for wanted in roles)
        for first in firsts:
            for second in seconds:
                left, right = lost[first], lost[second]
                found.append(
                    LossTest(
                        first=first,
                        second=second,
                        scale=scale,
                        metric=metric.name,
                        first_loss=float(left.mean()),
                        second_loss=float(right.mean()),
                        difference=difference_apart(left, right, draws),
                        p_value=permutation_test(left, right, draws.permutations, draws.seed),
                        passages=(len(left), len(right)),
                    )
                )
    return tuple(found)
