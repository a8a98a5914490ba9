"""Which λ the theory recommends: Theorems 1 to 3 of Li et al. (2025), *When is task vector provably effective?*

Theorems 1 and 2 speak of `θ_0 + τ_1 + λ τ_2`: a model that knows task 1 and nothing of task 2. A sweep that forgets
speaks of `θ_0' + λ τ` where `θ_0'` was trained on both, and so holds about one τ already: λ_sweep ≈ λ_theorem − 1.
`Region` is in the theorems' terms and `in_sweep` translates it. Untranslated, case (C) of Theorem 2 would have us *add*
the task that is to be forgotten.

The theorems hide constants. `-Θ(α⁻²)` is read as `-α⁻²`, `poly(ηδ*)` as β, and c of case (C) as the largest number
below 1 − α; β and c of Theorem 3 are the paper's (0.01 and 0.02). The error of the kept task grows as |λ|β, so no
region reaches beyond |λ| = c/β, unless it begins there. The regions say where to look, not what will happen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_taskvec.analysis.correlations import Correlation

Verdict = Literal["works", "hard", "impossible"]
#: What the paper writes instead of the hinge loss's margin of 1 in practice (its footnote 3).
PRACTICAL_MARGIN = 0.2
# Correlations closer than this are one and the same: nobody measures them so well, and the sums would overflow.
_NOTHING = 1e-6


@dataclass(frozen=True)
class Region:
    """The λ of `θ_0 + τ_1 + λ τ_2` for which a theorem promises success, and the one to try first.

    `low`, `high` and `scale` are None where no λ works. `in_sweep` gives the same region for `θ_0' + λ τ_2`, where
    `θ_0'` already holds one τ_2.
    """

    goal: Literal["add", "forget"]
    verdict: Verdict
    why: str
    low: float | None = None
    high: float | None = None
    scale: float | None = None
    origin: Literal["theorem", "sweep"] = "theorem"

    @property
    def in_sweep(self) -> "Region":
        """The region as seen from a model that already holds one of the vector."""
        if self.origin == "sweep" or self.low is None or self.high is None or self.scale is None:
            return self if self.origin == "sweep" else Region(self.goal, self.verdict, self.why, origin="sweep")
        return Region(
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
            f"{self.goal}: {self.verdict} for {self.low:.4g} ≤ λ ≤ {self.high:.4g} of {model}, first λ = {self.scale:.4g}. "
            f"{self.why}"
        )


@dataclass(frozen=True)
class Transfer:
    """Theorem 3: λ_i of `θ_0 + Σ λ_i τ_i` for a new task with correlations γ_i to the (orthogonal) tasks.

    It works where `Σ λ_i γ_i ≥ margin + c`, `Σ λ_i γ_i² ≥ margin + c` and `|λ_i| β ≤ c`. `scales` meet all three: they
    are the closed form where that does ("works"), else the λ whose largest |λ_i| is least ("hard"), or none
    ("impossible"). Where the tasks are known to be correlated with each other, the theorem promises nothing, and what
    would work is "hard".
    """

    gammas: tuple[float, ...]
    scales: tuple[float, ...]
    verdict: Verdict
    why: str
    margin: float
    c: float
    beta: float
    closed_form: bool = True

    def holds(self, scales: Sequence[float]) -> bool:
        """Whether the theorem promises success for these λ_i."""
        if len(scales) != len(self.gammas):
            raise BadValueError(f"{len(scales)} scales were given for {len(self.gammas)} tasks.")
        first = math.fsum(s * g for s, g in zip(scales, self.gammas, strict=True))
        second = math.fsum(s * g * g for s, g in zip(scales, self.gammas, strict=True))
        # The scales meet one sum, or the bound, with equality, but for rounding.
        needed, most = (self.margin + self.c) * (1 - 1e-12), self.c * (1 + 1e-12)
        return min(first, second) >= needed and all(abs(s) * self.beta <= most for s in scales)

    def figure(self, low: float = -2.0, high: float = 3.0, names: Sequence[str] = ("task 1", "task 2")) -> "Figure":
        """The region for two tasks, as figure 2 (B) of the paper; from `low` to `high`, or further if need be."""
        from hf_taskvec.analysis.plots import transfer_figure

        return transfer_figure(self, low, high, names)


@dataclass(frozen=True)
class Recommendation:
    """What the theorems say: `add` and `forget` from α, `transfer` from γ; None for what was not asked."""

    alpha: float | None
    add: Region | None
    forget: Region | None
    transfer: Transfer | None

    @property
    def sweep_scale(self) -> float | None:
        """The λ to evaluate in an unlearning sweep from a model that holds the task, if there is one."""
        return None if self.forget is None else self.forget.in_sweep.scale

    def scales_with(self, grid: Sequence[float]) -> list[float]:
        """The grid of a sweep with the recommended λ among it, in the grid's direction from 0."""
        for each in grid:
            if not math.isfinite(each):
                raise BadValueError(f"the grid holds {each}: a scale must be a number.")
        scale = self.sweep_scale
        found = {round(float(each), 12) + 0.0 for each in (*grid, *([] if scale is None else [scale]))}
        return sorted(found, key=lambda each: (abs(each), each))

    def __str__(self) -> str:
        lines = [] if self.alpha is None else [f"α = {self.alpha:+.3f}"]
        lines += [str(region) for region in (self.add, self.forget and self.forget.in_sweep) if region is not None]
        if self.transfer is not None:
            values = ", ".join(f"{scale:.3g}" for scale in self.transfer.scales)
            found = f" with λ = ({values})" if values else ""
            lines.append(f"transfer: {self.transfer.verdict}{found}. {self.transfer.why}")
        return "\n".join(lines)


def recommend_scales(
    alpha: "float | Correlation | None" = None,
    *,
    gammas: "Sequence[float | Correlation] | None" = None,
    between: "Sequence[float | Correlation]" = (),
    beta: float = 0.01,
    c: float = 0.02,
    margin: float = 1.0,
    irrelevant: float = 0.2,
    gap: float = 0.1,
) -> Recommendation:
    """The λ that theory recommends, and the regions in which it promises success.

    Args:
        alpha: the correlation of the task to add or to forget (task 2) with the one to keep (task 1), as
            `task_correlation` gives it. For Theorems 1 and 2.
        gammas: the correlations of a new task with each of some tasks, for Theorem 3.
        between: the correlations of those tasks with each other, in any order, if they are known. The theorem is about
            tasks that have none.
        beta: by how much the error grows with |λ|.
        c: slack of Theorem 3; |λ| beyond c/β is not trusted, in any theorem.
        margin: of Theorem 3's sums: 1 for the hinge loss of the theory, `PRACTICAL_MARGIN` (0.2) as the paper has it in
            practice.
        irrelevant: an |α| up to this counts as 0. (The paper calls measured values of 0.164 and 0.115 irrelevant.)
        gap: tasks with α > 1 − gap count as one and the same.

    >>> region = recommend_scales(0.239).forget.in_sweep
    >>> region.verdict, round(region.low, 3), round(region.high, 3), region.scale
    ('hard', -1.0, -0.619, -1.0)
    """
    if alpha is None and gammas is None:
        raise BadValueError("recommend_scales() needs alpha= (one correlation) or gammas= (one for each task).")
    for name, value in (("beta", beta), ("c", c)):
        if not 0 < value < 1:
            raise BadValueError(f"{name}={value} must be between 0 and 1.")
    for name, value in (("irrelevant", irrelevant), ("gap", gap)):
        if not 0 <= value < 1:
            raise BadValueError(f"{name}={value} must be in [0, 1).")
    if not (margin > 0 and math.isfinite(margin)):
        raise BadValueError(f"margin={margin} must be positive.")
    add = forget = transfer = None
    if alpha is not None:
        alpha = _correlation(alpha, "alpha")
        add = _add(alpha, beta, c, irrelevant)
        forget = _forget(alpha, beta, c, irrelevant, gap)
    if gammas is not None:
        if not isinstance(gammas, Sequence) or isinstance(gammas, str):
            raise BadValueError(f"gammas={gammas!r} must be a list: one correlation for each task.")
        transfer = _transfer(tuple(_correlation(g, f"gammas[{i}]") for i, g in enumerate(gammas)), beta, c, margin)
        related = max((abs(_correlation(each, "between")) for each in between), default=0.0)
        if related > irrelevant:
            transfer = _without_promise(transfer, related)
    return Recommendation(alpha, add, forget, transfer)


def _correlation(value: "float | Correlation", name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadValueError(f"{name}={value!r} is not a correlation: give a number in [-1, 1].") from None
    if not abs(number) <= 1.0:
        raise BadValueError(f"{name}={number} is not a correlation: it must be in [-1, 1].")
    return number


def _add(alpha: float, beta: float, c: float, irrelevant: float) -> Region:
    """Theorem 1: both tasks work if α ≥ 0 and λ ≥ 1 − α + β; the error of task 1 grows as |λ|β."""
    if alpha < -irrelevant:
        why = (
            f"The tasks contradict each other (α = {alpha:.3g}): what one needs harms the other, and no λ serves both."
        )
        return Region("add", "impossible", why)
    seen = max(alpha, 0.0)
    low = 1.0 - seen + beta
    if alpha > irrelevant:
        why = f"The tasks are aligned (α = {alpha:.3g}): the vector of the one brings part of the other, so less of it is enough."
    else:
        why = f"The tasks are about irrelevant to each other (α = {alpha:.3g}): each vector acts on its own task alone."
    scale = -_typable(-low)
    return Region("add", "works", why, low, max(c / beta, scale), scale)


def _typable(scale: float) -> float:
    """The next lower number with three decimals: what is printed is then what is recommended."""
    return math.floor(scale * 1000 + 1e-9) / 1000


def _forget(alpha: float, beta: float, c: float, irrelevant: float, gap: float) -> Region:
    """Theorem 2: task 2 fails and task 1 works, in cases (A) α = 0, (B) α < 0, (C) 0 < α < 1 − c."""
    if abs(alpha) <= irrelevant:  # (A)
        why = (
            f"The tasks are about irrelevant to each other (α = {alpha:.3g}): taking the vector away, once or more, leaves the "
            "other task alone."
        )
        return Region("forget", "works", why, -c / beta, 0.0, 0.0)
    if alpha < 0:  # (B)
        why = f"The tasks contradict each other (α = {alpha:.3g}): taking away more than the task itself even helps the other one."
        high = beta * alpha
        low = -1 / max(alpha**2, beta / c)  # −α⁻², or −c/β where that is nearer: then (B) goes on where (A) ends
        return Region("forget", "works", why, min(low, high), high, max(min(low, high), _typable(high)))
    if alpha > 1.0 - gap:
        why = f"The tasks are nearly the same (α = {alpha:.3g}): whatever forgets the one forgets the other."
        return Region("forget", "impossible", why)
    why = (
        f"The tasks are aligned (α = {alpha:.3g}): the vector of the one holds much of the other, so λ must stay within "
        "(1 − α)/2 of removing the task once."
    )
    return Region("forget", "hard", why, 0.0, (1.0 - alpha) / 2, 0.0)  # (C), with c < 1 − α


def _without_promise(transfer: Transfer, related: float) -> Transfer:
    why = (
        f"{transfer.why} But two of the tasks are correlated (|α| = {related:.3g}), and Theorem 3 is about tasks that are "
        "irrelevant to each other: it promises nothing here, and its λ are a place to start."
    )
    return replace(transfer, verdict="hard" if transfer.verdict == "works" else transfer.verdict, why=why)


def _transfer(gammas: tuple[float, ...], beta: float, c: float, margin: float) -> Transfer:
    """Theorem 3, with the closed form of eqs. (75) and (76).

    Erratum: eq. (76) prints √Σγ⁴ in the numerator of C, with which only the first sum reaches margin + c (for γ =
    (0.792, −0.637) the second is 0.75 instead of 1.02). With √Σγ² the second meets it with equality and the first is
    larger, because Σγ⁴ ≤ Σγ² for |γ| ≤ 1. So that is used here.
    """
    gammas = tuple(g if abs(g) > _NOTHING else 0.0 for g in gammas)
    others = [g for g in gammas if g]
    if not others:
        raise BadValueError(
            "no γ is different from 0: the new task has nothing in common with any of the tasks, so no combination of their "
            "vectors reaches it (Theorem 3, condition A)."
        )
    if max(others) < 0 and max(others) - min(others) <= _NOTHING:
        raise BadValueError(
            f"every γ that is not 0 equals {others[0]:g}: the new task contradicts all tasks alike, and no λ meets both sums of "
            "Theorem 3 (one asks for negative λ, the other for positive). Add a task that is aligned with the new one."
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
        return Transfer(gammas, scales, "works", f"The closed form meets both sums within {within}.", margin, c, beta)
    gentlest = _gentlest(gammas, margin + c)
    if max(map(abs, gentlest)) <= most * (1 + 1e-12):
        why = f"The closed form needs |λ| = {largest:.3g}, but other λ within {within} meet both sums."
        return Transfer(gammas, gentlest, "hard", why, margin, c, beta, closed_form=False)
    why = f"The closed form needs |λ| = {largest:.3g}, and no λ within {within} meets both sums."
    return Transfer(gammas, (), "impossible", why, margin, c, beta)


def _gentlest(gammas: Sequence[float], needed: float) -> tuple[float, ...]:
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
