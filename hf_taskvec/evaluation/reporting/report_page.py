"""`report.html`: the report as one file for a browser, which needs no network.

The page holds the whole report as JSON, and a script that shows it: a slider through the edits, curves, the passages
word by word. Texts come from anybody's files. In the markup they are escaped; the script makes text nodes of them; and
the page's own policy lets no other script run and nothing be loaded.
"""

import hashlib
import json
from base64 import b64encode
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from hf_taskvec._version import __version__
from hf_taskvec.escaping import visible
from hf_taskvec.evaluation.reporting.notebook_table import report_html
from hf_taskvec.evaluation.reporting.tables import verdict
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.reporting.verdict_tables import OVERALL

_CLASSES = {"as_if_never_seen": "good", "still_known": "bad", "over_forgotten": "bad", "cannot_tell": "open"}


@cache
def _file(name: str) -> str:
    return (files(__package__) / "page" / name).read_text("utf-8")


def report_page(report: UnlearningReport, audit: dict[str, Any] | None = None) -> str:
    """The page.

    Args:
        report (`UnlearningReport`):
            The report.
        audit (`dict[str, Any]`, *optional*):
            What an audit of the same model found: its `sentence`, and a table as `heads` and `rows` of plain texts.

    Returns:
        `str`: HTML that needs no other file.
    """
    judged = None if report.choice is None else report.choice.verdict
    outcome, kind = "No book to forget", "open"
    if judged is not None:
        outcome = OVERALL[judged.outcome].capitalize()
        kind = _CLASSES[judged.outcome]
        if judged.outcome == "as_if_never_seen" and judged.kept != "kept":
            lost = judged.kept == "lost"
            kind = "bad" if lost else "open"
            outcome += ", but kept books are lost" if lost else "; whether the others are kept is not sure"
    books = " · ".join(f"{book.name} ({book.role})" for book in report.books)
    script = _file("page.js")
    digest = b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    # `</script>` and `<!--` would end the block that holds the data.
    data = json.dumps({"report": report.to_dict(), "audit": audit}, ensure_ascii=False, allow_nan=False)
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    named = next((book.name for book in report.books if book.role == "forget"), "report")
    parts = {
        "title": escape(visible(f"Unlearning report: {named}")),
        "books": escape(visible(books)),
        "outcome": escape(outcome),
        "outcome_class": kind,
        "sentence": escape(visible(verdict(report))),
        "table": report_html(report),
        "version": escape(__version__),
        "style": _file("page.css"),
        "script_hash": f"sha256-{digest}",
        "script": script,
        "data": data,
    }
    page = _file("page.html")
    found = page.split("@")  # text, name, text, name, …, text: a value that holds the sign stays as it is
    return "".join(parts[part] if number % 2 else part for number, part in enumerate(found))
