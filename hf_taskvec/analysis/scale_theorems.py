"""Theorems 1 to 3 of Li et al. (2025), *When is task vector provably effective?*: which λ they promise success for.

The theorems hide constants. `-Θ(α⁻²)` is read as `-α⁻²`, `poly(ηδ*)` as β, and c of case (C) as the largest number
below 1 − α; β and c of Theorem 3 are the paper's (0.01 and 0.02). The error of the kept task grows as |λ|β, so no
region reaches beyond |λ| = c/β, unless it begins there. The regions say where to look, not what will happen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_taskvec.errors import BadValueError
from hf_taskvec.figures import Plottable, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Whether a theorem promises success: easily, with care, or not at all.
TheoremVerdict = Literal["works", "hard", "impossible"]
# Correlations closer than this are one and the same: nobody measures them so well, and the sums would overflow.
_NOTHING = 1e-6


@dataclass(frozen=True)
class ScaleRegion:
    """The λ of `θ_0 + τ_1 + λ τ_2` for which a theorem promises success, and the one to try first.

    `scale in region` tells whether λ is one of them. `in_sweep` gives the same region for `θ_0' + λ τ_2`, where `θ_0'`
    already holds one τ_2.

    Args:
        goal (`str`):
            `"add"` (Theorem 1) or `"forget"` (Theorem 2).
        verdict (`str`):
            `"works"`, `"hard"` or `"impossible"`.
        why (`str`):
            The reason, in a sentence.
        low (`float`, *optional*):
            The lower end of the region; None where no λ works.
        high (`float`, *optional*):
            The upper end of the region; None where no λ works.
        scale (`float`, *optional*):
            The λ to try first; None where no λ works.
        origin (`str`, *optional*, defaults to `"theorem"`):
            What λ is counted from: `"theorem"` (`θ_0 + τ_1`) or `"sweep"` (`θ_0'`).

    """

    goal: Literal["add", "forget"]
    verdict: TheoremVerdict
    why: str
    low: float | None = None
    high: float | None = None
    scale: float | None = None
    origin: Literal["theorem", "sweep"] = "theorem"

    @property
    def in_sweep(self) -> "ScaleRegion":
        """The region as seen from a model that already holds one of the vector."""
        if self.origin == "sweep" or self.low is None or self.high is None or self.scale is None:
            return self if self.origin == "sweep" else ScaleRegion(self.goal, self.verdict, self.why, origin="sweep")
        return ScaleRegion(
            self.goal, self.verdict, self.why, self.low - 1.0, self.high - 1.0, self.scale - 1.0, origin="sweep"
        )

    def __contains__(self, scale: float) -> bool:
        """Whether λ is in the region, but for rounding."""
        return self.low is not None and self.high is not None and self.low - 1e-9 <= scale <= self.high + 1e-9

    def __str__(self) -> str:
        model = "θ_0' + λτ" if self.origin == "sweep" else "θ_0 + τ_1 + λτ_2"
        if self.low is None or self.high is None or self.scale is None:
            return f"{self.goal}: {self.verdict}. {self.why}"
        return (
            f"{self.goal}: {self.verdict} for {self.low:.4g} ≤ λ ≤ {self.high:.4g} of {model}, first λ = "
            f"{self.scale:.4g}. {self.why}"
        )


@dataclass(frozen=True)
class TransferScales(Plottable):
    """Theorem 3: λ_i of `θ_0 + Σ λ_i τ_i` for a new task with correlations γ_i to the (orthogonal) tasks.

    It works where `Σ λ_i γ_i ≥ margin + c`, `Σ λ_i γ_i² ≥ margin + c` and `|λ_i| β ≤ c`. `scales` meet all three: they
    are the closed form where that does ("works"), else the λ whose largest |λ_i| is least ("hard"), or none
    ("impossible"). Where the tasks are known to be correlated with each other, the theorem promises nothing, and what
    would work is "hard".

    Args:
        gammas (`tuple[float, ...]`):
            The correlations γ_i.
        scales (`tuple[float, ...]`):
            The λ_i; empty where none work.
        verdict (`str`):
            `"works"`, `"hard"` or `"impossible"`.
        why (`str`):
            The reason, in a sentence.
        margin (`float`):
            What both sums must reach, but for `c`.
        c (`float`):
            Slack: what the sums must reach beyond `margin`, and what `|λ_i| β` may reach.
        beta (`float`):
            By how much the error grows with |λ_i|.
        closed_form (`bool`, *optional*, defaults to `True`):
            Whether `scales` are the closed form.

    """

    gammas: tuple[float, ...]
    scales: tuple[float, ...]
    verdict: TheoremVerdict
    why: str
    margin: float
    c: float
    beta: float
    closed_form: bool = True

    def holds(self, scales: Sequence[float]) -> bool:
        """Whether the theorem promises success for these λ_i.

        Args:
            scales (`Sequence[float]`):
                One λ for each task.

        Returns:
            `bool`: Whether all three conditions are met, but for rounding.

        Raises:
            `BadValueError`: If there are not as many scales as tasks.

        """
        if len(scales) != len(self.gammas):
            raise BadValueError(f"{len(scales)} scales were given for {len(self.gammas)} tasks.")
        first = math.fsum(s * g for s, g in zip(scales, self.gammas, strict=True))
        second = math.fsum(s * g * g for s, g in zip(scales, self.gammas, strict=True))
        # The scales meet one sum, or the bound, with equality, but for rounding.
        needed, most = (self.margin + self.c) * (1 - 1e-12), self.c * (1 + 1e-12)
        return min(first, second) >= needed and all(abs(s) * self.beta <= most for s in scales)

    def figure(self, low: float = -2.0, high: float = 3.0, names: Sequence[str] = ("task 1", "task 2")) -> "Figure":
        """Draw the region for two tasks, as figure 2 (B) of the paper.

        Args:
            low (`float`, *optional*, defaults to -2.0):
                The lower end of both axes, or less if `scales` need it.
            high (`float`, *optional*, defaults to 3.0):
                The upper end of both axes, or more if `scales` need it.
            names (`Sequence[str]`, *optional*, defaults to `("task 1", "task 2")`):
                The tasks' names.

        Returns:
            `matplotlib.figure.Figure`: The figure.

        Raises:
            `BadValueError`: If there are not two tasks, or not two names.

        """
        from hf_taskvec.analysis.result_figures import transfer_figure

        return transfer_figure(self, low, high, names)

    def plot(
        self,
        output: str | Path,
        low: float = -2.0,
        high: float = 3.0,
        names: Sequence[str] = ("task 1", "task 2"),
    ) -> Path:
        """Draw the region for two tasks into a file.

        Args:
            output (`str` or `Path`):
                The file to write; its name ends in `.png` or `.svg`.
            low (`float`, *optional*, defaults to -2.0):
                As for `figure`.
            high (`float`, *optional*, defaults to 3.0):
                As for `figure`.
            names (`Sequence[str]`, *optional*, defaults to `("task 1", "task 2")`):
                As for `figure`.

        Returns:
            `Path`: The file that was written.

        """
        return save_figure(partial(self.figure, low, high, names), output)


def region_to_add(alpha: float, beta: float, c: float, irrelevant: float) -> ScaleRegion:
    """Theorem 1: both tasks work if α ≥ 0 and λ ≥ 1 − α + β; the error of task 1 grows as |λ|β."""
    if alpha < -irrelevant:
        why = (
            f"The tasks contradict each other (α = {alpha:.3g}): what one needs harms the other, and no λ serves both."
        )
        return ScaleRegion("add", "impossible", why)
    seen = max(alpha, 0.0)
    low = 1.0 - seen + beta
    if alpha > irrelevant:
        why = (
            f"The tasks are aligned (α = {alpha:.3g}): the vector of the one brings part of the "
            "other, so less of it is enough."
        )
    else:
        why = f"The tasks are about irrelevant to each other (α = {alpha:.3g}): each vector acts on its own task alone."
    scale = -_rounded_down(-low)
    return ScaleRegion("add", "works", why, low, max(c / beta, scale), scale)


def _rounded_down(scale: float) -> float:
    """The next lower number with three decimals: what is printed is then what is recommended."""
    return math.floor(scale * 1000 + 1e-9) / 1000


def region_to_forget(alpha: float, beta: float, c: float, irrelevant: float, gap: float) -> ScaleRegion:
    """Theorem 2: task 2 fails and task 1 works, in cases (A) α = 0, (B) α < 0, (C) 0 < α < 1 − c."""
    if abs(alpha) <= irrelevant:  # (A)
        why = (
            f"The tasks are about irrelevant to each other (α = {alpha:.3g}): taking the vector away, once or more, "
            "leaves the other task alone."
        )
        return ScaleRegion("forget", "works", why, -c / beta, 0.0, 0.0)
    if alpha < 0:  # (B)
        why = (
            f"The tasks contradict each other (α = {alpha:.3g}): taking away more than the task "
            "itself even helps the other one."
        )
        high = beta * alpha
        low = -1 / max(alpha**2, beta / c)  # −α⁻², or −c/β where that is nearer: then (B) goes on where (A) ends
        return ScaleRegion("forget", "works", why, min(low, high), high, max(min(low, high), _rounded_down(high)))
    if alpha > 1.0 - gap:
        why = f"The tasks are nearly the same (α = {alpha:.3g}): whatever forgets the one forgets the other."
        return ScaleRegion("forget", "impossible", why)
    why = (
        f"The tasks are aligned (α = {alpha:.3g}): the vector of the one holds much of the other, so λ must stay "
        "within (1 − α)/2 of removing the task once."
    )
    return ScaleRegion("forget", "hard", why, 0.0, (1.0 - alpha) / 2, 0.0)  # (C), with c < 1 − α


def without_promise(transfer: TransferScales, related: float) -> TransferScales:
    """The same scales where the tasks are correlated with each other, of which Theorem 3 says nothing."""
    why = (
        f"{transfer.why} But two of the tasks are correlated (|α| = {related:.3g}), and Theorem 3 is about tasks that "
        "are irrelevant to each other: it promises nothing here, and its λ are a place to start."
    )
    return replace(transfer, verdict="hard" if transfer.verdict == "works" else transfer.verdict, why=why)


def scales_to_transfer(gammas: tuple[float, ...], beta: float, c: float, margin: float) -> TransferScales:
    """Theorem 3, with the closed form of eqs. (75) and (76).

    Erratum: eq. (76) prints √Σγ⁴ in the numerator of C, with which only the first sum reaches margin + c (for γ =
    (0.792, −0.637) the second is 0.75 instead of 1.02). With √Σγ² the second meets it with equality and the first is
    larger, because Σγ⁴ ≤ Σγ² for |γ| ≤ 1. So that is used here.
    """
    gammas = tuple(g if abs(g) > _NOTHING else 0.0 for g in gammas)
    others = [g for g in gammas if g]
    if not others:
        raise BadValueError(
            "no γ is different from 0: the new task has nothing in common with any of the tasks, so no combination "
            "of their vectors reaches it (Theorem 3, condition A)."
        )
    if max(others) < 0 and max(others) - min(others) <= _NOTHING:
        raise BadValueError(
            f"every γ that is not 0 equals {others[0]:g}: the new task contradicts all tasks "
            "alike, and no λ meets both sums of Theorem 3 (one asks for negative λ, the other "
            "for positive). Add a task that is aligned with the new one."
        )
    second = math.sqrt(math.fsum(g**2 for g in gammas))
    fourth = math.sqrt(math.fsum(g**4 for g in gammas))
    third = math.fsum(g**3 for g in gammas)
    factor = (margin + c) * second / (second * fourth + third)
    scales = tuple(factor * (g / second + g * g / fourth) for g in gammas)
    most = c / beta
    largest = max(map(abs, scales))
    within = f"|λ| ≤ c/β = {most:.3g}"
    if largest <= most * (1 + 1e-12):
        return TransferScales(
            gammas, scales, "works", f"The closed form meets both sums within {within}.", margin, c, beta
        )
    least = _least_scales(gammas, margin + c)
    if max(map(abs, least)) <= most * (1 + 1e-12):
        why = f"The closed form needs |λ| = {largest:.3g}, but other λ within {within} meet both sums."
        return TransferScales(gammas, least, "hard", why, margin, c, beta, closed_form=False)
    why = f"The closed form needs |λ| = {largest:.3g}, and no λ within {within} meets both sums."
    return TransferScales(gammas, (), "impossible", why, margin, c, beta)


def _least_scales(gammas: Sequence[float], needed: float) -> tuple[float, ...]:
    """The λ_i with the least largest |λ_i| for which both sums of Theorem 3 reach what is needed.

    They are those with |λ_i| ≤ 1 whose smaller sum is largest, stretched. By linear duality that sum is the least, over
    weights w in [0, 1], of `Σ |w γ_i + (1 − w) γ_i²|`: convex and piecewise linear in w, so it is least at an end or
    where a summand is 0. There λ_i is the sign of its summand, and what has none makes the two sums equal.
    """
    corners = [(0.0, None), (1.0, None), *((g / (g - 1.0), g) for g in gammas if g < 0)]

    def reach(weight: float) -> float:
        return math.fsum(abs(weight * g + (1 - weight) * g * g) for g in gammas)

    weight, free = min(corners, key=lambda corner: reach(corner[0]))
    scales = [0.0 if g in (0.0, free) else math.copysign(1.0, weight * g + (1 - weight) * g * g) for g in gammas]
    if free is not None:
        apart = math.fsum(s * (g - g * g) for s, g in zip(scales, gammas, strict=True))
        level = apart / (gammas.count(free) * (free * free - free))
        scales = [max(-1.0, min(1.0, level)) if g == free else s for s, g in zip(scales, gammas, strict=True)]
    least = min(math.fsum(s * g**power for s, g in zip(scales, gammas, strict=True)) for power in (1, 2))
    return tuple(s * needed / least for s in scales)
