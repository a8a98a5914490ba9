"""How good was a recommended λ? The theory's recommendation beside what a sweep measured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_taskvec.analysis.recommended_scales import Recommendation
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.evaluation import UnlearningReport
    from hf_taskvec.evaluation.scoring.scale_choice import Candidate


@dataclass(frozen=True)
class Judgement:
    """How good a recommended λ was, beside the other λ of a sweep, on the half of the passages that chooses λ.

    Losses are shares of the score at λ=0. `on_pareto_front` says that, on those passages, no other λ forgets as much and
    keeps more (`Choice.pareto` is the front over all passages).
    """

    scale: float
    chosen: float | None
    metric: str
    forget_loss: float
    worst_retain_loss: float
    qualifies: bool
    on_pareto_front: bool
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def judge(recommendation: Recommendation, report: "UnlearningReport") -> Judgement:
    """See `Recommendation.judge`."""
    scale = recommendation.sweep_scale
    if scale is None:
        raise BadValueError("the theory recommends no λ for forgetting here, so there is nothing to judge.")
    if report.choice is None:
        raise BadValueError("the report chose no λ (it needs a book to forget), so there is nothing to compare with.")
    metric = report.choice.metric
    found = next((c for c in report.choice.candidates if abs(c.scale - scale) < 1e-9), None)
    if found is None:
        raise BadValueError(
            f"the sweep did not evaluate the recommended λ={scale:g}. Sweep over recommendation.scales_with(grid)."
        )
    before = next(c for c in report.choice.candidates if c.scale == 0.0)
    higher = next(info.higher for info in report.metrics if info.name == metric)
    sign = 1.0 if higher else -1.0
    loss = sign * (1 - found.forget / before.forget) if before.forget else 0.0
    front = not any(_beats(other, found, sign) for other in report.choice.candidates)
    chosen = report.choice.scale
    return Judgement(
        scale=scale,
        chosen=chosen,
        metric=metric,
        forget_loss=loss,
        worst_retain_loss=found.worst_retain,
        qualifies=found.qualifies,
        on_pareto_front=front,
        sentence=_sentence(scale, chosen, metric, loss, found.worst_retain, found.qualifies, front),
    )


def _beats(other: "Candidate", found: "Candidate", sign: float) -> bool:
    """Whether another λ forgets as much and keeps as much, and one of the two better."""
    theirs, ours = ((sign * each.forget, each.worst_retain) for each in (other, found))
    return theirs != ours and all(a <= b for a, b in zip(theirs, ours, strict=True))


def _sentence(
    scale: float, chosen: float | None, metric: str, loss: float, retain: float, qualifies: bool, front: bool
) -> str:
    text = f"Theory recommended λ={scale:.3g}: on the half of the passages that chooses λ, the forget books lost {loss:.0%} "
    text += f"of their {metric}, and of what was to be kept the worst lost {retain:.0%}"
    if chosen is not None and abs(chosen - scale) < 1e-9:
        return text + "; it is the λ that the sweep chose."
    text += "; no other λ forgets as much and keeps more" if front else "; another λ forgets as much and keeps more"
    text += ", and it qualifies" if qualifies else ", and it does not qualify"
    return text + (f"; the sweep chose λ={chosen:.3g}." if chosen is not None else "; the sweep chose none.")
