"""Reports on the screen: the scores, what each metric says of the book, the λ to take, its controls; and attacks."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.cli.command_record import record_command
from hf_taskvec.cli.option_words import in_cli_words
from hf_taskvec.cli.results import CommandResult, TextTable
from hf_taskvec.escaping import visible

if TYPE_CHECKING:
    from hf_taskvec.auditing.audit_report import AuditReport
    from hf_taskvec.evaluation.reporting.control_table import ControlTable
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
    from hf_taskvec.evaluation.scoring.scale_choice import Choice


def show_report(report: "UnlearningReport", output: Path | None, as_json: bool, *, chosen: bool = True) -> None:
    """Store the command beside the report, and show it; in the main process only.

    Args:
        report (`UnlearningReport`):
            What a sweep gave.
        output (`Path`, *optional*):
            Where it was written, if it was.
        as_json (`bool`):
            For scripts.
        chosen (`bool`, *optional*, defaults to `True`):
            Whether a λ was to be chosen: then it is told which, and why.
    """
    from hf_taskvec.distributed import processes

    if not processes().is_main_process:
        return
    values: dict[str, Any] = {"output": None if output is None else str(output), "protocol": report.protocol.id}
    if report.edits:
        values["edits"] = [{"scale": scale, "name": report.names.short(scale)} for scale in report.scales]
    lines: list[str | TextTable] = [scores_table(report)]
    choice = report.choice if chosen else None
    if chosen:
        values |= choice_values(report, choice)
        values["controls"] = None if report.controls is None else report.controls.to_dict()
    if choice is not None:
        lines += [*verdict_lines(report, choice), "", in_cli_words(choice.reason, None)]
        if report.controls is not None:
            lines += _controls(report.controls)
    values["rouge_l"] = [
        {"book": s.book, "split": s.split, "scale": s.scale, **asdict(s.value)}
        for s in report.scores
        if s.metric == "rouge_l"
    ]
    values["rouge_l_of_references"] = [
        {"book": s.book, "split": s.split, "reference": s.reference, **asdict(s.value)}
        for s in report.reference_scores
        if s.metric == "rouge_l"
    ]
    if output is not None:
        record_command(output)
        lines += ["", f"{output}: report.html for a browser, report.md, report.json and plots, with all other measures"]
    CommandResult(values, lines).show(as_json)


def choice_values(report: "UnlearningReport", choice: "Choice | None") -> dict[str, Any]:
    """What was chosen and why, for scripts."""
    if choice is None:
        return {"scale": None, "reason": None}
    called = {None: None} | {scale: report.names.short(scale) for scale in report.scales}
    names = {"edit": called.get(choice.scale), "nearest_edit": called.get(choice.nearest)} if report.edits else {}
    return {
        **names,
        "scale": choice.scale,
        "nearest": choice.nearest,
        "reason": choice.reason,
        "criteria": asdict(choice.criteria),
        "never_seen": asdict(choice.never_seen),
        "verdict": None if choice.verdict is None else asdict(choice.verdict),
    }


def _controls(table: "ControlTable") -> list[str | TextTable]:
    from hf_taskvec.evaluation.reporting.control_table import control_heads, control_rows

    lines: list[str | TextTable] = []
    for book in table.books:
        title = f"What each change takes of {visible(book.name)} ({book.role}), λ={table.scale:g}"
        lines += ["", TextTable(title, control_heads(table), control_rows(table, book.name))]
    return [*lines, "", f"Controls: {table.sentence}"]


def scores_table(report: "UnlearningReport") -> TextTable:
    """Rouge-L of every book at every λ, or with every edit."""
    columns = []
    for book in report.books:
        for split in ("seen", "held_out"):
            wanted = (book.name, split, "rouge_l")
            cells = [s.value.value for s in report.scores if (s.book, s.split, s.metric) == wanted]
            cells += [s.value.value for s in report.reference_scores if (s.book, s.split, s.metric) == wanted]
            if cells:
                name = f"{book.name} ({book.role}, {split.replace('_', ' ')})"
                columns.append((name, *(f"{value:.3f}" for value in cells)))
    heads = [*map(_head_of(report), report.scales), *(info.name for info in report.references)]
    if report.edits:  # their names are long: they stand below each other
        turned = list(zip(heads, *(cells for _, *cells in columns), strict=True))
        return TextTable("Rouge-L", ["edit", *(name for name, *_ in columns)], turned)
    return TextTable("Rouge-L", ["book", *heads], columns)


def _head_of(report: "UnlearningReport") -> Callable[[float], str]:
    return report.names.short if report.edits else report.names.phrase


def verdict_lines(report: "UnlearningReport", choice: "Choice") -> list[str | TextTable]:
    """What each metric says of the λ or the edit that is judged, if there is one, after an empty line."""
    from hf_taskvec.evaluation.reporting.verdict_tables import VERDICT_HEADS, short_verdict

    if choice.verdict is None:
        return []
    which = "chosen" if choice.scale is not None else "nearest"
    assert choice.judged is not None
    title = f"{_head_of(report)(choice.judged)} ({which}), on the half of the passages that did not choose it"
    return ["", TextTable(title, VERDICT_HEADS, short_verdict(choice.verdict, report.metric))]


def attack_lines(report: "AuditReport") -> list[str | TextTable]:
    """R under each attack that was made, if one was, after an empty line."""
    from hf_taskvec.auditing.audit_words import overview_rows
    from hf_taskvec.evaluation.reporting.number_formats import format_number

    if not report.findings:
        return []
    rows = overview_rows(report, lambda relative: format_number(relative.value, 2))
    heads = ["attack", *(name.replace("_", " ") for name in report.criteria.judged), "says"]
    return ["", TextTable("R under each attack: 0 is untouched, 1 never seen", heads, rows)]
