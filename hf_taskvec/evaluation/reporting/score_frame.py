"""All scores of a report as tables of pandas."""

from typing import TYPE_CHECKING, Any

from hf_taskvec.evaluation.reporting.report_parts import ReferenceScore, Score
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

if TYPE_CHECKING:
    from pandas import DataFrame


def score_rows(report: UnlearningReport) -> list[dict[str, Any]]:
    """A row for each book, split, λ (or edit, or reference model) and metric."""
    roles = {book.name: book.role for book in report.books}

    def row(edit: str, scale: float | None, score: Score | ReferenceScore) -> dict[str, Any]:
        return {
            "book": score.book,
            "role": roles[score.book],
            "split": score.split,
            "edit": edit,
            "scale": scale,
            "metric": score.metric,
            "passages": score.n,
            "value": score.value.value,
            "low": score.value.low,
            "high": score.value.high,
        }

    rows = [row(report.names.short(score.scale), score.scale, score) for score in report.scores]
    return rows + [row(score.reference, None, score) for score in report.reference_scores]


def score_frame(report: UnlearningReport) -> "DataFrame":
    """The same as a table of pandas."""
    import pandas

    return pandas.DataFrame(score_rows(report))


def utility_frame(report: UnlearningReport) -> "DataFrame":
    """A row for each ability that no book measures, and each λ (or edit, or reference model)."""
    import pandas

    rows = [
        {
            "metric": score.metric,
            "edit": score.reference if score.scale is None else report.names.short(score.scale),
            "scale": score.scale,
            "documents": score.n,
            "value": score.value.value,
            "low": score.value.low,
            "high": score.value.high,
            "difference": score.difference.value,
        }
        for score in report.utility
    ]
    return pandas.DataFrame(rows)
