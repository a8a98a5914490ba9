"""Which λ: the gentlest one after which the book is no better known than to a model that never saw it.

λ is chosen on one half of the passages and confirmed on the other, or the chosen score would flatter itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hf_taskvec.evaluation.scoring.drop_tests import LossTest
from hf_taskvec.evaluation.scoring.metrics import Metric
from hf_taskvec.evaluation.scoring.statistics import Array, Draws, Interval, difference_apart, mean_score


@dataclass(frozen=True)
class Candidate:
    """One λ, on the half of the passages that chooses.

    `forget` is the score of the forget books' seen passages and `target` that of a model that never saw them;
    `forgets` is whether that is enough, `worst_retain` the largest relative loss of a retained book.
    """

    scale: float
    forget: float
    target: float
    forgets: bool
    worst_retain: float
    qualifies: bool


@dataclass(frozen=True)
class Confirmation:
    """The chosen λ on the half of the passages that did not choose it.

    Args:
        scale (`float`):
            The chosen λ.
        forget (`Interval`):
            The score of the forget books.
        target (`float`):
            The score of a model that never saw them.
        difference (`Interval`):
            The first minus the second.
        paired (`bool`):
            Whether both scores are of the same passages: with a reference model they are.
        as_if_never_seen (`bool`):
            Whether all of `difference` lies within ± the margin.
        retain_losses (`dict[str, Interval]`):
            The share of its score at λ=0 that each retained book lost.
        tests (`tuple[LossTest]`):
            Which books lost more than which.
    """

    scale: float
    forget: Interval
    target: float
    difference: Interval
    paired: bool
    as_if_never_seen: bool
    retain_losses: dict[str, Interval]
    tests: tuple[LossTest, ...] = ()


@dataclass(frozen=True)
class Choice:
    """The chosen λ, or `None` and the reason; and the Pareto front between forgetting and keeping.

    Args:
        scale (`float`, *optional*):
            The chosen λ.
        reason (`str`):
            Why this one, or why none, in a sentence.
        metric (`str`):
            The memory metric that decided.
        target_from (`"reference"` or `"held_out"`):
            Where the never-seen level comes from.
        reference (`str`, *optional*):
            The name of the reference model.
        margin (`float`):
            "as if never seen" means within ± this of the never-seen level.
        retain_bound (`float`):
            The share of its score that a retained book may lose.
        certain (`bool`):
            Whether all of the interval had to be at the never-seen level or beyond, not only the mean.
        candidates (`tuple[Candidate]`):
            Every λ on the half that chooses.
        confirmation (`Confirmation`, *optional*):
            The chosen λ on the other half.
        pareto (`tuple[float]`):
            The λ that no other beats both in forgetting and in keeping.
    """

    scale: float | None
    reason: str
    metric: str
    target_from: Literal["reference", "held_out"]
    reference: str | None
    margin: float
    retain_bound: float
    certain: bool
    candidates: tuple[Candidate, ...]
    confirmation: Confirmation | None
    pareto: tuple[float, ...]


@dataclass(frozen=True)
class Half:
    """The metric on one half of the passages.

    `forget` and `retain` hold the seen passages of the books, for each λ; the never-seen level is that of a
    `reference` model on the same passages or, without one, of `held_out` text at λ=0.
    """

    forget: Mapping[float, Array]
    retain: Mapping[str, Mapping[float, Array]]
    held_out: Array
    reference: Array | None


def choose(
    scales: Sequence[float],
    choosing: Half,
    reporting: Half,
    metric: Metric,
    *,
    margin: float,
    retain_bound: float,
    draws: Draws,
    certain: bool = False,
    reference: str | None = None,
) -> Choice:
    """The smallest |λ| that forgets enough and keeps enough, confirmed on the other half.

    Args:
        scales (`Sequence[float]`):
            The values of λ, 0 among them.
        choosing (`Half`):
            The half of the passages that chooses λ.
        reporting (`Half`):
            The half that confirms it.
        metric (`Metric`):
            A memory metric; `higher` says which way forgetting goes.
        margin (`float`):
            "as if never seen" means that the interval of the difference lies within ± this.
        retain_bound (`float`):
            The share of its score at λ=0 that a retained book may lose.
        draws (`Draws`):
            For the intervals.
        certain (`bool`):
            Take a λ only if all of the difference's interval is at the never-seen level or beyond. By the
            mean alone, which is the default, a λ that does not quite forget is taken about every other time.
        reference (`str`, *optional*):
            The name of the model that gave the halves' `reference` values.
    """
    sign = 1.0 if metric.higher else -1.0
    candidates = []
    for scale in scales:
        forget = mean_score(choosing.forget[scale], metric.geometric)
        target = mean_score(_target(choosing), metric.geometric)
        worst = max((sign * _loss(values, scale, metric) for values in choosing.retain.values()), default=0.0)
        forgets = sign * forget <= sign * target
        if certain and forgets:
            found = _difference(scale, choosing, metric, draws)
            forgets = max(sign * found.low, sign * found.high) <= 0
        candidates.append(Candidate(scale, forget, target, forgets, worst, forgets and worst <= retain_bound))
    fitting = sorted((c for c in candidates if c.qualifies), key=lambda c: (abs(c.scale), c.scale))
    confirmation = None
    if fitting:
        chosen = fitting[0].scale
        confirmation = _confirm(chosen, reporting, metric, sign, margin, draws)
        verdict = "is" if confirmation.as_if_never_seen else "is not shown to be"
        cause = "is the smallest |λ| that qualifies on the choosing half"
        if chosen == 0:
            cause = "qualifies: the book is no better known than to a model that never saw it, nothing to forget"
        reason = (
            f"λ={chosen:g} {cause}; on the other half the book {verdict} as if never seen "
            f"(difference within ±{margin:g})"
        )
    else:
        chosen = None
        surely = "surely " if certain else ""
        cause = (
            f"every λ that {surely}forgets enough costs a retained book more than {retain_bound:.0%}"
            if any(c.forgets for c in candidates)
            else f"none {surely}brings the forget score to the never-seen level of {candidates[0].target:.4g}"
        )
        reason = f"no λ qualifies: {cause}"
    return Choice(
        scale=chosen,
        reason=reason,
        metric=metric.name,
        target_from="held_out" if choosing.reference is None else "reference",
        reference=reference,
        margin=margin,
        retain_bound=retain_bound,
        certain=certain,
        candidates=tuple(candidates),
        confirmation=confirmation,
        pareto=_pareto(scales, choosing, reporting, metric, sign),
    )


def _target(half: Half) -> Array:
    return half.held_out if half.reference is None else half.reference


def _difference(scale: float, half: Half, metric: Metric, draws: Draws) -> Interval:
    """The forget books' score minus the never-seen level."""
    values, geometric = half.forget[scale], metric.geometric
    if half.reference is not None:
        return draws.bootstrap(len(values)).difference(values, half.reference, geometric)
    # Other passages than the forgotten ones: nothing to pair, each group is drawn on its own.
    return difference_apart(values, half.held_out, draws, geometric)


def _loss(values: Mapping[float, Array], scale: float, metric: Metric) -> float:
    before = mean_score(values[0.0], metric.geometric)
    return 0.0 if before == 0 else 1 - mean_score(values[scale], metric.geometric) / before


def _confirm(scale: float, half: Half, metric: Metric, sign: float, margin: float, draws: Draws) -> Confirmation:
    values, geometric = half.forget[scale], metric.geometric
    difference = _difference(scale, half, metric, draws)
    losses = {}
    for name, kept in half.retain.items():
        change = draws.bootstrap(len(kept[scale])).relative(kept[scale], kept[0.0], geometric)
        if change is not None:
            low, high = sorted((-sign * change.low, -sign * change.high))
            losses[name] = Interval(-sign * change.value + 0.0, low + 0.0, high + 0.0)  # + 0.0: there is no −0
    return Confirmation(
        scale=scale,
        forget=draws.bootstrap(len(values)).mean(values, geometric),
        target=mean_score(_target(half), geometric),
        difference=difference,
        paired=half.reference is not None,
        as_if_never_seen=difference.within(margin),
        retain_losses=losses,
    )


def _pareto(scales: Sequence[float], choosing: Half, reporting: Half, metric: Metric, sign: float) -> tuple[float, ...]:
    """The λ that no other beats in forgetting or keeping without losing in the other, on all passages."""
    points = {}
    for scale in scales:
        forget = sign * mean_score(np.concatenate([h.forget[scale] for h in (choosing, reporting)]), metric.geometric)
        kept = [
            sign * mean_score(np.concatenate([h.retain[name][scale] for h in (choosing, reporting)]), metric.geometric)
            for name in choosing.retain
        ]
        points[scale] = (forget, float(np.mean(kept)) if kept else 0.0)

    def beaten(scale: float) -> bool:
        forget, kept = points[scale]
        return any(f <= forget and k >= kept and (f, k) != (forget, kept) for f, k in points.values())

    return tuple(scale for scale in scales if not beaten(scale))
