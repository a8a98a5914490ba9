"""A verdict that can fail: planted truths, one λ against another, and the words."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.evaluation import Criteria
from hf_taskvec.evaluation.scoring.metrics import METRICS, PRIMARY
from hf_taskvec.evaluation.scoring.scale_choice import NeverSeen, choose
from hf_taskvec.evaluation.scoring.statistics import Draws, Interval
from hf_taskvec.evaluation.scoring.verdict import (
    BookColumns,
    Half,
    MembershipColumns,
    MembershipVerdict,
    MetricVerdict,
    judge,
    overall,
)
from hf_taskvec.evaluation.scoring.verdict_words import verdict_sentence

DRAWS = Draws(resamples=300)
#: what a model that knows the book scores, and one that never saw it
KNOWN = {"rouge_l": 0.8, "loss": 0.04, "extraction_strength": 0.7, "exact_memorisation": 0.97}
NEVER = {"rouge_l": 0.13, "loss": 5.7, "extraction_strength": 0.03, "exact_memorisation": 0.25}
REFERENCE = NeverSeen("reference", "retrained")


def spread(mean: float, n: int, seed: int, width: float = 0.02) -> np.ndarray:
    return mean + width * np.random.default_rng(seed).standard_normal(n)


def edited(shares: dict[str, float] | float) -> dict[str, float]:
    """The scores of a model that has gone this share of the way from known to never seen."""
    given = shares if isinstance(shares, dict) else dict.fromkeys(PRIMARY, shares)
    return {m: KNOWN[m] + given[m] * (NEVER[m] - KNOWN[m]) for m in PRIMARY}


def half(
    at: dict[float, dict[str, float]],
    never: dict[str, float] = NEVER,
    kept: dict[float, float] | None = None,
    auc: dict[float, float] | None = None,
    n: int = 60,
    seed: int = 0,
    reference_auc: float = 0.0,
) -> Half:
    """Passages with these means; `kept` is the share of each metric that a kept book has left, `auc` shifts Min-K."""
    at = {0.0: KNOWN, **at}
    kept = {0.0: 1.0, **(kept or dict.fromkeys(at, 1.0))}
    auc = {0.0: 3.0, **(auc or dict.fromkeys([s for s in at if s], 0.0))}

    def left(metric: str, share: float) -> float:
        return KNOWN[metric] - np.log(share) if metric == "loss" else KNOWN[metric] * share

    return Half(
        forget={
            "alice": {
                m: BookColumns(
                    {s: spread(v[m], n, seed + i) for i, (s, v) in enumerate(at.items())}, spread(never[m], n, seed + 9)
                )
                for m in PRIMARY
            }
        },
        retain={
            "oz": {
                m: BookColumns({s: spread(left(m, v), n, seed + 20, 0.005) for s, v in kept.items()}) for m in PRIMARY
            }
        },
        membership={
            "alice": MembershipColumns(
                {s: spread(v, 2 * n, seed + 30, 1.0) for s, v in auc.items()},
                {s: spread(0.0, 2 * n, seed + 31, 1.0) for s in auc},
                (spread(reference_auc, 2 * n, seed + 30, 1.0), spread(0.0, 2 * n, seed + 31, 1.0)),
            )
        },
    )


def verdict(shares, **more):
    return judge(-1.0, half({-1.0: edited(shares)}, **more), Criteria(), METRICS, DRAWS)


def test_the_retrained_model_passes_and_the_untouched_one_fails():
    found = verdict(1.0)
    assert found.outcome == "as_if_never_seen" and found.kept == "kept" and found.passed
    assert found.sentence.startswith("the book is as if never seen (R = 1.0")
    untouched = verdict(0.0, auc={-1.0: 3.0})
    assert untouched.outcome == "still_known" and not untouched.passed
    assert "still generates it, and still predicts it" in untouched.sentence
    assert "still told from unseen ones" in untouched.sentence
    itself = judge(0.0, half({-1.0: NEVER}), Criteria(), METRICS, DRAWS)
    assert {m.relative.value for m in itself.metrics} == {0.0} and itself.outcome == "still_known"


def test_a_model_that_no_longer_writes_the_book_but_predicts_it_has_not_forgotten_it():
    """Measured on a real model: Rouge-L 0.18 beside 0.13 for never seen, loss 0.80 beside 5.71."""
    found = verdict({"rouge_l": 0.93, "loss": 0.134, "extraction_strength": 0.6, "exact_memorisation": 0.3})
    assert found.outcome == "still_known"
    assert "generates it no more, but still predicts it" in found.sentence
    assert {m.metric: m.outcome for m in found.metrics}["rouge_l"] == "forgotten"
    by_rouge = judge(-1.0, half({-1.0: edited(0.95)}), Criteria(metrics=("rouge_l",)), METRICS, DRAWS)
    assert by_rouge.outcome == "as_if_never_seen"  # what Rouge-L alone would have said


def test_forgetting_too_much_is_no_success():
    found = verdict(1.6)
    assert found.outcome == "over_forgotten" and not found.passed
    assert found.sentence.startswith(
        "forgotten beyond never seen: the model generates it less than one that never saw it"
    )
    mixed = verdict({**dict.fromkeys(PRIMARY, 1.0), "loss": 3.0})
    assert mixed.outcome == "over_forgotten"
    assert "generates it no more, but predicts it less than one that never saw it" in mixed.sentence


def test_membership_alone_fails_a_verdict_both_ways():
    for shift, outcome, words in (
        (2.0, "still_known", "still told"),
        (-2.0, "over_forgotten", "conspicuously avoided"),
    ):
        found = verdict(1.0, auc={-1.0: shift})
        assert found.outcome == outcome and words in found.sentence
        leak = found.membership[0].priv_leak
        assert leak is not None and (leak < -20 if shift > 0 else leak > 20)


def test_a_model_that_hardly_knew_the_book_cannot_be_judged():
    # A never-seen level as high as what the model has: λ = 0 would pass by any margin.
    found = judge(-1.0, half({-1.0: edited(0.0)}, never=KNOWN), Criteria(), METRICS, DRAWS)
    assert found.outcome == "cannot_tell" and not found.passed
    assert found.sentence.startswith("cannot tell: the model hardly knew the book")
    assert "nothing to forget" not in found.sentence
    # By Rouge-L alone it hardly knew it, while the likelihood knows better: still no pass, and it says by what.
    one = {**NEVER, "rouge_l": KNOWN["rouge_l"]}
    half_known = judge(-1.0, half({-1.0: edited(1.0)}, never=one), Criteria(), METRICS, DRAWS)
    assert half_known.outcome == "cannot_tell" and "hardly knew the book by rouge_l" in half_known.sentence


def test_few_passages_are_told_and_how_many_would_do():
    noisy = half({-1.0: edited(1.0)}, n=12)
    wide = {
        m: BookColumns({s: c.at[s] + spread(0, 12, 77 + int(s), 0.2) for s in c.at}, c.never)
        for m, c in noisy.forget["alice"].items()
    }
    found = judge(-1.0, Half({"alice": wide}), Criteria(metrics=("rouge_l",)), METRICS, DRAWS)
    assert found.outcome == "cannot_tell" and "rests on only 12 passages" in found.sentence
    needed = found.metrics[0].needed
    assert needed is not None and needed > 12 and f"about {needed} in place of 12 would do" in found.sentence
    assert "membership was not tested" in found.sentence
    assert "rests on only" not in verdict(1.0).sentence


def test_a_reference_that_knows_the_book_is_found_out():
    found = verdict(1.0, reference_auc=3.0)
    assert found.outcome == "cannot_tell" and "the reference model itself knows alice" in found.sentence


def test_the_old_margin_is_there_by_name_and_no_longer_passes_the_untouched_model():
    criteria = Criteria(rule="margin", margin=0.1)
    assert judge(-1.0, half({-1.0: edited(1.0)}), criteria, METRICS, DRAWS).outcome == "as_if_never_seen"
    assert judge(-1.0, half({-1.0: edited(1.5)}), criteria, METRICS, DRAWS).outcome == "over_forgotten"
    near = {**NEVER, "rouge_l": KNOWN["rouge_l"] - 0.05}
    found = judge(-1.0, half({-1.0: edited(0.0)}, never=near), criteria, METRICS, DRAWS)
    assert found.outcome == "cannot_tell" and found.metrics[0].outcome == "untestable"


def test_every_metric_of_a_kept_book_is_bounded():
    found = judge(-1.0, half({-1.0: edited(1.0)}, kept={-1.0: 0.8}), Criteria(), METRICS, DRAWS)
    assert found.outcome == "as_if_never_seen" and found.kept == "lost" and not found.passed
    assert {loss.metric: round(loss.lost.value, 2) for loss in found.retained} == dict.fromkeys(PRIMARY, 0.2)


def test_the_gentlest_lambda_that_meets_all_criteria_is_chosen():
    at = {-0.5: edited(0.6), -1.0: edited(0.95), -1.5: edited(1.1), -2.0: edited(2.0)}
    halves = [half(at, seed=s) for s in (0, 100)]
    args = {"never_seen": REFERENCE, "draws": DRAWS}
    found = choose([0.0, *at], *halves, Criteria(), METRICS, **args)
    assert found.scale == -1.0 and found.nearest is None and found.verdict.passed
    assert [c.scale for c in found.candidates if c.qualifies] == [-1.0, -1.5]
    assert [c.forgets for c in found.candidates] == [False, False, True, True, True]
    assert found.candidates[-1].relative["loss"] == pytest.approx(2.0, abs=0.05)
    assert "λ=-1 is the smallest |λ| that meets the criteria" in found.reason


def test_where_none_qualifies_the_nearest_is_named_with_its_cost_and_what_to_try():
    at = {-0.5: edited(0.4), -1.0: edited(0.9)}
    halves = [half(at, kept={-0.5: 0.95, -1.0: 0.7}, seed=s) for s in (0, 100)]
    args = {"never_seen": REFERENCE, "draws": DRAWS}
    found = choose([0.0, *at], *halves, Criteria(), METRICS, **args)
    assert found.scale is None and found.nearest == found.judged == -1.0
    assert "λ=-1 comes nearest" in found.reason and "oz lost 30% of its" in found.reason
    assert "accept a retain_bound of 0.3" in found.reason and "add the kept books' vectors back" in found.reason
    assert choose([0.0, *at], *halves, Criteria(retain_bound=0.35), METRICS, **args).scale == -1.0
    gentle = choose([0.0, -0.5], *halves, Criteria(), METRICS, **args)
    assert "Try a larger |λ| than 0.5" in gentle.reason


def test_a_metric_that_shows_no_gap_on_the_choosing_half_is_named():
    one = {**NEVER, "rouge_l": KNOWN["rouge_l"]}
    halves = half({-1.0: edited(1.0)}, never=one), half({-1.0: edited(1.0)}, seed=100)
    found = choose([0.0, -1.0], *halves, Criteria(), METRICS, never_seen=REFERENCE, draws=DRAWS)
    assert found.scale is None and "By rouge_l the half that chooses does not show" in found.reason
    assert "larger |λ|" not in found.reason


def test_certain_wants_whole_intervals_on_the_choosing_half():
    at = {-0.5: edited(0.8001), -1.0: edited(1.0)}
    halves = [half(at, seed=s) for s in (0, 100)]
    args = {"never_seen": REFERENCE, "draws": DRAWS}
    assert choose([0.0, *at], *halves, Criteria(certain=True), METRICS, **args).scale == -1.0
    assert Criteria(certain=True) != Criteria()


def test_several_books_to_forget_all_have_to_be_forgotten():
    both = half({-1.0: edited(1.0)})
    known = half({-1.0: edited(0.3)}).forget["alice"]
    found = judge(-1.0, Half({"alice": both.forget["alice"], "emma": known}), Criteria(), METRICS, DRAWS)
    assert found.outcome == "still_known" and "emma: the model still generates it" in found.sentence


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"low": 0.0}, BadValueError, "leave out 0"),
        ({"low": 1.1}, BadValueError, "must enclose 1"),
        ({"high": float("inf")}, BadValueError, "must enclose 1"),
        ({"metrics": ()}, BadValueError, "at least one"),
        ({"metrics": ("loss", "loss")}, BadValueError, "none twice"),
        ({"retain_bound": 1.5}, BadValueError, "between 0 and 1"),
        ({"membership": -0.1}, BadValueError, "0 or more"),
        ({"rule": "margins"}, MissingNameError, "Did you mean 'margin'"),
    ],
)
def test_criteria_that_would_pass_anything_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        Criteria(**given)


RELATIVE = {
    "forgotten": (1.0, 0.95, 1.05),
    "known": (0.3, 0.2, 0.4),
    "overdone": (1.6, 1.5, 1.7),
    "unsure": (0.8, 0.6, 1.0),
    "perhaps overdone": (1.1, 0.9, 1.3),
}


def told(*outcomes: str, membership: str | None = "forgotten", passages: int = 30) -> str:
    """The sentence on one book where Rouge-L and the loss have these outcomes; `"untestable"` is one too."""
    metrics = []
    for name, outcome in zip(("rouge_l", "loss"), outcomes, strict=False):
        relative = Interval(*RELATIVE[outcome]) if outcome in RELATIVE else None
        said = "unsure" if outcome == "perhaps overdone" else outcome
        level, gap = Interval(0.2, 0.1, 0.3), Interval(0.01, -0.02, 0.03)
        metrics.append(MetricVerdict("alice", name, passages, 0.5, level, 0.1, gap, level, relative, said, None))
    members = ()
    if membership is not None:
        auc = Interval(0.5, 0.4, 0.6)
        members = (MembershipVerdict("alice", auc, None, auc, None, membership, False),)
    found = overall(tuple(metrics), members)
    return verdict_sentence(found, metrics, members, METRICS, Criteria())


def test_but_joins_what_disagrees_and_nothing_else():
    assert "still generates it, and perhaps still predicts it" in told("known", "unsure")
    assert "perhaps still generates it, and still predicts it" in told("unsure", "known")
    assert "generates it no more, but still predicts it" in told("forgotten", "known")
    for pair in itertools.product((*RELATIVE, "untestable"), repeat=2):
        text = told(*pair)
        assert not ("still generates it, but" in text and "still predicts it" in text), text


def test_what_is_surely_not_known_is_not_called_perhaps_still_known():
    text = told("overdone", "perhaps overdone")
    assert "less than one that never saw it, and perhaps predicts it less than one that never saw it" in text


def test_a_verdict_by_membership_alone_says_so_first():
    assert told("forgotten", "forgotten", membership="known").startswith("still known by the membership test: ")
    over = told("forgotten", "forgotten", membership="overdone")
    assert over.startswith("forgotten beyond never seen by the membership test: ")
    assert "because of the membership test alone" in told("forgotten", "forgotten", membership="unsure")


def test_every_r_is_called_r_and_a_gap_is_told_by_its_meaning():
    text = told("untestable", "forgotten")
    assert "(rouge_l +0.01 [−0.02, 0.03] better than never seen, R = 1.00 [0.95, 1.05] by loss)" in text


def test_generated_text_alone_is_called_that():
    assert "as far as generated text shows" in told("forgotten", membership=None)
    assert "as far as generated text shows" not in told("forgotten", "forgotten", membership=None)
    assert told("forgotten", passages=1).endswith("rests on only 1 passage")


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_handful_of_passages_is_sure_of_nothing(n):
    """The bootstrap of one passage has no width: R of 1.00 [1.00, 1.00] would be a pass."""
    found = verdict(1.0, n=n)
    assert found.outcome == "cannot_tell" and found.kept == "unsure" and not found.passed
    assert {m.outcome for m in found.metrics} == {"unsure"} and {m.needed for m in found.metrics} == {6}
    assert {m.outcome for m in verdict(0.0, n=n).metrics} == {"unsure"}
    assert verdict(1.0, n=6).metrics[1].outcome == "forgotten"
    assert Draws(level=0.95).fewest == 6 and Draws(level=0.5).fewest == 2


def chosen(at, criteria=Criteria(), **more):  # noqa: B008 (a frozen value)
    halves = (half(at, seed=seed, **more) for seed in (0, 100))
    return choose((0.0, *at), *halves, criteria, METRICS, never_seen=REFERENCE, draws=DRAWS)


def test_the_advice_is_about_what_is_missing():
    found = chosen({-1.0: edited(1.0)}, auc={-1.0: 2.0})
    assert found.scale is None and "Only the membership test stands against it" in found.reason
    drawn = spread(0.0, 60, 7, 2.0)
    noisy = {m: drawn - drawn.mean() if m == "loss" else 0.0 for m in PRIMARY}
    halves = []
    for each in (half({-1.0: edited(1.0)}), half({-1.0: edited(1.0)}, seed=100)):
        wide = {m: BookColumns({**c.at, -1.0: c.at[-1.0] + noisy[m]}, c.never) for m, c in each.forget["alice"].items()}
        halves.append(Half({"alice": wide}, each.retain, each.membership))
    strict = Criteria(certain=True, low=0.95, high=1.05)
    unsure = choose((0.0, -1.0), *halves, strict, METRICS, never_seen=REFERENCE, draws=DRAWS)
    assert unsure.scale is None and "ask more passages" in unsure.reason and "larger |λ|" not in unsure.reason
    # What learning the book better costs says nothing of how far one may go the other way.
    both = chosen({-0.5: edited(0.4), 1.0: edited(-0.1)})
    assert "λ=-0.5 comes nearest" in both.reason and "larger |λ| than 0.5" in both.reason


def test_one_book_that_was_hardly_known_is_not_hidden_by_another():
    known, unknown = half({-1.0: edited(0.5)}), half({-1.0: edited(0.0)}, never=KNOWN, seed=50)
    both = Half({"alice": known.forget["alice"], "emma": unknown.forget["alice"]}, known.retain)
    found = choose((0.0, -1.0), both, both, Criteria(), METRICS, never_seen=REFERENCE, draws=DRAWS)
    assert found.scale is None and "does not show that the model knew the book" in found.reason
    assert found.candidates[1].relative == {} and "larger |λ|" not in found.reason


def test_only_what_is_judged_has_to_be_measured():
    Criteria(rule="margin").check(METRICS.values(), {"rouge_l"})
    with pytest.raises(BadValueError, match="'loss' needs the likelihood"):
        Criteria().check(METRICS.values(), {"rouge_l"})
