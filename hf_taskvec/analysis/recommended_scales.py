"""Which λ the theory recommends: Theorems 1 to 3 of Li et al. (2025), as `scale_theorems` has them.

Theorems 1 and 2 are about `θ_0 + τ_1 + λ τ_2`: a model that knows task 1 and nothing of task 2. A sweep that forgets
is about `θ_0' + λ τ` where `θ_0'` was trained on both, and so holds about one τ already: λ_sweep ≈ λ_theorem − 1.
`ScaleRegion` is in the theorems' terms and `in_sweep` translates it. Untranslated, case (C) of Theorem 2 would have us
*add* the task that is to be forgotten.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_taskvec.analysis.scale_theorems import (
    ScaleRegion,
    TransferScales,
    region_to_add,
    region_to_forget,
    scales_to_transfer,
    without_promise,
)
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.analysis.correlations import Correlation

#: What the paper writes instead of the hinge loss's margin of 1 in practice (its footnote 3).
PRACTICAL_MARGIN = 0.2


@dataclass(frozen=True)
class Recommendation:
    """What the theorems say; made by `recommend_scales`. What was not asked is None.

    Args:
        alpha (`float`, *optional*):
            The correlation from which `add` and `forget` follow.
        add (`ScaleRegion`, *optional*):
            Theorem 1.
        forget (`ScaleRegion`, *optional*):
            Theorem 2.
        transfer (`TransferScales`, *optional*):
            Theorem 3.

    """

    alpha: float | None
    add: ScaleRegion | None
    forget: ScaleRegion | None
    transfer: TransferScales | None

    @property
    def sweep_scale(self) -> float | None:
        """The λ to evaluate in an unlearning sweep from a model that holds the task, if there is one."""
        return None if self.forget is None else self.forget.in_sweep.scale

    def scales_with(self, grid: Sequence[float]) -> list[float]:
        """The grid of a sweep and the recommended λ, by their distance from 0.

        Args:
            grid (`Sequence[float]`):
                The scales that the sweep would have.

        Returns:
            `list[float]`: The scales, each once.

        Raises:
            `BadValueError`: If the grid holds NaN or an infinite number.

        Example:
            >>> recommend_scales(0.239).scales_with([0, -0.5, -1.5])
            [0.0, -0.5, -1.0, -1.5]

        """
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
        alpha (`float` or `Correlation`, *optional*):
            The correlation of the task to add or to forget (task 2) with the one to keep (task 1), as
            `task_correlation` gives it. For Theorems 1 and 2.
        gammas (`Sequence` of `float` or `Correlation`, *optional*):
            The correlations of a new task with each of some tasks, for Theorem 3.
        between (`Sequence` of `float` or `Correlation`, *optional*, defaults to `()`):
            The correlations of those tasks with each other, in any order, if they are known. The theorem is about
            tasks that have none.
        beta (`float`, *optional*, defaults to 0.01):
            By how much the error grows with |λ|.
        c (`float`, *optional*, defaults to 0.02):
            Slack of Theorem 3; |λ| beyond c/β is not trusted, in any theorem.
        margin (`float`, *optional*, defaults to 1.0):
            Of Theorem 3's sums: 1 for the hinge loss of the theory, `PRACTICAL_MARGIN` (0.2) as the paper has it in
            practice.
        irrelevant (`float`, *optional*, defaults to 0.2):
            An |α| up to this counts as 0. (The paper calls measured values of 0.164 and 0.115 irrelevant.)
        gap (`float`, *optional*, defaults to 0.1):
            Tasks with α > 1 − gap count as one and the same.

    Returns:
        `Recommendation`: The regions and scales.

    Raises:
        `BadValueError`: If neither `alpha` nor `gammas` is given, one is no correlation, or no λ exists for `gammas`.

    Example:
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
        add = region_to_add(alpha, beta, c, irrelevant)
        forget = region_to_forget(alpha, beta, c, irrelevant, gap)
    if gammas is not None:
        if not isinstance(gammas, Sequence) or isinstance(gammas, str):
            raise BadValueError(f"gammas={gammas!r} must be a list: one correlation for each task.")
        transfer = scales_to_transfer(
            tuple(_correlation(g, f"gammas[{i}]") for i, g in enumerate(gammas)), beta, c, margin
        )
        related = max((abs(_correlation(each, "between")) for each in between), default=0.0)
        if related > irrelevant:
            transfer = without_promise(transfer, related)
    return Recommendation(alpha, add, forget, transfer)


def _correlation(value: "float | Correlation", name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadValueError(f"{name}={value!r} is not a correlation: give a number in [-1, 1].") from None
    if not abs(number) <= 1.0:
        raise BadValueError(f"{name}={number} is not a correlation: it must be in [-1, 1].")
    return number
