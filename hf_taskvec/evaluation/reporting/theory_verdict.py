"""What theory said about λ before a sweep, and how good that was: a part of the report, if somebody asked theory."""

from dataclasses import dataclass
from typing import Literal

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.scale_choice import Candidate, Choice

ForgettingVerdict = Literal["works", "hard", "impossible"]


@dataclass(frozen=True)
class Judgement:
    """How good a recommended λ was, beside the other λ of a sweep, on the half of the passages that chooses λ.

    Made by `UnlearningReport.judge`.

    Args:
        forget_loss (`float`):
            The share of their score at λ=0 that the forget books lost.
        worst_retain_loss (`float`):
            The same of the book to keep that lost most.
        qualifies (`bool`):
            Whether the sweep might have chosen it.
        on_pareto_front (`bool`):
            Whether, on those passages, no other λ forgets as much and keeps more (`Choice.pareto` is the front over all
            passages).
        sentence (`str`):
            All of it, and which λ the sweep chose.
    """

    forget_loss: float
    worst_retain_loss: float
    qualifies: bool
    on_pareto_front: bool
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Theory:
    """Task correlations, and what Theorem 2 of Li et al. 2025 makes of them for `θ_0' + λτ`.

    Args:
        forget (`str`):
            The book to forget.
        alphas (`dict[str, float]`):
            For each other book α̂ with the one to forget, eq. (11).
        verdict (`"works"`, `"hard"` or `"impossible"`):
            Whether a λ forgets the one and keeps the others, by the theorem.
        low, high, scale (`float`, *optional*):
            The recommended region of λ and the λ to try first, if there is one.
        words (`str`):
            The same as a sentence, with the reason.
        judged (`Judgement`, *optional*):
            How that λ did, if there is one and the sweep had a λ to choose.
    """

    forget: str
    alphas: dict[str, float]
    verdict: ForgettingVerdict
    low: float | None
    high: float | None
    scale: float | None
    words: str
    judged: Judgement | None

    @property
    def correlations(self) -> list[str]:
        """A line for each pair of books."""
        return [f"{self.forget} and {other}: {alpha:+.3f}" for other, alpha in self.alphas.items()]

    @property
    def verdicts(self) -> list[str]:
        """What was recommended, and what came of it."""
        return [self.words, *([self.judged.sentence] if self.judged else [])]


def judge_scale(scale: float | None, choice: Choice | None, higher: bool) -> Judgement:
    """See `UnlearningReport.judge`; `higher` says whether a higher value of the metric means better remembered."""
    if scale is None:
        raise BadValueError("the theory recommends no λ for forgetting here, so there is nothing to judge.")
    if choice is None:
        raise BadValueError("the report chose no λ (it needs a book to forget), so there is nothing to compare with.")
    found = next((c for c in choice.candidates if abs(c.scale - scale) < 1e-9), None)
    if found is None:
        raise BadValueError(
            f"the sweep did not evaluate the recommended λ={scale:g}. Sweep over recommendation.scales_with(grid)."
        )
    before = next(c for c in choice.candidates if c.scale == 0.0)
    sign = 1.0 if higher else -1.0
    loss = sign * (1 - found.forget / before.forget) if before.forget else 0.0
    front = not any(_beats(other, found, sign) for other in choice.candidates)
    sentence = _sentence(
        scale, choice.scale, choice.criteria.headline, loss, found.worst_retain, found.qualifies, front
    )
    return Judgement(loss, found.worst_retain, found.qualifies, front, sentence)


def _beats(other: Candidate, found: Candidate, sign: float) -> bool:
    """Whether another λ forgets as much and keeps as much, and one of the two better."""
    theirs, ours = ((sign * each.forget, each.worst_retain) for each in (other, found))
    return theirs != ours and all(a <= b for a, b in zip(theirs, ours, strict=True))


def _sentence(
    scale: float, chosen: float | None, metric: str, loss: float, retain: float, qualifies: bool, front: bool
) -> str:
    text = f"Theory recommended λ={scale:.3g}: on the half of the passages that chooses λ, the forget books lost "
    text += f"{loss:.0%} of their {metric}, and of what was to be kept the worst lost {retain:.0%}"
    if chosen is not None and abs(chosen - scale) < 1e-9:
        return text + "; it is the λ that the sweep chose."
    text += "; no other λ forgets as much and keeps more" if front else "; another λ forgets as much and keeps more"
    text += ", and it qualifies" if qualifies else ", and it does not qualify"
    return text + (f"; the sweep chose λ={chosen:.3g}." if chosen is not None else "; the sweep chose none.")
