"""What a card shows of a sweep's report, and what of the report is published: numbers, never the books' texts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec import filenames
from hf_taskvec.errors import MismatchError
from hf_taskvec.escaping import markdown, markdown_code
from hf_taskvec.publishing.written_folder import Artifact

if TYPE_CHECKING:
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
    from hf_taskvec.evaluation.texts.books import Split

_PLOTS = ("scores", "pareto")  # not the samples, which show passages


def find_report(artifact: Artifact, given: "UnlearningReport | str | Path | None") -> "UnlearningReport | None":
    """The report that belongs to an artifact: the given one, or what its folder has under `report/`.

    A report of another edit is refused.
    """
    if given is None:
        folders = (artifact.folder / filenames.REPORT_FOLDER, artifact.folder)
        given = next((folder for folder in folders if (folder / filenames.REPORT_JSON).exists()), None)
        if given is None:
            return None
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

    report = given if isinstance(given, UnlearningReport) else UnlearningReport.load(given)
    edits = {report.edit, *(edit.fingerprint for edit in report.edits)}
    if artifact.fingerprint is not None and edits.isdisjoint({artifact.fingerprint, "none"}):
        raise MismatchError(
            f"the report is of another edit ({report.edit[:12]}) than {artifact.folder.name} holds "
            f"({artifact.fingerprint[:12]}). Sweep the very vector that is applied, and give λ as scale=."
        )
    return report


def reported_scale(artifact: Artifact, report: "UnlearningReport | None") -> float | None:
    """The λ of the artifact among those of the report; for a vector, which has none of its own, the chosen one.

    Of a report that compares whole edits, the number of the one that the artifact holds.
    """
    if report is None:
        return None
    if report.edits:
        as_it_is = artifact.kind == "vector" or artifact.scale == 1
        held = [
            number for number, e in enumerate(report.edits, 1) if as_it_is and e.fingerprint == artifact.fingerprint
        ]
        return float(held[0]) if held else None
    if artifact.kind == "vector":
        return (report.choice.scale or None) if report.choice is not None else None  # λ = 0 is the model without it
    return next((scale for scale in report.scales if scale == artifact.scale), None)


def evaluation_section(
    artifact: Artifact, report: "UnlearningReport", scale: float | None, plots: bool = True
) -> dict[str, Any]:
    """The report as the card's template shows it."""
    from hf_taskvec.evaluation.reporting.tables import score_table
    from hf_taskvec.evaluation.reporting.verdict_tables import verdict_table

    measured = {metric.name for metric in report.metrics}
    wanted = [("rouge_l", "Rouge-L"), ("perplexity", "Perplexity of the true text")]
    splits: tuple[tuple[Split, str], ...] = (("seen", "passages seen in training"), ("held_out", "held-out passages"))
    tables = [
        {"title": f"{title}, {words}", "rows": score_table(report, metric, split)}
        for metric, title in wanted
        for split, words in splits
        if metric in measured and any(score.split == split for score in report.scores)
    ]
    choice = report.choice
    if choice is not None and choice.verdict is not None and scale is not None and choice.judged == scale:
        title = f"The verdict, on passages that had no part in the choice of {'the edit' if report.edits else 'λ'}"
        tables.insert(0, {"title": title, "rows": verdict_table(choice.verdict, report.metric)})
    books = ", ".join(
        f"{markdown(b.name)} ({b.role}: {b.seen} seen and {b.held_out} held-out passages)" for b in report.books
    )
    return {
        "protocol": markdown_code(report.protocol.id),
        "books": f"Books: {books}.",
        "choice": f"{_this(artifact, report, scale)} {_choice(report)}",
        "level": f"{report.settings.level:.0%}",
        "tables": tables,
        "plots": plots and _can_plot(),
    }


def _this(artifact: Artifact, report: "UnlearningReport", scale: float | None) -> str:
    if report.edits:
        if scale is None:
            return (
                f"The tables compare several edits; this {artifact.kind} holds one of them at another scale, or none."
            )
        return f"This {artifact.kind} holds the edit **{markdown(report.names.short(scale))}**."
    if artifact.kind == "vector":
        return "The tables show the vector at several λ."
    number = f"{artifact.scale:g}".replace("-", "−")
    if scale is None:
        unmeasured = "which the sweep did **not** measure; the tables show other λ"
        return f"This {artifact.kind} stands at λ = {number}, {unmeasured}."
    return f"This {artifact.kind} stands at **λ = {number}**."


def _choice(report: "UnlearningReport") -> str:
    if report.choice is None:
        return "No book was marked as one to forget, so the sweep chose nothing."
    reason = markdown(report.choice.reason.strip().rstrip("."))
    return f"The sweep's choice: {reason}."


def published_report(report: "UnlearningReport") -> dict[str, bytes]:
    """The files of a report that go to the Hub: numbers, tables and plots. No text of any book is among them."""
    from hf_taskvec.evaluation.reporting.score_frame import score_rows

    numbers = replace(report, passages=())
    files = {
        filenames.REPORT_JSON: numbers.to_json().encode(),
        filenames.REPORT_MARKDOWN: report.to_markdown().encode(),
        filenames.REPORT_SCORES: "".join(f"{json.dumps(row)}\n" for row in score_rows(report)).encode(),
    }
    if _can_plot():
        from hf_taskvec.evaluation.reporting.plots import plot_files

        files |= {name: page for name, page in plot_files(report, _PLOTS).items() if name.endswith(".png")}
    return files


def _can_plot() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True
