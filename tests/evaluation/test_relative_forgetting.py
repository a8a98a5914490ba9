"""Relative forgetting, against the formula written out, and against coverage that is counted."""

import numpy as np
import pytest

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation import protocols
from hf_taskvec.evaluation.scoring.drop_tests import losses
from hf_taskvec.evaluation.scoring.metrics import METRICS, AnsweredPassage, Metric, MetricInfo, measure
from hf_taskvec.evaluation.scoring.relative_forgetting import relative_forgetting, share_lost
from hf_taskvec.evaluation.scoring.statistics import Draws

DRAWS = Draws(resamples=400)


def scores(mean: float, n: int = 60, spread: float = 0.05, seed: int = 0) -> np.ndarray:
    return mean + spread * np.random.default_rng(seed).standard_normal(n)


@pytest.mark.parametrize("name", ["rouge_l", "loss"])
@pytest.mark.parametrize("paired", [True, False])
def test_0_is_untouched_1_never_seen_and_beyond_is_beyond(name, paired):
    metric = METRICS[name]
    known, never = (0.8, 0.2) if metric.higher else (0.1, 5.0)
    before, unseen = scores(known), scores(never, 60 if paired else 40, seed=1)
    for share in (0.0, 0.13, 1.0, 1.5):
        edited = scores(known + share * (never - known), seed=2)
        found = relative_forgetting(before, edited, unseen, metric, DRAWS, paired=paired)
        by_hand = (before.mean() - edited.mean()) / (before.mean() - unseen.mean())
        assert found.relative is not None and found.relative.value == pytest.approx(by_hand, rel=1e-12)
        assert found.relative.low < share + 0.05 and found.relative.high > share - 0.05
        assert found.gap.value == pytest.approx(abs(before.mean() - unseen.mean())) and found.gap.low > 0
        assert found.difference.value == pytest.approx(edited.mean() - unseen.mean())
    same = relative_forgetting(before, before, unseen, metric, DRAWS, paired=paired)
    assert same.relative is not None and same.relative.low == same.relative.value == same.relative.high == 0


def test_without_a_gap_there_is_no_relative_forgetting():
    before = scores(0.2)
    for never in (0.2, 0.6):  # as good as never seen; known better by the reference
        found = relative_forgetting(before, scores(0.1), scores(never, seed=3), METRICS["rouge_l"], DRAWS, paired=True)
        assert found.relative is None and found.gap.low <= 0


def test_pairing_takes_the_passages_own_difficulty_out():
    hard = scores(0.0, spread=0.2)
    before, edited, never = 0.8 + hard, 0.2 + hard, 0.2 + hard
    paired = relative_forgetting(before, edited, never, METRICS["rouge_l"], DRAWS, paired=True).relative
    apart = relative_forgetting(before, edited, never, METRICS["rouge_l"], DRAWS, paired=False).relative
    assert paired is not None and paired.high - paired.low < 1e-9
    assert apart is not None and apart.high - apart.low > 0.05


def test_perplexity_is_compared_as_the_loss_is():
    losses = [scores(m, seed=i) for i, m in enumerate((0.1, 2.0, 4.0))]
    by_loss = relative_forgetting(*losses, METRICS["loss"], DRAWS, paired=True)
    by_perplexity = relative_forgetting(*map(np.exp, losses), METRICS["perplexity"], DRAWS, paired=True)
    assert by_loss.relative is not None and by_perplexity.relative is not None
    assert by_perplexity.relative.value == pytest.approx(by_loss.relative.value)
    assert by_perplexity.before == pytest.approx(np.exp(by_loss.before))


def test_the_interval_covers_the_truth_as_often_as_it_says():
    draw, covered = np.random.default_rng(5), 0
    for _ in range(200):
        hard = 0.1 * draw.standard_normal(40)
        columns = [m + hard + 0.1 * draw.standard_normal(40) for m in (0.8, 0.32, 0.2)]
        found = relative_forgetting(*columns, METRICS["rouge_l"], Draws(resamples=300), paired=True)
        assert found.relative is not None
        covered += found.relative.covers(0.8)
    assert 0.9 <= covered / 200 <= 0.99


def test_what_a_kept_book_lost_is_a_share_of_its_score_or_of_a_tokens_probability():
    before, after = scores(0.5), scores(0.4, seed=1)
    lost = share_lost(before, after, METRICS["rouge_l"], DRAWS)
    assert lost is not None and lost.value == pytest.approx(1 - after.mean() / before.mean())
    grown = share_lost(scores(1.0), scores(1.0) + np.log(2), METRICS["loss"], DRAWS)
    assert grown is not None and grown.value == pytest.approx(0.5) and grown.high == pytest.approx(0.5)
    by_perplexity = share_lost(np.exp(scores(1.0)), 2 * np.exp(scores(1.0)), METRICS["perplexity"], DRAWS)
    assert by_perplexity is not None and by_perplexity.value == pytest.approx(0.5)
    assert share_lost(np.zeros(5), np.zeros(5), METRICS["rouge_l"], DRAWS) is None


@pytest.mark.parametrize("higher", [True, False])
def test_what_is_lost_of_a_score_below_zero_is_lost(higher):
    info = MetricInfo("own", "memory", higher, "a score of one's own")
    before, worse = np.full(8, -2.0), np.full(8, -3.0 if higher else -1.0)
    assert share_lost(before, worse, info, Draws(resamples=50)).value == pytest.approx(0.5)
    assert share_lost(before, before, info, Draws(resamples=50)).value == 0
    assert losses(before, worse, info).mean() == pytest.approx(0.5)


@pytest.mark.parametrize(("value", "geometric"), [(float("nan"), False), (float("inf"), False), (0.0, True)])
def test_an_own_metric_that_gives_no_number_is_refused_by_name(value, geometric):
    own = Metric("mine", "memory", True, "", geometric=geometric, compute=lambda passage, protocol: value)
    with pytest.raises(BadValueError, match=r"metric 'mine' is .* must give a finite number"):
        measure(AnsweredPassage("a b", "a b", (), ()), protocols.get(), [own])
