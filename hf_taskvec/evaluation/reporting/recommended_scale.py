"""What theory said about λ before a sweep, and how good that was: a part of the report, if somebody asked theory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Judged:
    """How the recommended λ did in the sweep, on the half of the passages that chooses.

    Args:
        forget_loss: the share of their score at λ=0 that the forget books lost.
        worst_retain_loss: the same of the book to keep that lost most.
        qualifies: whether the sweep might have chosen it.
        on_pareto_front: whether no other λ forgets as much and keeps more.
        sentence: all of it, and which λ the sweep chose.
    """

    forget_loss: float
    worst_retain_loss: float
    qualifies: bool
    on_pareto_front: bool
    sentence: str


@dataclass(frozen=True)
class Theory:
    """Task correlations, and what Theorem 2 of Li et al. 2025 makes of them for `θ_0' + λτ`.

    Args:
        forget: the book to forget.
        alphas: for each other book α̂ with the one to forget, eq. (11).
        verdict: `works`, `hard` or `impossible`.
        low, high, scale: the recommended region of λ and the λ to try first, if there is one.
        words: the same as a sentence, with the reason.
        judged: how that λ did, if there is one and the sweep had a λ to choose.
    """

    forget: str
    alphas: dict[str, float]
    verdict: str
    low: float | None
    high: float | None
    scale: float | None
    words: str
    judged: Judged | None

    @property
    def correlations(self) -> list[str]:
        """A line for each pair of books."""
        return [f"{self.forget} and {other}: {alpha:+.3f}" for other, alpha in self.alphas.items()]

    @property
    def verdicts(self) -> list[str]:
        """What was recommended, and what came of it."""
        return [self.words, *([self.judged.sentence] if self.judged else [])]
