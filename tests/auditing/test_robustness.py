"""The four figures of robustness: their formulas where nothing is zero, and what was decided where something is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_taskvec.auditing.robustness import (
    one_sided_quantisation_robustness,
    one_sided_relearning_robustness,
    symmetric_quantisation_robustness,
    symmetric_relearning_robustness,
)
from hf_taskvec.errors import BadValueError

GAINS = st.floats(-1, 1, allow_subnormal=False)
SCORES = st.floats(0, 1, allow_subnormal=False)


@given(GAINS, GAINS)
def test_relearning_figures_lie_between_0_and_1(edited, reference):
    one_sided = one_sided_relearning_robustness(edited, reference)
    symmetric = symmetric_relearning_robustness(edited, reference)
    assert 0 <= one_sided <= 1 and 0 <= symmetric <= 1
    if edited > reference > 0:
        assert one_sided == reference / edited
        # 1 − (u − r)/(u + r) = 2r/(u + r): less strict than r/u, since r ≤ u.
        assert symmetric == pytest.approx(2 * reference / (edited + reference)) and symmetric > one_sided - 1e-12
    if reference > edited > 0:
        assert one_sided == 1 > symmetric or symmetric == pytest.approx(1)
    assert symmetric == symmetric_relearning_robustness(reference, edited)


@pytest.mark.parametrize(
    "edited, reference, one_sided, symmetric",
    [
        (0.0, 0.0, 1, 1),  # nothing came back, nothing was learnt
        (0.0, 0.3, 1, 0),  # nothing came back, where even the reference learns
        (0.3, 0.0, 0, 0),  # all that came back was there
        (-0.1, 0.3, 1, 0),
        (-0.1, -0.1, 1, 1),
        (0.3, -0.1, 0, 0),
    ],
)
def test_relearning_that_moves_nothing_is_decided(edited, reference, one_sided, symmetric):
    assert one_sided_relearning_robustness(edited, reference) == one_sided
    assert symmetric_relearning_robustness(edited, reference) == symmetric


@given(SCORES, SCORES)
def test_quantisation_figures_lie_between_0_and_1(before, after):
    assert 0 <= one_sided_quantisation_robustness(before, after) <= 1
    assert 0 <= symmetric_quantisation_robustness(before, after) <= 1
    assert one_sided_quantisation_robustness(before, before) == symmetric_quantisation_robustness(before, before) == 1


def test_only_the_symmetric_figure_sees_what_comes_back():
    assert one_sided_quantisation_robustness(0.21, 0.83) == 1
    assert symmetric_quantisation_robustness(0.21, 0.83) == pytest.approx(1 - 0.62 / 1.04)
    assert symmetric_quantisation_robustness(0.0, 0.5) == symmetric_quantisation_robustness(0.5, 0.0) == 0


def test_scores_without_a_zero_are_refused():
    for figure in (one_sided_quantisation_robustness, symmetric_quantisation_robustness):
        with pytest.raises(BadValueError, match="log-probability"):
            figure(-2.0, -1.0)
