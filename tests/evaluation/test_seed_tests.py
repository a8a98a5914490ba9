"""Tests over seeds, against scipy and against counting every case."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.seed_tests import (
    EXACT_SEEDS,
    holm,
    mean_over_seeds,
    sign_flip_test,
    sign_test,
    smallest_p,
    t_quantile,
)

# Small whole numbers: ties and zeros are common, and sums are exact.
DIFFERENCES = st.lists(st.integers(-4, 4), min_size=1, max_size=9)


@given(DIFFERENCES)
def test_the_sign_test_is_the_share_of_coin_tosses_that_go_so_far(values: list[int]) -> None:
    sides = [value > 0 for value in values if value]
    tosses = [sum(toss) for toss in itertools.product([0, 1], repeat=len(sides))]
    above = sum(sides)
    assert sign_test(values) == np.mean([heads >= above for heads in tosses])
    far = abs(2 * above - len(sides))
    assert sign_test(values, "two_sided") == np.mean([abs(2 * heads - len(sides)) >= far for heads in tosses])


@given(DIFFERENCES)
def test_the_sign_flip_test_is_the_share_of_sign_patterns_that_go_so_far(values: list[int]) -> None:
    sums = [np.dot(signs, values) for signs in itertools.product([-1, 1], repeat=len(values))]
    assert sign_flip_test(values) == np.mean([s >= sum(values) for s in sums])
    assert sign_flip_test(values, "two_sided") == np.mean([abs(s) >= abs(sum(values)) for s in sums])


def test_both_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(0).normal(0.4, 1, 11)
    for side, theirs in (("greater", "greater"), ("two_sided", "two-sided")):
        expected = stats.binomtest(int((values > 0).sum()), len(values), alternative=theirs).pvalue
        assert sign_test(values, side) == pytest.approx(expected, rel=1e-12)
        found = stats.permutation_test(
            (values,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative=theirs
        )
        assert sign_flip_test(values, side) == pytest.approx(found.pvalue, rel=1e-12)


def test_a_tie_counts_whatever_order_the_sum_has() -> None:
    """0.1 + 0.2 − 0.3 is not 0 in floating point, and 1 + 2 − 3 is: both must count the same ties."""
    assert sign_flip_test([0.1, 0.2, -0.3]) == sign_flip_test([1, 2, -3]) == sign_flip_test([-0.3, 0.1, 0.2])
    assert sign_flip_test([1e-20, 2e-20, -3e-20]) == sign_flip_test([1, 2, -3])


def test_more_seeds_than_can_be_counted_are_drawn_and_repeat() -> None:
    values = np.random.default_rng(1).normal(0.3, 1, EXACT_SEEDS + 1)
    exact = sign_flip_test(values[:-1])
    drawn = sign_flip_test([*values[:-1], 0.0])  # a difference of 0 changes nothing, but makes one seed too many
    assert drawn != exact and drawn == pytest.approx(exact, abs=4 * math.sqrt(exact / 10_000))
    assert sign_flip_test(values, seed=3) == sign_flip_test(values, seed=3) != sign_flip_test(values, seed=4)
    assert sign_flip_test(np.ones(60), draws=99) == 0.01  # never 0: the observed pattern is one of them


@pytest.mark.parametrize("seeds", [1, 2, 5, 8])
def test_no_test_says_more_than_so_few_seeds_can(seeds: int) -> None:
    agreeing = np.linspace(1, 2, seeds)
    for test in (sign_test, sign_flip_test):
        assert test(agreeing) == smallest_p(seeds) == 0.5**seeds
        assert test(agreeing, "two_sided") == smallest_p(seeds, "two_sided")
        assert test(-agreeing) == 1.0


def test_seeds_that_take_no_side_say_nothing() -> None:
    for test in (sign_test, sign_flip_test):
        assert test([0.0, 0.0]) == test([0.0, 0.0], "two_sided") == test([]) == 1.0


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=7))
def test_holm_rejects_what_its_step_down_rule_rejects(p_values: dict[str, float]) -> None:
    """The rule as Holm states it: in order, while p ≤ level / (number of those that are left)."""
    adjusted = holm(p_values)
    assert list(adjusted) == list(p_values)
    # Not levels at which p·k and level/k round apart.
    for level in (0.0503, 0.1007, 0.49, 0.9901):
        rejected = set()
        for place, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
            if p_values[name] > level / (len(p_values) - place):
                break
            rejected.add(name)
        assert {name for name, value in adjusted.items() if value <= level} == rejected


def test_holm_lies_between_no_correction_and_bonferronis() -> None:
    p_values = {"a": 0.04, "b": 0.001, "c": 0.03, "d": 0.9}
    adjusted = holm(p_values)
    assert adjusted == pytest.approx({"a": 0.09, "b": 0.004, "c": 0.09, "d": 0.9})
    assert all(p <= adjusted[name] <= min(1, 4 * p) for name, p in p_values.items())
    assert holm({"alone": 0.2}) == {"alone": 0.2} and holm({}) == {}


def test_means_have_the_t_interval_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for n in (2, 3, 4, 5, 6, 30):
        values = np.random.default_rng(n).normal(1, 0.2, n)
        for level in (0.8, 0.95, 0.99):
            found = mean_over_seeds(values, level)
            low, high = stats.t.interval(level, n - 1, loc=values.mean(), scale=stats.sem(values))
            assert (found.seeds, found.value) == (n, pytest.approx(values.mean(), rel=1e-12))
            assert found.interval is not None
            assert (found.interval.low, found.interval.high) == pytest.approx((low, high), rel=1e-9)


def test_student_s_t_has_the_closed_forms_of_one_and_two_degrees_of_freedom() -> None:
    for level in (0.1, 0.5, 0.95, 0.999):
        assert t_quantile(level, 1) == pytest.approx(math.tan(math.pi * level / 2))
        assert t_quantile(level, 2) == pytest.approx(level * math.sqrt(2 / (1 - level**2)))


def test_t_intervals_of_five_seeds_hold_the_truth_as_often_as_they_say() -> None:
    draws = np.random.default_rng(0).normal(1, 0.3, (2000, 5))
    covered = np.mean([mean_over_seeds(row, 0.9).interval.covers(1) for row in draws])
    assert covered == pytest.approx(0.9, abs=0.025)


def test_one_seed_has_a_mean_and_no_interval() -> None:
    found = mean_over_seeds([0.5])
    assert (found.value, found.interval, found.seeds) == (0.5, None, 1)


def test_what_makes_no_sense_is_refused() -> None:
    for test in (sign_test, sign_flip_test, mean_over_seeds):
        with pytest.raises(BadValueError, match="one finite number for each seed"):
            test([0.1, float("nan")])
    with pytest.raises(BadValueError, match="no side 'less': use 'greater' or 'two_sided'"):
        sign_test([1.0], "less")
    with pytest.raises(BadValueError, match="draws=0 must be positive"):
        sign_flip_test([1.0], draws=0)
    with pytest.raises(BadValueError, match=r"the p-value of 'forget' is 1\.2"):
        holm({"forget": 1.2})
    with pytest.raises(BadValueError, match="at least one seed"):
        mean_over_seeds([])
    with pytest.raises(BadValueError, match="level=95 must be between 0 and 1"):
        mean_over_seeds([1.0, 2.0], 95)
