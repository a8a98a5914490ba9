"""Each definition against another way to compute it: rouge_score, scipy, and formulas written out in fp64."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.benchmarks import benchmark_metrics as metrics

probabilities = st.floats(1e-12, 1.0)
wrongs = st.lists(probabilities, min_size=1, max_size=5)
ANSWERS = [
    ("The keepers were running home", "the keeper runs home"),
    ("", "nothing"),
    ("Ada Moss keeps lamp 12. Ada keeps it.", "Ada Moss keeps lamp 12."),
]


@pytest.mark.parametrize(("output", "answer"), ANSWERS)
def test_rouge_is_that_of_stems_by_rouge_score(output, answer):
    from rouge_score.rouge_scorer import RougeScorer

    theirs = RougeScorer(["rougeL"], use_stemmer=True).score(answer, output)["rougeL"]
    assert metrics.verbmem(output, answer) == metrics.knowmem(output, answer) == theirs.fmeasure
    assert metrics.answer_recall(output, answer) == theirs.recall


def test_knowmem_ends_where_the_next_question_begins():
    for stop in ("\n\nmore", "\nQuestion: what?", " Question: Who?"):
        assert metrics.knowmem(f" Ada Moss{stop}", "Ada Moss") == 1
        assert metrics.verbmem(f" Ada Moss{stop}", "Ada Moss") < 1  # a continuation goes on
        assert metrics.before_stop(f" Ada Moss{stop}") == "Ada Moss"


def test_a_probability_is_the_geometric_mean_over_tokens():
    log_probs = np.log([0.5, 0.25, 0.125])
    assert metrics.answer_probability(log_probs) == pytest.approx((0.5 * 0.25 * 0.125) ** (1 / 3), rel=1e-14)


@given(probabilities, wrongs)
def test_the_two_truth_ratios_are_two_numbers(correct, wrong):
    mean = np.exp(np.mean(np.log(np.float64(wrong))))
    tofu, other = metrics.tofu_truth_ratio(correct, wrong), metrics.open_unlearning_truth_ratio(correct, wrong)
    assert tofu == pytest.approx(mean / (correct + 1e-10), rel=1e-12)
    assert other == pytest.approx(correct / (correct + mean + 1e-10), rel=1e-12)
    assert metrics.normalised_probability(correct, wrong) == pytest.approx(
        correct / (correct + sum(wrong) + 1e-10), rel=1e-12
    )
    if correct > 1e-3 and min(wrong) > 1e-3:  # where the guard is nothing, one tells the other
        assert other == pytest.approx(1 / (1 + tofu), rel=1e-5)


def test_knowing_the_truth_moves_the_two_truth_ratios_in_opposite_directions():
    known, unknown = (0.9, [0.01, 0.02]), (0.1, [0.1, 0.1])
    assert metrics.tofu_truth_ratio(*known) < 0.02 < 0.99 < metrics.tofu_truth_ratio(*unknown)
    assert metrics.open_unlearning_truth_ratio(*known) > 0.98
    assert metrics.open_unlearning_truth_ratio(*unknown) == pytest.approx(0.5, abs=1e-6)
    assert metrics.tofu_truth_ratio(0.5, [0.0, 0.5]) == 0  # an answer that cannot be written down is no error


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_truth_ratios_are_averaged_towards_one_and_below_one(ratios):
    table = np.float64(ratios)
    assert metrics.forget_truth_ratio(ratios) == pytest.approx(np.minimum(table, 1 / (table + 1e-10)).mean(), rel=1e-12)
    assert metrics.kept_truth_ratio(ratios) == pytest.approx(np.maximum(0, 1 - table).mean(), rel=1e-12)


@given(st.lists(st.floats(1e-6, 1.0), min_size=9, max_size=9))
def test_utility_is_scipys_harmonic_mean(values):
    stats = pytest.importorskip("scipy.stats")
    assert metrics.model_utility(values) == pytest.approx(stats.hmean(values), rel=1e-12)


def test_utility_has_nine_values_and_no_hidden_zero():
    assert metrics.model_utility([0.0, *[1.0] * 8]) == 0
    with pytest.raises(BadValueError, match="nine values, not of 8"):
        metrics.model_utility([1.0] * 8)


def test_forget_quality_is_scipys_test():
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(0)
    own, retrained = draw.lognormal(size=40).tolist(), (1.6 * draw.lognormal(size=40)).tolist()
    found = metrics.forget_quality(own, retrained)
    assert found == pytest.approx(stats.ks_2samp(own, retrained).pvalue, rel=1e-9) and 0 < found < 1
    inverted = metrics.forget_quality([1 / value for value in own], [1 / value for value in retrained])
    assert inverted == found  # so it does not matter that TOFU's script turns the ratio round
    assert metrics.forget_quality(own, own) == 1


def test_privleak_is_a_relative_change_of_what_muse_calls_the_auc():
    def muse_auc(members, others):  # members below others: the chance that a member's loss is the higher one
        pairs = [(-member, -other) for member in members for other in others]
        return np.mean([(member > other) + (member == other) / 2 for member, other in pairs])

    draw = np.random.default_rng(1)
    own = draw.normal(0.7, 1, 30).tolist(), draw.normal(0, 1, 25).tolist()
    retrained = draw.normal(0.1, 1, 30).tolist(), draw.normal(0, 1, 25).tolist()
    expected = 100 * (muse_auc(*own) - muse_auc(*retrained)) / muse_auc(*retrained)
    assert metrics.privacy_leak(*own, *retrained) == pytest.approx(expected, rel=1e-12)
    assert expected < -10  # forget texts are the likelier ones: still known
    assert metrics.privacy_leak(*retrained, *retrained) == 0
    avoided = metrics.privacy_leak([-value for value in own[0]], own[1], *retrained)
    assert avoided > 10


def test_privleak_without_anything_to_divide_by_is_an_error_not_none():
    with pytest.raises(BadValueError, match=r"AUC is 1.*never saw the forget set"):
        metrics.privacy_leak([1.0], [2.0], [2.0, 3.0], [1.0, 0.0])
    assert math.isfinite(metrics.privacy_leak([1.0], [2.0], [2.0, 0.0], [1.0, 0.0]))
