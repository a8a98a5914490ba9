"""The exact two-sample test, against scipy's and against every order that the values could have come in."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.ks_test import ks_p_value

values = st.lists(st.integers(0, 12).map(float), min_size=1, max_size=5)


@given(values, values)
def test_it_is_the_share_of_orders_that_are_as_far_apart(first, second):
    n, m = len(first), len(second)

    def distance(one, other, at):
        return max(abs(Fraction(sum(v <= x for v in one), n) - Fraction(sum(v <= x for v in other), m)) for x in at)

    seen = distance(first, second, first + second)
    every = [set(chosen) for chosen in combinations(range(n + m), n)]
    far = [chosen for chosen in every if distance(chosen, set(range(n + m)) - chosen, range(n + m)) >= seen]
    assert ks_p_value(first, second) == pytest.approx(len(far) / len(every), rel=1e-14)


@pytest.mark.parametrize(("n", "m", "shift"), [(400, 400, 0.1), (400, 300, 0.3), (40, 40, 0.9), (200, 200, 30.0)])
def test_it_is_scipys_exact_p_value(n, m, shift):
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(n + m)
    first, second = draw.normal(size=n).tolist(), (draw.normal(size=m) + shift).tolist()
    assert ks_p_value(first, second) == pytest.approx(stats.ks_2samp(first, second, method="exact").pvalue, rel=1e-9)


def test_samples_without_overlap_have_the_p_value_that_broken_models_are_published_with():
    # open-unlearning's docs/repro.md has 1.06e-239 for forget10, which has 400 questions.
    assert ks_p_value([0.0] * 400, [1.0] * 400) == pytest.approx(1.06e-239, rel=5e-3)


def test_equal_samples_and_empty_ones():
    assert ks_p_value([3.0, 1.0, 1.0], [1.0, 3.0, 1.0]) == 1
    with pytest.raises(BadValueError, match="both samples"):
        ks_p_value([], [1.0])
    with pytest.raises(BadValueError, match="not a number"):
        ks_p_value([float("nan")], [1.0])
