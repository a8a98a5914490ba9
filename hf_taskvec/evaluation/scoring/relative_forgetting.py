"""How far a score has gone from known (0) to never seen (1): relative forgetting, with a paired interval."""

from dataclasses import dataclass, replace

import numpy as np

from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.statistics import Array, Bootstrap, Draws, Interval, mean_score


@dataclass(frozen=True)
class RelativeForgetting:
    """One metric of one book before an edit, after it, and of a model that never saw the book.

    Args:
        before, never (`float`):
            The mean score of the untouched model, and the never-seen level.
        after (`Interval`):
            The mean score of the edited model.
        gap (`Interval`):
            How much better the untouched model knows the book than one that never saw it: positive is better, whichever
            way the metric points.
        difference (`Interval`):
            The edited model's score minus the never-seen level.
        relative (`Interval`, *optional*):
            R = (before − after) / (before − never): 0 is untouched, 1 as if never seen, more is beyond that. `None`
            where the gap is not clearly above 0: there is nothing to forget, or too few passages to see it.
        paired (`bool`):
            Whether the never-seen level is of the same passages.
        passages (`int`):
            How many passages of the book it rests on.
    """

    before: float
    after: Interval
    never: float
    gap: Interval
    difference: Interval
    relative: Interval | None
    paired: bool
    passages: int


def relative_forgetting(
    before: Array, after: Array, never: Array, metric: MetricInfo, draws: Draws, *, paired: bool
) -> RelativeForgetting:
    """R of one metric, from the values of a book's passages.

    Args:
        before (`ndarray`):
            The untouched model's values.
        after (`ndarray`):
            The edited model's, of the same passages.
        never (`ndarray`):
            Those of a model that never saw the book; or the untouched model's, of text that it never saw.
        metric (`MetricInfo`):
            Its direction. A geometric one is compared in the logarithm.
        draws (`Draws`):
            For the intervals.
        paired (`bool`):
            Whether `never` is of the same passages in the same order: then all three are drawn together.

    Returns:
        `RelativeForgetting`: The levels, the gap, and R where there is a gap.

    Example:
        >>> from hf_taskvec.evaluation.scoring.metrics import METRICS
        >>> known, edited, never = np.array([0.9, 0.8]), np.array([0.3, 0.2]), np.array([0.1, 0.1])
        >>> found = relative_forgetting(known, edited, never, METRICS["rouge_l"], Draws(), paired=True)
        >>> round(found.relative.value, 3)
        0.8

    """
    sign = 1.0 if metric.higher else -1.0
    ours = draws.bootstrap(len(before))
    theirs = ours if paired else replace(draws, seed=draws.seed + 1).bootstrap(len(never))
    spread = [ours.means(_plain(values, metric)) for values in (before, after)]
    spread.append(theirs.means(_plain(never, metric)))
    s_0, s_edit, s_never = (float(_plain(values, metric).mean()) for values in (before, after, never))
    gap = ours.interval(sign * (s_0 - s_never), sign * (spread[0] - spread[2]))
    relative = None
    if gap.low > 0:
        usable = sign * (spread[0] - spread[2]) > 0  # nearly all of them, as the interval's low end is above 0
        ratios = ((spread[0] - spread[1])[usable]) / ((spread[0] - spread[2])[usable])
        relative = ours.interval((s_0 - s_edit) / (s_0 - s_never), ratios)
    shown = [np.exp(each) if metric.geometric else each for each in spread]
    levels = [mean_score(values, metric.geometric) for values in (before, after, never)]
    return RelativeForgetting(
        before=levels[0],
        after=ours.interval(levels[1], shown[1]),
        never=levels[2],
        gap=gap,
        difference=ours.interval(levels[1] - levels[2], shown[1] - shown[2]),
        relative=relative,
        paired=paired,
        passages=len(before),
    )


def share_lost(before: Array, after: Array, metric: MetricInfo, draws: Draws) -> Interval | None:
    """What a book lost of one metric, as a share of what the untouched model had; paired.

    Of a metric in nats it is the share of the probability of a true token: 1 − exp(−growth of the loss). `None` if the
    untouched model had nothing.
    """
    draw = draws.bootstrap(len(before))
    found = _lost_in_draws(before, after, metric, draw)
    return None if found is None else draw.interval(found[0], found[1][~np.isnan(found[1])])


def difference_of_losses(
    first: tuple[Array, Array], second: tuple[Array, Array], metric: MetricInfo, draws: Draws, *, paired: bool
) -> Interval | None:
    """How much more the first lost of one metric than the second, in shares as `share_lost` gives them.

    Args:
        first (`tuple` of two `ndarray`):
            The values before and after an edit.
        second (`tuple` of two `ndarray`):
            Those that are compared with.
        metric (`MetricInfo`):
            Its direction.
        draws (`Draws`):
            For the interval.
        paired (`bool`):
            Whether all values are of the same passages in the same order: then they are drawn together.

    Returns:
        `Interval`, *optional*: The difference, positive if the first lost more; `None` if there was nothing to lose.
    """
    ours = draws.bootstrap(len(first[0]))
    theirs = ours if paired else replace(draws, seed=draws.seed + 1).bootstrap(len(second[0]))
    one, two = _lost_in_draws(*first, metric, ours), _lost_in_draws(*second, metric, theirs)
    if one is None or two is None:
        return None
    spread = one[1] - two[1]
    usable = ~np.isnan(spread)
    return ours.interval(one[0] - two[0], spread[usable]) if usable.any() else None


def _lost_in_draws(before: Array, after: Array, metric: MetricInfo, draw: Bootstrap) -> tuple[float, Array] | None:
    """The share that was lost, and in each resampling: not a number where nothing was there to lose."""
    sign = 1.0 if metric.higher else -1.0
    old, new = (_plain(values, metric) for values in (before, after))
    (level, levels), (kept, all_kept) = ((each.mean(), draw.means(each)) for each in (old, new))
    if metric.nats or metric.geometric:
        return float(1 - np.exp(sign * (kept - level))) + 0.0, 1 - np.exp(sign * (all_kept - levels)) + 0.0
    usable = levels != 0  # all the passages with a score may be missing from a resampling
    if level == 0 or not usable.any():
        return None
    # A share of the size: of a score below 0, a smaller one is lost too.
    shares = sign * (levels - all_kept) / np.abs(np.where(usable, levels, np.nan))
    return float(sign * (level - kept) / abs(level)) + 0.0, shares + 0.0  # + 0.0: there is no −0


def _plain(values: Array, metric: MetricInfo) -> Array:
    return np.log(values) if metric.geometric else np.asarray(values, dtype=np.float64)
