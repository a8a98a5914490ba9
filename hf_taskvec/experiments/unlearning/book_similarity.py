"""How alike the books are to the model, before anything is edited: α̂ of eq. (11) between the book to forget and the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis import EditedModel, Recommendation, correlation_matrix, recommend_scales
from hf_taskvec.evaluation.reporting.recommended_scale import Judged, Theory
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.texts.books import Book
from hf_taskvec.evaluation.texts.passages import find_passages
from hf_taskvec.evaluation.texts.protocols import Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Alignment:
    """How alike the book to forget and the others are, and the λ that follows from it.

    Args:
        alphas: for each other book α̂ with the one to forget, eq. (11).
        recommendation: Theorem 2 for the book to keep that is most like the one to forget.
    """

    forget: str
    alphas: dict[str, float]
    recommendation: Recommendation

    def judged(self, report: UnlearningReport) -> Theory:
        """What theory says, and how good that was in a sweep, for the sweep's report."""
        assert self.recommendation.forget is not None
        region = self.recommendation.forget.in_sweep
        return Theory(
            forget=self.forget,
            alphas=self.alphas,
            verdict=region.verdict,
            low=region.low,
            high=region.high,
            scale=region.scale,
            words=str(region),
            judged=self._judged(report),
        )

    def _judged(self, report: UnlearningReport) -> Judged | None:
        if self.recommendation.sweep_scale is None or report.choice is None:
            return None
        found = self.recommendation.judge(report)
        return Judged(
            found.forget_loss, found.worst_retain_loss, found.qualifies, found.on_pareto_front, found.sentence
        )


def align(
    base: "PreTrainedModel",
    vectors: Mapping[str, TaskVector],
    books: Sequence[Book],
    protocol: Protocol,
    tokenizer: Any,
) -> Alignment:
    """α̂ of the first book with each other, on held-out passages, and what theory makes of it.

    Args:
        base: θ_0, live.
        vectors: for each book's name the vector of θ_0 fine-tuned on that book alone.
        books: the one to forget first.
        protocol, tokenizer: which passages, and in which tokens.
    """
    first, *others = books
    data = {
        book.name: [
            p.prompt + p.gap + p.answer for p in find_passages(book, protocol, tokenizer) if p.split == "held_out"
        ]
        for book in books
    }
    models = {name: EditedModel(base, vectors[name]) for name in data}
    # A handful of passages each: several positions of each are compared, not its last one alone.
    found = correlation_matrix(models, data, tokenizer=tokenizer, pooling="sample")
    alphas = {other.name: found[first.name, other.name] for other in others}
    kept = [alphas[other.name] for other in others if other.role == "retain"] or list(alphas.values())
    return Alignment(first.name, alphas, recommend_scales(max(kept)))
