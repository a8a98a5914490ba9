"""Whether a book is forgotten: what each metric says, and what they say together.

A verdict can fail. The untouched model has R = 0 in every metric, and where it hardly knew the book the answer is that
nobody can tell.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.relative_forgetting import RelativeForgetting, relative_forgetting, share_lost
from hf_taskvec.evaluation.scoring.statistics import (
    Array,
    Draws,
    Interval,
    auc_difference,
    auc_interval,
    priv_leak,
)

Outcome = Literal["forgotten", "known", "overdone", "unsure", "untestable"]
Kept = Literal["kept", "lost", "unsure"]
Overall = Literal["as_if_never_seen", "still_known", "over_forgotten", "cannot_tell"]


@dataclass(frozen=True)
class BookColumns:
    """One metric of one book's seen passages.

    Args:
        at (`Mapping[float, ndarray]`):
            The values at each λ, 0 among them.
        never (`ndarray`, *optional*):
            Those of a model that never saw the book, or of text that nobody saw; not for books to keep.
        paired (`bool`, *optional*, defaults to `True`):
            Whether `never` is of the same passages.
    """

    at: Mapping[float, Array]
    never: Array | None = None
    paired: bool = True


@dataclass(frozen=True)
class MembershipColumns:
    """Membership scores (Min-K %) of a book's seen passages and of unseen ones, at each λ and of a reference model."""

    seen: Mapping[float, Array]
    unseen: Mapping[float, Array]
    reference: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class Half:
    """What a verdict rests on, by book and metric: half of the passages in a sweep.

    Args:
        forget (`Mapping`):
            For each book to forget and each metric, its values.
        retain (`Mapping`, *optional*):
            The same for each book to keep.
        membership (`Mapping`, *optional*):
            For each book to forget with unseen text, its membership scores. `None`: this is not about membership.
    """

    forget: Mapping[str, Mapping[str, BookColumns]]
    retain: Mapping[str, Mapping[str, BookColumns]] = field(default_factory=dict)
    membership: Mapping[str, MembershipColumns] | None = field(default_factory=dict)


@dataclass(frozen=True)
class MetricVerdict:
    """What one metric says of one book.

    Args:
        book, metric (`str`):
            Of what.
        passages (`int`):
            How many it rests on.
        before, never (`float`):
            The untouched model's score, and the never-seen level.
        after (`Interval`):
            The edited model's score.
        gap (`Interval`, *optional*):
            How much better the untouched model knows the book than one that never saw it (in logarithms for
            perplexity); `None` in reports that did not store it.
        difference (`Interval`):
            `after` minus `never`.
        relative (`Interval`, *optional*):
            R; `None` where the gap is not clearly above 0.
        outcome (`str`):
            `"forgotten"`; `"known"` (still); `"overdone"` (beyond never seen); `"unsure"`: the interval reaches over a
            bound, or there are too few passages for one (`Draws.fewest`); `"untestable"`: the model hardly knew the
            book.
        needed (`int`, *optional*):
            About how many passages would settle it, where it is unsure or untestable and passages would help.
    """

    book: str
    metric: str
    passages: int
    before: float
    after: Interval
    never: float
    gap: Interval | None
    difference: Interval
    relative: Interval | None
    outcome: Outcome
    needed: int | None


@dataclass(frozen=True)
class MembershipVerdict:
    """Whether the passages of a book are told from unseen ones as a model that never saw them would.

    Args:
        book (`str`):
            Of which book.
        auc (`Interval`):
            Of Min-K %, seen against unseen passages, of the edited model.
        reference (`Interval`, *optional*):
            The same of the reference model; without one, 0.5 is compared with.
        difference (`Interval`):
            The first minus the second, paired.
        priv_leak (`float`, *optional*):
            PrivLeak, in percent: 0 is ideal, negative still known, positive conspicuously avoided.
        outcome (`str`):
            As of a metric.
        reference_knows (`bool`):
            Whether the reference itself tells the passages apart: then it has seen the book.
    """

    book: str
    auc: Interval
    reference: Interval | None
    difference: Interval
    priv_leak: float | None
    outcome: Outcome
    reference_knows: bool


@dataclass(frozen=True)
class RetainedLoss:
    """What a book to keep lost of one metric, as a share: `"kept"` is surely within the bound, `"lost"` surely not."""

    book: str
    metric: str
    lost: Interval
    outcome: Kept


@dataclass(frozen=True)
class Verdict:
    """What all metrics say together.

    Args:
        outcome (`str`):
            `"as_if_never_seen"`: every metric and the membership test say so. `"still_known"`: some metric surely says
            that it is. `"over_forgotten"`: some metric is surely beyond never seen, none below. `"cannot_tell"`.
        sentence (`str`):
            The same in words, with the numbers.
        metrics (`tuple` of `MetricVerdict`):
            For each forget book and metric.
        membership (`tuple` of `MembershipVerdict`):
            For each forget book with unseen text; empty if there is none.
        retained (`tuple` of `RetainedLoss`):
            For each book to keep and metric.
        kept (`str`):
            `"kept"` if every one of them is, `"lost"` if one is surely not, `"unsure"` else.
    """

    outcome: Overall
    sentence: str
    metrics: tuple[MetricVerdict, ...]
    membership: tuple[MembershipVerdict, ...]
    retained: tuple[RetainedLoss, ...]
    kept: Kept

    @property
    def passed(self) -> bool:
        """Whether the book is as if never seen and the others are kept."""
        return self.outcome == "as_if_never_seen" and self.kept == "kept"


def judge(scale: float, half: Half, criteria: Criteria, infos: Mapping[str, MetricInfo], draws: Draws) -> Verdict:
    """The verdict on one λ.

    Args:
        scale (`float`):
            λ.
        half (`Half`):
            The passages that judge.
        criteria (`Criteria`):
            What forgotten and kept mean.
        infos (`Mapping[str, MetricInfo]`):
            The metrics by name.
        draws (`Draws`):
            For the intervals.

    Returns:
        `Verdict`: Each metric's outcome, and the overall one.
    """
    from hf_taskvec.evaluation.scoring.verdict_words import verdict_sentence

    metrics = tuple(_metrics(scale, half, criteria, infos, draws))
    membership = tuple(_memberships(scale, half, criteria, draws)) if criteria.rule == "relative" else ()
    retained = tuple(_retained(scale, half, criteria, infos, draws))
    outcome = overall(metrics, membership)
    sentence = verdict_sentence(outcome, metrics, None if half.membership is None else membership, infos, criteria)
    outcomes = {loss.outcome for loss in retained}
    kept: Kept = "lost" if "lost" in outcomes else "unsure" if "unsure" in outcomes else "kept"
    return Verdict(outcome, sentence, metrics, membership, retained, kept)


def overall(metrics: tuple[MetricVerdict, ...], membership: tuple[MembershipVerdict, ...]) -> Overall:
    """What the outcomes of all metrics and of the membership tests come to."""
    outcomes: set[Outcome] = {metric.outcome for metric in metrics} | {member.outcome for member in membership}
    if any(found.reference_knows for found in membership):
        return "cannot_tell"
    if "known" in outcomes:
        return "still_known"
    if "overdone" in outcomes:
        return "over_forgotten"
    return "as_if_never_seen" if outcomes == {"forgotten"} else "cannot_tell"


def _metrics(
    scale: float, half: Half, criteria: Criteria, infos: Mapping[str, MetricInfo], draws: Draws
) -> Iterator[MetricVerdict]:
    for book, columns in half.forget.items():
        for name in criteria.judged:
            found = columns[name]
            assert found.never is not None
            args = (found.never, infos[name], draws)
            measured = relative_forgetting(found.at[0.0], found.at[scale], *args, paired=found.paired)
            if criteria.rule == "margin":
                untouched = relative_forgetting(found.at[0.0], found.at[0.0], *args, paired=found.paired)
                outcome = _by_margin(measured, untouched, criteria.margin, infos[name].higher)
            else:
                outcome = _by_share(measured.relative, criteria)
            count = min(len(found.at[scale]), len(found.never))
            if outcome != "untestable" and count < draws.fewest:
                outcome = "unsure"
            yield MetricVerdict(
                book=book,
                metric=name,
                passages=measured.passages,
                before=measured.before,
                after=measured.after,
                never=measured.never,
                gap=measured.gap,
                difference=measured.difference,
                relative=measured.relative,
                outcome=outcome,
                needed=_needed(measured, outcome, criteria, draws.fewest),
            )


def _by_share(relative: Interval | None, criteria: Criteria) -> Outcome:
    if relative is None:
        return "untestable"
    return placed(relative, criteria.low, criteria.high)


def _by_margin(found: RelativeForgetting, untouched: RelativeForgetting, margin: float, higher: bool) -> Outcome:
    if untouched.difference.within(margin):
        return "untestable"  # the untouched model would pass
    d = found.difference
    # Below the bounds is still known, as for R.
    return placed(Interval(-d.value, -d.high, -d.low) if higher else d, -margin, margin)


def placed(found: Interval, low: float, high: float) -> Outcome:
    """Where an interval lies: below the bounds is still known, above them overdone."""
    if low <= found.low and found.high <= high:
        return "forgotten"
    return "known" if found.high < low else "overdone" if found.low > high else "unsure"


def _needed(found: RelativeForgetting, outcome: Outcome, criteria: Criteria, fewest: int) -> int | None:
    """How many passages would settle it: an interval's width falls with the root of their number."""
    if criteria.rule != "relative" or outcome not in ("unsure", "untestable"):
        return None
    if found.relative is None:
        half_width, room = found.gap.value - found.gap.low, found.gap.value
    else:
        value = found.relative.value
        half_width = max(value - found.relative.low, found.relative.high - value)
        room = min(abs(value - criteria.low), abs(value - criteria.high))
    if room <= 0 or half_width / room > 30:  # a thousand times as many would be no advice
        return None
    return max(fewest, found.passages + 1, math.ceil(found.passages * (half_width / room) ** 2))


def _memberships(scale: float, half: Half, criteria: Criteria, draws: Draws) -> Iterator[MembershipVerdict]:
    for book, columns in (half.membership or {}).items():
        seen, unseen = columns.seen[scale], columns.unseen[scale]
        auc = auc_interval(seen, unseen, draws.resamples, draws.level, draws.seed)
        reference, knows, level = None, False, 0.5
        difference = Interval(auc.value - 0.5, auc.low - 0.5, auc.high - 0.5)
        if columns.reference is not None:
            reference = auc_interval(*columns.reference, draws.resamples, draws.level, draws.seed)
            difference = auc_difference(seen, unseen, *columns.reference, draws)
            level, knows = reference.value, reference.low > 0.5 + criteria.membership
        # A high AUC is still known: below the bounds, as for R.
        turned = Interval(-difference.value, -difference.high, -difference.low)
        outcome = placed(turned, -criteria.membership, criteria.membership)
        if min(len(seen), len(unseen)) < draws.fewest:
            outcome, knows = "unsure", False
        yield MembershipVerdict(book, auc, reference, difference, priv_leak(auc.value, level), outcome, knows)


def _retained(
    scale: float, half: Half, criteria: Criteria, infos: Mapping[str, MetricInfo], draws: Draws
) -> Iterator[RetainedLoss]:
    for book, columns in half.retain.items():
        for name in criteria.judged:
            lost = share_lost(columns[name].at[0.0], columns[name].at[scale], infos[name], draws)
            if lost is not None:
                bound = criteria.retain_bound
                outcome: Kept = "kept" if lost.high <= bound else "lost" if lost.low > bound else "unsure"
                if len(columns[name].at[scale]) < draws.fewest:
                    outcome = "unsure"
                yield RetainedLoss(book, name, lost, outcome)
