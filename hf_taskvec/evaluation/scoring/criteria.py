"""What "forgotten" and "kept" have to mean, as one value that a report stores."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.scoring.metrics import PRIMARY, MetricInfo

JudgingRule = Literal["relative", "margin"]


@dataclass(frozen=True)
class Criteria:
    """When a book counts as forgotten, and the others as kept.

    By the rule `"relative"`, a book is as if never seen where the whole interval of its relative forgetting R (0 is
    untouched, 1 never seen) lies between `low` and `high`, for every one of `metrics`, and its membership AUC is that
    of a model that never saw it. `"margin"` is the weaker rule of earlier reports, for comparison: the score of the
    first metric within ± `margin` of the never-seen level.

    Args:
        metrics (`tuple` of `str`, *optional*):
            The memory metrics that all have to agree: Rouge-L, the loss of the true continuation, extraction strength
            and exact memorisation without it. The first is the headline: the Pareto front is drawn by it.
        low, high (`float`, *optional*, defaults to 0.8 and 1.2):
            Between these, R means forgotten. Below, the book is still known; above, forgotten beyond never seen.
        membership (`float`, *optional*, defaults to 0.15):
            How far the membership AUC may be from the reference's.
        retain_bound (`float`, *optional*, defaults to 0.1):
            The share that a retained book may lose of every metric (of the loss: of a true token's probability).
        certain (`bool`, *optional*, defaults to `False`):
            λ is taken only if the whole intervals meet the criteria on the half that chooses, not only the means.
        rule (`"relative"` or `"margin"`, *optional*, defaults to `"relative"`):
            What "as if never seen" means.
        margin (`float`, *optional*, defaults to 0.03):
            For the rule `"margin"`, in units of a score from 0 to 1.

    Example:
        >>> Criteria(retain_bound=0.3).metrics
        ('rouge_l', 'loss', 'extraction_strength', 'exact_memorisation')

    """

    metrics: tuple[str, ...] = PRIMARY
    low: float = 0.8
    high: float = 1.2
    membership: float = 0.15
    retain_bound: float = 0.1
    certain: bool = False
    rule: JudgingRule = "relative"
    margin: float = 0.03

    def __post_init__(self) -> None:
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise BadValueError(f"metrics={self.metrics}: name at least one metric to judge by, and none twice")
        if not (0 < self.low <= 1 <= self.high and math.isfinite(self.high)):
            raise BadValueError(
                f"low={self.low} and high={self.high} must enclose 1, which is never seen, and leave out 0, "
                "which the untouched model has"
            )
        for name in ("membership", "margin"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise BadValueError(f"{name}={value} must be 0 or more: it is a distance from the never-seen level")
        if not 0 <= self.retain_bound <= 1:
            raise BadValueError(f"retain_bound={self.retain_bound} must be between 0 and 1: it is a share")
        if self.rule not in ("relative", "margin"):
            raise MissingNameError(
                f"no rule {self.rule!r}.{did_you_mean(self.rule, ('relative', 'margin'))} Use 'relative' or 'margin'"
            )

    @property
    def headline(self) -> str:
        """The first metric."""
        return self.metrics[0]

    @property
    def judged(self) -> tuple[str, ...]:
        """The metrics that decide under the rule."""
        return self.metrics if self.rule == "relative" else self.metrics[:1]

    def in_units(self, score_factor: float) -> "Criteria":
        """The same for a protocol whose Rouge-L goes up to `score_factor`: the margin is stored for one up to 1."""
        return replace(self, margin=self.margin * score_factor) if self.headline.startswith("rouge") else self

    def check(self, known: Iterable[MetricInfo], measured: Collection[str]) -> None:
        """Refuse metrics that do not exist, say nothing of memory, or were not measured."""
        infos = {info.name: info for info in known}
        memory = [name for name, info in infos.items() if info.kind == "memory"]
        for name in self.metrics:
            if name not in memory:
                raise MissingNameError(f"no memory metric {name!r}.{did_you_mean(name, memory)} Use some of {memory}")
            if name in self.judged and name not in measured:
                raise BadValueError(
                    f"metric {name!r} needs the likelihood of the true text: leave likelihood=True, or choose others, "
                    "as in Criteria(metrics=('rouge_l',))"
                )
