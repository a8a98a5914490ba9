"""Intervals that cover, tests that find what is there and nothing else, and metrics recomputed by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring import metrics, statistics
from hf_taskvec.evaluation.scoring.metrics import METRICS, AnsweredPassage, measure
from hf_taskvec.evaluation.scoring.statistics import (
    Bootstrap,
    Draws,
    Interval,
    auc,
    auc_difference,
    auc_interval,
    permutation_test,
    priv_leak,
)
from hf_taskvec.evaluation.texts import protocols

floats = st.floats(-5, 5)


def test_the_interval_of_a_mean_covers_the_truth_about_as_often_as_it_says():
    draw = np.random.default_rng(3)
    covered = sum(Bootstrap(60, resamples=400, seed=i).mean(draw.normal(1.5, 2, 60)).covers(1.5) for i in range(200))
    assert 0.88 * 200 <= covered <= 0.99 * 200


def test_pairing_makes_the_interval_of_a_difference_narrow():
    draw = np.random.default_rng(0)
    hard = draw.uniform(0, 1, 80)  # passages differ much more than the two models do
    before, after = hard + draw.normal(0, 0.01, 80), hard - 0.05 + draw.normal(0, 0.01, 80)
    paired = Bootstrap(80).difference(after, before)
    assert paired.high < -0.04 and paired.low > -0.06
    apart = Bootstrap(80, seed=1).means(after) - Bootstrap(80, seed=2).means(before)
    assert np.percentile(apart, 97.5) > 0  # the unpaired comparison would have missed it


@settings(max_examples=50, deadline=None)
@given(st.lists(floats, min_size=1, max_size=30), st.integers(0, 9))
def test_intervals_are_seeded_and_shift_with_the_values(values, seed):
    table = np.array(values)
    first = Bootstrap(len(values), 100, seed=seed).mean(table)
    assert first == Bootstrap(len(values), 100, seed=seed).mean(table)
    shifted = Bootstrap(len(values), 100, seed=seed).mean(table + 1)
    assert shifted.low == pytest.approx(first.low + 1) and shifted.high == pytest.approx(first.high + 1)
    slack = 1e-9
    assert first.low - slack <= first.high and min(values) - slack <= first.low and first.high <= max(values) + slack


def test_a_relative_drop_uses_the_same_draws_above_and_below():
    before = np.array([0.1, 0.9, 0.4, 0.7])
    exact = Bootstrap(4).relative(before / 2, before)
    assert exact is not None
    assert (exact.value, exact.low, exact.high) == pytest.approx((-0.5, -0.5, -0.5))
    assert Bootstrap(2).relative([1, 1], [0, 0]) is None


def test_a_relative_drop_without_any_score_to_lose_is_none():
    missed = [Bootstrap(2, resamples=1, seed=seed).relative([0, 1], [0, 2]) for seed in range(20)]
    assert None in missed and any(each is not None for each in missed)


def test_equivalence_is_more_than_no_difference():
    assert Interval(0.0, -0.3, 0.3).covers(0) and not Interval(0.0, -0.3, 0.3).within(0.1)
    assert Interval(0.02, -0.01, 0.05).within(0.1)


def test_the_permutation_test_finds_a_greater_loss_and_nothing_else():
    draw = np.random.default_rng(1)
    lost, kept = draw.normal(0.2, 0.1, 40), draw.normal(0.05, 0.1, 50)
    assert permutation_test(lost, kept, 2000) < 0.01
    assert permutation_test(kept, lost, 2000) > 0.95
    null = [permutation_test(draw.normal(0, 1, 15), draw.normal(0, 1, 20), 200, seed=i) for i in range(100)]
    assert 0.3 < np.mean(null) < 0.7 and np.mean(np.array(null) < 0.1) < 0.25
    assert permutation_test([0.0] * 5, [0.0] * 5, 100) == 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_the_auc_is_the_share_of_pairs_in_order(above, below):
    by_hand = sum((a > b) + 0.5 * (a == b) for a in above for b in below) / (len(above) * len(below))
    assert auc(above, below) == pytest.approx(by_hand)
    interval = auc_interval(above, below, 50)
    assert interval.value == pytest.approx(by_hand) and 0 <= interval.low <= interval.high <= 1 + 1e-12


def by_pairs(above, below, draws: Draws):
    """The AUC, and that of each resampling, from a comparison of every pair."""
    wins = (above[:, None] > below[None, :]) + 0.5 * (above[:, None] == below[None, :])
    draw = np.random.default_rng(draws.seed)
    left, right = (draw.multinomial(n, [1 / n] * n, size=draws.resamples).astype(float) for n in wins.shape)
    return wins.mean(), ((left @ wins) * right).sum(axis=1) / wins.size


def interval(value, resampled, level: float) -> Interval:
    tail = 100 * (1 - level) / 2
    return Interval(value, *np.percentile(resampled, [tail, 100 - tail]))


EDGES = st.lists(st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.25, 2.0, np.inf, np.nan]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(EDGES, EDGES)
def test_aucs_by_rank_are_those_of_all_pairs_to_the_last_bit(above, below):
    above, below, draws = np.array(above), np.array(below), Draws(40, 0.9, seed=3)
    assert auc_interval(above, below, 40, 0.9, 3) == interval(*by_pairs(above, below, draws), 0.9)


def test_aucs_of_many_passages_are_those_of_all_pairs_to_the_last_bit():
    draw, draws = np.random.default_rng(2), Draws(500, seed=1)
    above, below = draw.normal(0.3, 1, 700), draw.normal(0, 1, 400).round(1)
    above[:300] = above[:300].round(1)  # with ties
    (one, first), (other, second) = by_pairs(above, below, draws), by_pairs(above - 1, below, draws)
    assert auc_interval(above, below, 500, seed=1) == interval(one, first, 0.95)
    assert auc_difference(above, below, above - 1, below, draws) == interval(one - other, first - second, 0.95)


def test_what_a_reference_scores_is_drawn_once_for_many_models(monkeypatch):
    draw, draws = np.random.default_rng(5), Draws(30, seed=123)
    reference = draw.normal(size=(2, 11))
    models = [reference + draw.normal(size=(2, 11)) for _ in range(4)]
    ranked = []
    places = statistics._places
    monkeypatch.setattr(statistics, "_places", lambda *groups: ranked.append(groups) or places(*groups))
    for model in models:
        auc_interval(*model, draws.resamples, seed=draws.seed)
        auc_difference(*model, *reference, draws)
        auc_interval(*reference, draws.resamples, seed=draws.seed)
    points = 4 * (1 + 2 + 1)  # the values themselves, which cost next to nothing
    assert len(ranked) - points == 4 + 1  # the resamplings: once for each model


def test_the_difference_of_two_aucs_draws_the_same_passages_for_both():
    draw = np.random.default_rng(7)
    seen, held_out = draw.normal(1, 2, 9), draw.normal(0, 2, 7)
    other_seen, other_held_out = seen - 0.7 + draw.normal(0, 0.3, 9), held_out + draw.normal(0, 0.3, 7)
    found = auc_difference(seen, held_out, other_seen, other_held_out, Draws(resamples=300, level=0.9, seed=4))

    def pairs(above, below):
        return sum((a > b) + 0.5 * (a == b) for a in above for b in below) / (len(above) * len(below))

    # The passages themselves are drawn and repeated, and both models' scores of them compared.
    again = np.random.default_rng(4)
    left, right = again.multinomial(9, [1 / 9] * 9, size=300), again.multinomial(7, [1 / 7] * 7, size=300)
    spread = []
    for i, j in zip(left, right, strict=True):
        first = pairs(np.repeat(seen, i), np.repeat(held_out, j))
        spread.append(first - pairs(np.repeat(other_seen, i), np.repeat(other_held_out, j)))
    assert found.value == pytest.approx(pairs(seen, held_out) - pairs(other_seen, other_held_out), abs=1e-12)
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(spread, [5, 95])), abs=1e-12)


def test_pairing_finds_a_small_difference_of_aucs_that_groups_apart_would_miss():
    draw = np.random.default_rng(0)
    seen, held_out = draw.normal(0.5, 1, 60), draw.normal(0, 1, 60)
    paired = auc_difference(seen, held_out, seen - 0.15, held_out, Draws())
    assert 0 < paired.low < paired.value < paired.high < 0.1
    one, other = auc_interval(seen, held_out), auc_interval(seen - 0.15, held_out)
    assert one.low < other.high  # two separate intervals overlap
    same = auc_difference(seen, held_out, seen, held_out, Draws())
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_aucs_of_other_numbers_of_passages_have_no_paired_difference():
    with pytest.raises(BadValueError, match="2 scores of negative passages and the second 1"):
        auc_difference([1.0], [1.0, 2.0], [1.0], [1.0], Draws())
    with pytest.raises(BadValueError, match="both groups"):
        auc_difference([], [1.0], [], [1.0], Draws())


def test_privleak_is_below_0_for_known_text_and_above_for_avoided_text():
    assert priv_leak(0.5, 0.5) == 0
    assert priv_leak(1.0, 0.5) == -100 and priv_leak(0.0, 0.5) == 100
    # open-unlearning: score = 1 - auc, ref = 1 - auc_ref, (score - ref) / ref * 100
    assert priv_leak(0.8, 0.53) == pytest.approx((0.2 - 0.47) / 0.47 * 100)
    assert priv_leak(0.3, 1.0) is None


def test_nothing_to_draw_from_is_an_error():
    with pytest.raises(BadValueError, match="at least one"):
        Bootstrap(0)
    with pytest.raises(BadValueError, match="3 values for a bootstrap over 2"):
        Bootstrap(2).mean([1, 2, 3])
    with pytest.raises(BadValueError, match="both books"):
        permutation_test([], [1.0])


WORDS = st.lists(st.sampled_from("abcd"), max_size=15)


@settings(max_examples=150, deadline=None)
@given(WORDS, WORDS)
def test_the_longest_run_is_that_of_a_plain_search(left, right):
    by_hand = max(
        (
            n
            for n in range(len(left) + 1)
            for i in range(len(left) - n + 1)
            if any(left[i : i + n] == right[j : j + n] for j in range(len(right) - n + 1))
        ),
        default=0,
    )
    assert metrics.longest_run(" ".join(left), " ".join(right)) == by_hand


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_extraction_strength_is_open_unlearnings(hits):
    for k in range(len(hits)):  # their loop: k stays at the last index if no suffix matches
        if all(hits[k:]):
            break
    assert metrics.extraction_strength(hits) == pytest.approx(1 - k / len(hits), abs=1e-12)


def test_min_k_is_muses():
    log_probs = [-0.1, -3.0, -0.5, -8.0, -1.0, -2.0, -0.2]
    lowest = np.sort(log_probs)[: int(len(log_probs) * 0.4)]
    assert metrics.min_k(log_probs, 0.4) == pytest.approx(float(np.mean(lowest)), abs=1e-12)
    assert metrics.min_k([-1.0], 0.4) == -1.0


def test_health_tells_breaking_from_forgetting():
    broken = measure(AnsweredPassage("the the " * 30, "a true text", (-9.0, -9.0), (False,)), protocols.get())
    fluent = measure(
        AnsweredPassage("a calm and quite different story", "a true text", (-9.0,), (False,)), protocols.get()
    )
    assert broken["repetition"] > 0.9 > 0.1 > fluent["repetition"]
    assert broken["distinct_2"] < 0.1 < fluent["distinct_2"] == 1.0
    assert measure(AnsweredPassage("… !", "a", (-1.0,), (True,)), protocols.get())["empty"] == 1.0


def test_every_metric_has_a_definition_and_a_direction_and_perfect_recall_is_the_top():
    for metric in METRICS.values():
        assert metric.definition and metric.kind in ("memory", "health")
    answer = "one two three four five six"
    known = measure(AnsweredPassage(answer, answer, (-0.01,) * 8, (True,) * 6), protocols.get("muse-verbmem"))
    unknown = measure(AnsweredPassage("seven", answer, (-4.0,) * 8, (False,) * 6), protocols.get("muse-verbmem"))
    assert known["rouge_l"] == 100.0 and known["exact_memorisation"] == known["extraction_strength"] == 1.0
    for name, metric in METRICS.items():
        if metric.kind == "memory":
            assert (known[name] > unknown[name]) == metric.higher, name
    assert known["perplexity"] == pytest.approx(math.exp(0.01))


def test_open_unlearning_stems_and_muse_does_not():
    answered = AnsweredPassage("they were running", "they run", (-1.0,), (True,))
    from rouge_score.rouge_scorer import RougeScorer

    for name, stemmer, factor in (("muse-verbmem", False, 100), ("open-unlearning", True, 1)):
        peer = RougeScorer(["rougeL"], use_stemmer=stemmer).score(answered.answer, answered.output)["rougeL"]
        assert measure(answered, protocols.get(name))["rouge_l"] == pytest.approx(factor * peer.fmeasure, abs=1e-6)
