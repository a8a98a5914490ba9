"""Which λ: the gentlest one that forgets enough by every metric, not too much, and keeps the other books.

λ is chosen on one half of the passages and judged on the other, or the chosen score would flatter itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.drop_tests import LossTest
from hf_taskvec.evaluation.scoring.edit_names import EditNames
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.statistics import Array, Draws, mean_score
from hf_taskvec.evaluation.scoring.verdict import Half, Verdict, judge

LevelSource = Literal["reference", "unseen", "split", "assumed"]


@dataclass(frozen=True)
class NeverSeen:
    """Where the never-seen level comes from.

    Args:
        source (`"reference"`, `"unseen"`, `"split"` or `"assumed"`):
            A reference model; text that the caller says was never seen; the held-out part of the book, which the
            model's training record says was left out; or the same, of which nobody says so.
        name (`str`, *optional*):
            The name of the reference model.
        contradiction (`str`, *optional*):
            What speaks against it, if something does.
    """

    source: LevelSource
    name: str | None = None
    contradiction: str | None = None


@dataclass(frozen=True)
class Candidate:
    """One λ, on the half of the passages that chooses.

    Args:
        scale (`float`):
            λ.
        forget, target (`float`):
            The headline metric of the forget books' seen passages, and of a model that never saw them.
        relative (`dict[str, float]`):
            R by each metric, of the book where it is farthest from 1; metrics without a gap for a book are left out.
        retained (`dict[str, float]`):
            By each metric, the share that the retained book lost that lost most.
        membership (`float`, *optional*):
            How far the membership AUC is above the reference's, of the book where it is farthest.
        forgets (`bool`):
            Whether it forgets enough by every metric.
        worst_retain (`float`):
            The largest of `retained`.
        shortfall (`float`):
            By how much it misses the criterion that it misses most; 0 if it meets all.
        qualifies (`bool`):
            Whether it meets all.
    """

    scale: float
    forget: float
    target: float
    relative: dict[str, float]
    retained: dict[str, float]
    membership: float | None
    forgets: bool
    worst_retain: float
    shortfall: float
    qualifies: bool


@dataclass(frozen=True)
class Choice:
    """The chosen λ, or `None` and the reason; the verdict on it; and the Pareto front between forgetting and keeping.

    Args:
        scale (`float`, *optional*):
            The chosen λ.
        reason (`str`):
            Why this one, or why none, what the other half of the passages says of it, and what to try next.
        criteria (`Criteria`):
            What forgotten and kept were to mean.
        never_seen (`NeverSeen`):
            Where the never-seen level comes from.
        candidates (`tuple[Candidate]`):
            Every λ on the half that chooses.
        nearest (`float`, *optional*):
            If no λ was chosen, the one that came nearest to it.
        verdict (`Verdict`, *optional*):
            On the chosen λ, or else the nearest, from the half that did not choose it.
        tests (`tuple[LossTest]`):
            Which books lost more than which there.
        pareto (`tuple[float]`):
            The λ that no other beats both in forgetting and in keeping, by the headline metric.
    """

    scale: float | None
    reason: str
    criteria: Criteria
    never_seen: NeverSeen
    candidates: tuple[Candidate, ...]
    nearest: float | None
    verdict: Verdict | None
    tests: tuple[LossTest, ...]
    pareto: tuple[float, ...]

    @property
    def judged(self) -> float | None:
        """The λ that the verdict is on."""
        return self.nearest if self.scale is None else self.scale


def choose(
    scales: Sequence[float],
    choosing: Half,
    reporting: Half,
    criteria: Criteria,
    infos: Mapping[str, MetricInfo],
    *,
    never_seen: NeverSeen,
    draws: Draws,
    names: EditNames | None = None,
) -> Choice:
    """The smallest |λ| that meets the criteria on one half, judged on the other.

    Args:
        scales (`Sequence[float]`):
            The values of λ, 0 among them.
        choosing (`Half`):
            The half of the passages that chooses λ.
        reporting (`Half`):
            The half that judges it.
        criteria (`Criteria`):
            What forgotten and kept mean.
        infos (`Mapping[str, MetricInfo]`):
            The metrics by name.
        never_seen (`NeverSeen`):
            Where the halves' `never` values come from.
        draws (`Draws`):
            For the intervals.
        names (`EditNames`, *optional*):
            What the edits are called, if `scales` are their numbers from the gentlest on.
    """
    candidates = tuple(_candidate(scale, choosing, criteria, infos, draws) for scale in scales)
    fitting = sorted((c for c in candidates if c.qualifies), key=lambda c: (abs(c.scale), c.scale))
    chosen = fitting[0].scale if fitting else None
    edits = [c for c in candidates if c.scale != 0] or list(candidates)
    best = fitting[0] if fitting else min(edits, key=lambda c: (c.shortfall, abs(c.scale), c.scale))
    nearest = None if fitting else best
    judged = judge(best.scale, reporting, criteria, infos, draws)
    return Choice(
        scale=chosen,
        reason=_reason(chosen, nearest, judged, candidates, criteria, never_seen, names or EditNames()),
        criteria=criteria,
        never_seen=never_seen,
        candidates=candidates,
        nearest=None if nearest is None else nearest.scale,
        verdict=judged,
        tests=(),
        pareto=_pareto(scales, choosing, reporting, infos[criteria.headline]),
    )


def _candidate(
    scale: float, half: Half, criteria: Criteria, infos: Mapping[str, MetricInfo], draws: Draws
) -> Candidate:
    found = judge(scale, half, criteria, infos, draws)
    info = infos[criteria.headline]
    columns = [book[criteria.headline] for book in half.forget.values()]
    forget = mean_score(np.concatenate([c.at[scale] for c in columns]), info.geometric)
    target = mean_score(np.concatenate([_never(c.never) for c in columns]), info.geometric)
    relative: dict[str, float] = {}
    short, over = [], []
    for verdict in found.metrics:
        if criteria.rule == "margin":
            sign = 1.0 if infos[verdict.metric].higher else -1.0
            d = verdict.difference
            ends = (sign * d.low, sign * d.high) if criteria.certain else (sign * d.value,)
            short.append(max(ends))  # at the never-seen level or beyond is enough
        elif verdict.relative is None:
            short.append(criteria.low)  # as far away as the untouched model
        else:
            value = verdict.relative.value
            if abs(value - 1) >= abs(relative.get(verdict.metric, 1.0) - 1):
                relative[verdict.metric] = value
            low, high = (verdict.relative.low, verdict.relative.high) if criteria.certain else (value, value)
            short.append(criteria.low - low)
            over.append(high - criteria.high)
    for verdict in found.metrics:  # what other books say of it would hide that one book's cannot be told
        if verdict.relative is None:
            relative.pop(verdict.metric, None)
    distances = [m.difference for m in found.membership]
    over += [
        (max(abs(d.low), abs(d.high)) if criteria.certain else abs(d.value)) - criteria.membership for d in distances
    ]
    retained: dict[str, float] = {}
    for loss in found.retained:
        retained[loss.metric] = max(retained.get(loss.metric, -np.inf), loss.lost.value)
        over.append((loss.lost.high if criteria.certain else loss.lost.value) - criteria.retain_bound)
    shortfall = max(0.0, *short, *over, 0.0)
    return Candidate(
        scale=scale,
        forget=forget,
        target=target,
        relative=relative,
        retained=retained,
        membership=max((d.value for d in distances), key=abs, default=None),
        forgets=max(short) <= 0,
        worst_retain=max(retained.values(), default=0.0),
        shortfall=float(shortfall),
        qualifies=shortfall <= 0,
    )


def _never(values: Array | None) -> Array:
    assert values is not None
    return values


def _reason(
    chosen: float | None,
    nearest: Candidate | None,
    verdict: Verdict,
    candidates: Sequence[Candidate],
    criteria: Criteria,
    never_seen: NeverSeen,
    names: EditNames,
) -> str:
    told = f"on the half that did not choose it, {verdict.sentence}"
    if chosen is not None:
        text = f"{names.phrase(chosen)} is the {names.gentlest} that meets the criteria on the choosing half; {told}"
        text += _losses(verdict, criteria)
    elif verdict.outcome == "cannot_tell" and all(m.outcome == "untestable" for m in verdict.metrics):
        text = f"no {names.noun} can be chosen: {verdict.sentence}"
    else:
        assert nearest is not None
        text = f"no {names.noun} qualifies; {names.phrase(nearest.scale)} comes nearest: {told}"
        text += f"{_losses(verdict, criteria)}. {_advice(nearest, candidates, criteria, names)}"
    if never_seen.contradiction:
        text += f". {never_seen.contradiction}"
    return text


def _losses(verdict: Verdict, criteria: Criteria) -> str:
    """What the kept books lost, where it is not surely within the bound."""
    worst: dict[str, tuple[float, str, str]] = {}
    for loss in verdict.retained:
        if loss.outcome != "kept" and loss.lost.value > worst.get(loss.book, (-np.inf,))[0]:
            worst[loss.book] = (loss.lost.value, loss.metric, loss.outcome)
    if not worst:
        return "" if not verdict.retained else "; the books to keep are kept"
    told = [
        f"{book} lost {value:.0%} of its {metric}" + ("" if outcome == "lost" else " (perhaps within the bound)")
        for book, (value, metric, outcome) in worst.items()
    ]
    return f"; {', '.join(told)} (allowed: {criteria.retain_bound:.0%})"


def _advice(nearest: Candidate, candidates: Sequence[Candidate], criteria: Criteria, names: EditNames) -> str:
    """What to try next."""
    unknown = [name for name in criteria.judged if name not in nearest.relative]
    if criteria.rule == "relative" and unknown:
        return (
            f"By {', '.join(unknown)} the half that chooses does not show that the model knew the book: ask more "
            "passages, or judge by other metrics"
        )
    candidates = [c for c in candidates if c.scale * nearest.scale >= 0]  # the other direction is another edit
    cheap = [c for c in candidates if c.worst_retain <= criteria.retain_bound]
    last = max(candidates, key=lambda c: abs(c.scale))
    if criteria.rule == "relative" and nearest in cheap and _between(nearest, criteria):
        if nearest.membership is None or abs(nearest.membership) <= criteria.membership:
            return "Its means meet the criteria, but not its whole intervals: ask more passages"
        around = "edits like" if names.names else "λ around"
        return f"Only the membership test stands against it: try other {around} it, or another vector of the book"
    if not any(c.forgets for c in candidates) and last in cheap:
        return "Try a stronger edit" if names.names else f"Try a larger |λ| than {abs(last.scale):g}"
    if any(c.forgets for c in candidates) and not any(c.forgets for c in cheap):
        bound = min(c.worst_retain for c in candidates if c.forgets)
        return (
            f"Every {names.noun} that forgets enough costs a kept book more: add the kept books' vectors back, repair "
            f"the model by a short fine-tune on them, or accept a retain_bound of {np.ceil(100 * bound) / 100:.2f}"
        )
    if nearest.relative and max(nearest.relative.values()) > criteria.high > criteria.low > min(
        nearest.relative.values()
    ):
        apart = "" if names.names else ": one λ for the whole vector cannot bring them together"
        return f"The metrics part at every {names.noun}{apart}"
    if not any(c.forgets for c in candidates):
        return "Forgetting enough would cost the kept books too much: add their vectors back, or repair the model"
    between = "edits" if names.names else "λ"
    return f"Try {between} between those that forget too little and those that forget too much"


def _between(candidate: Candidate, criteria: Criteria) -> bool:
    return all(criteria.low <= value <= criteria.high for value in candidate.relative.values())


def _pareto(scales: Sequence[float], choosing: Half, reporting: Half, info: MetricInfo) -> tuple[float, ...]:
    """The λ that no other beats in forgetting or keeping without losing in the other, on all passages."""
    sign = 1.0 if info.higher else -1.0

    def score(part: Literal["forget", "retain"], book: str, scale: float) -> float:
        both = [getattr(half, part)[book][info.name].at[scale] for half in (choosing, reporting)]
        return sign * mean_score(np.concatenate(both), info.geometric)

    points = {}
    for scale in scales:
        forget = float(np.mean([score("forget", book, scale) for book in choosing.forget]))
        kept = [score("retain", book, scale) for book in choosing.retain]
        points[scale] = (forget, float(np.mean(kept)) if kept else 0.0)

    def beaten(scale: float) -> bool:
        forget, kept = points[scale]
        return any(f <= forget and k >= kept and (f, k) != (forget, kept) for f, k in points.values())

    return tuple(scale for scale in scales if not beaten(scale))
