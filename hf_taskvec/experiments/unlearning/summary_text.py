"""The text that ends a run of the unlearning experiment: what happened, for a person who has read nothing else."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

from hf_taskvec.evaluation.reporting.report_parts import PassageResult, Score
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.reporting.verdict_tables import VERDICT_HEADS, short_verdict
from hf_taskvec.evaluation.scoring.verdict import Verdict
from hf_taskvec.evaluation.texts.books import Role
from hf_taskvec.forgetting.edit_search import EditSearch

_ROLES: dict[Role, str] = {
    "forget": "to forget",
    "aligned": "same series",
    "retain": "unrelated",
    "unseen": "never seen",
}
# Beyond the sweep every other book is to be kept.
_KEPT: dict[Role, str] = {**_ROLES, "retain": "to keep"}
_WIDTH = 100


def summary_text(
    report: UnlearningReport,
    references: Mapping[str, UnlearningReport],
    scales: list[float],
    vector: str,
    files: Mapping[str, Path],
    *,
    samples: bool = True,
) -> str:
    """The summary of a run.

    Args:
        report (`UnlearningReport`):
            Of the sweep.
        references (`Mapping`):
            Reports (at λ=0) of models to compare with, by name.
        scales (`list` of `float`):
            The λ to show, beside the chosen one.
        vector (`str`):
            The expression that was subtracted.
        files (`Mapping`):
            What was written, by what it is.
        samples (`bool`, *optional*, defaults to `True`):
            Also show what the model writes, before and after.

    Returns:
        `str`: A table, the chosen λ, samples, and the files.
    """
    parts = [
        f"Rouge-L on passages that the model was trained on (95 % intervals; change against λ = 0)\n"
        f"θ_0' knows all the books; λ times {vector} is added to it.\n\n" + summary_table(report, references, scales),
        _chosen(report),
    ]
    if report.theory is not None:
        pairs = [f"  {line}" for line in report.theory.correlations]
        parts.append("\n".join(["Task correlation α̂, eq. (11):", *pairs, *report.theory.verdicts]))
    if report.controls is not None:
        parts.append(textwrap.fill(f"Controls: {report.controls.sentence}", _WIDTH))
    if samples:
        parts.append(_samples(report))
    parts.append("\n".join(f"{what:<13} {_shown(path)}" for what, path in files.items()))
    return "\n\n".join(parts)


def edit_text(searched: EditSearch) -> str:
    """What was tried beyond the sweep, and what it reached.

    Args:
        searched (`EditSearch`):
            The edits, and the report that compares them.

    Returns:
        `str`: A table, the verdict, samples, and what each edit took.
    """
    report = searched.report
    costs = [
        f"  {edit.name}: {edit.steps:,} steps on {edit.tokens:,} tokens, {edit.seconds:.0f} s"
        for edit in searched.tried
        if edit.steps and not edit.after  # an adjustment takes nothing beyond its repair
    ]
    parts = [
        "Beyond the sweep: other edits of θ_0' (Rouge-L as above; all other books are to be kept)\n\n"
        + summary_table(report, {}, list(report.scales), _KEPT),
        _chosen(report),
        *(["\n".join(["What that took:", *costs])] if costs else []),
        _samples(report, _KEPT),
    ]
    return "\n\n".join(parts)


def summary_table(
    report: UnlearningReport,
    references: Mapping[str, UnlearningReport],
    scales: list[float],
    roles: Mapping[Role, str] = _ROLES,
) -> str:
    """λ down, books across, as in the paper's table 3 (turned by a quarter), with intervals."""
    chosen = report.choice.scale if report.choice is not None else None
    shown = [scale for scale in report.scales if scale in scales or scale in (0.0, chosen)]
    books = [book for book in report.books if book.seen]
    head = [report.names.noun, *(f"{book.name} ({roles[book.role]})" for book in books)]
    rows = [[_named(report, s), *(_cell(report.score(b.name, s)) for b in books)] for s in shown]
    for name, other in references.items():
        rows.append([name, *(_cell(other.score(book.name, 0.0)) for book in books)])
    lines = _aligned([head, *rows])
    rule = "-" * max(map(len, lines))
    return "\n".join(
        [lines[0], rule, *lines[1 : len(shown) + 1], *([rule] if references else []), *lines[len(shown) + 1 :]]
    )


def _aligned(rows: list[list[str]]) -> list[str]:
    """The rows of a table as lines, with columns under each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _named(report: UnlearningReport, scale: float) -> str:
    chosen = report.choice is not None and scale == report.choice.scale
    return report.names.short(scale) + (" *" if chosen else "")


def _cell(score: Score) -> str:
    text = f"{score.value.value:.3f} [{score.value.low:.3f}, {score.value.high:.3f}]"
    return text if score.relative is None else f"{text} {100 * score.relative.value:+.0f} %".replace("-", "−")


def _chosen(report: UnlearningReport) -> str:
    choice = report.choice
    if choice is None:
        return "No λ was chosen: no book is to be forgotten."
    lines = [f"{'* chosen: ' if choice.scale is not None else ''}{choice.reason}."]
    if choice.verdict is not None:
        lines += ["", _verdict(choice.verdict, report), ""]
    for test in choice.tests:
        p = "p < 0.001" if test.p_value < 0.001 else f"p = {test.p_value:.3f}"
        lines.append(
            f"{test.first} lost {test.first_loss:.0%}, {test.second} {test.second_loss:.0%}: more, by the "
            f"permutation test, with {p}."
        )
    return "\n".join(
        textwrap.fill(line, _WIDTH, break_long_words=False) if "  " not in line else line for line in lines
    )


def _verdict(verdict: Verdict, report: UnlearningReport) -> str:
    """What each metric says, as a table."""
    rows = short_verdict(verdict, report.metric)
    return "\n".join(_aligned([list(VERDICT_HEADS), *rows]))


def _samples(report: UnlearningReport, roles: Mapping[Role, str] = _ROLES) -> str:
    """The passage of each book that was known best, before and after."""
    scale, why = report.scales[-1], ""
    if report.choice is not None and report.choice.judged:
        scale = report.choice.judged
        why = "" if report.choice.scale else ", the nearest"
    lines = [f"What it writes, before and after ({report.names.head(scale)}{why}):"]
    for book in [book for book in report.books if book.seen][:3]:
        known = [p for p in report.passages if p.book == book.name and p.split == "seen"]
        passage = max(known, key=lambda p: (p.at[0].values["rouge_l"], p.id))
        lines.append(f"\n{book.name} ({roles[book.role]})")
        cells = {
            "prompt": "… " + passage.prompt[-160:].split(" ", 1)[-1],
            "the book": passage.answer,
            "before": _output(passage, 0.0),
            "after": _output(passage, scale),
        }
        lines += [_wrapped(name, text) for name, text in cells.items()]
    return "\n".join(lines)


def _output(passage: PassageResult, scale: float) -> str:
    return next(at.output for at in passage.at if at.scale == scale).strip() or "(nothing)"


def _wrapped(name: str, text: str) -> str:
    clean = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    start = f"  {name:<9} "
    return textwrap.fill(clean, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start))


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
