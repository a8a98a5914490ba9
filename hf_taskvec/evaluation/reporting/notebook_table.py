"""The report in a notebook: one compact table, the chosen λ marked, and the verdict.

Styles are inline and colours translucent or inherited: the table needs no other file and suits light and dark themes.
"""

from html import escape

from hf_taskvec.evaluation.reporting.number_formats import format_interval
from hf_taskvec.evaluation.reporting.tables import reference_head, verdict
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.statistics import Interval

# Without a doctype, browsers let tables inherit neither colour nor size.
_TABLE = "border-collapse:collapse;margin:.5em 0;color:inherit;font-size:inherit;font-variant-numeric:tabular-nums"
_LINE = "border-bottom:1px solid rgba(128,128,128,.35)"
_CHOSEN = "background:rgba(0,158,115,.18)"
_FAINT = "opacity:.7;font-size:85%;white-space:nowrap"


def report_html(report: UnlearningReport) -> str:
    """Books down, λ and the reference models across: the score of the seen passages with its interval."""
    metric = report.choice.criteria.headline if report.choice is not None else "rouge_l"
    digits = report.metric(metric).digits
    chosen = report.choice.scale if report.choice is not None else None
    head = [_cell("th", "book", "text-align:left")]
    head += [_scale_head(report.names.head(scale), scale == chosen) for scale in report.scales]
    head += [_cell("th", escape(reference_head(info.name))) for info in report.references]
    rows = ["".join(head)]
    for book in report.books:
        name = f'{escape(book.name)} <span style="{_FAINT};font-weight:normal">{escape(book.role)}</span>'
        cells = [_cell("th", name, "text-align:left")]
        values = {
            score.scale: score.value
            for score in report.scores
            if (score.book, score.metric, score.split) == (book.name, metric, "seen")
        }
        cells += [_value(values.get(scale), digits, scale == chosen) for scale in report.scales]
        others = {
            score.reference: score.value
            for score in report.reference_scores
            if (score.book, score.metric, score.split) == (book.name, metric, "seen")
        }
        cells += [_value(others.get(info.name), digits) for info in report.references]
        rows.append("".join(cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows[1:])
    about = f"{report.metric(metric).title or metric} of the seen passages, with {report.settings.level:.0%} intervals"
    return (
        '<div style="overflow-x:auto">'
        f"<div><b>Unlearning report</b> · {escape(about)} · <code>{escape(report.protocol.id)}</code></div>"
        f'<table style="{_TABLE}">'
        f"<thead><tr>{rows[0]}</tr></thead><tbody>{body}</tbody></table>"
        f"<div>{escape(verdict(report))}</div></div>"
    )


def _scale_head(name: str, is_chosen: bool) -> str:
    text = escape(name) + ("<br/>✓ chosen" if is_chosen else "")
    return _cell("th", text, _CHOSEN if is_chosen else "")


def _value(found: Interval | None, digits: int, is_chosen: bool = False) -> str:
    text = "–"
    if found is not None:
        value, _, ends = format_interval(found, digits).partition(" ")
        text = value + (f'<br/><span style="{_FAINT}">{ends}</span>' if ends else "")
    return _cell("td", text, _CHOSEN if is_chosen else "")


def _cell(tag: str, content: str, style: str = "") -> str:
    style = f"text-align:right;padding:.3em .7em;vertical-align:top;{_LINE};{style}".rstrip(";")
    return f'<{tag} style="{style}">{content}</{tag}>'
