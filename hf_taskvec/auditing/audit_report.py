"""The result of an audit, as a value: what was tried, what came back, what could not be tried.

`audit.json` is this dataclass, field for field (`AUDIT_SCHEMA`, version `AUDIT_VERSION`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.atomic import write_text
from hf_taskvec.auditing.audit_parts import (
    AttackPoint,
    AuditSettings,
    Finding,
    InsideFinding,
    MembershipFinding,
)
from hf_taskvec.errors import BadValueError, CorruptFileError
from hf_taskvec.evaluation.reporting.number_formats import format_number
from hf_taskvec.evaluation.reporting.report_files import ReportFormat, load_report, report_to_dict, save_report
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.metrics import METRICS
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.texts.books import Role
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.filenames import AUDIT_JSON, AUDIT_MARKDOWN, REPORT_JSON, REPORT_PAGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AUDIT_SCHEMA = "hf_taskvec/audit"
AUDIT_VERSION = 1

_FORMAT = ReportFormat(AUDIT_SCHEMA, AUDIT_VERSION, AUDIT_JSON, AUDIT_MARKDOWN, noun="audit", maker="audit")


@dataclass(frozen=True)
class AuditedBook:
    """A book of the audit, and how many passages of it were asked."""

    name: str
    role: Role
    fingerprint: str
    seen: int
    held_out: int


@dataclass(frozen=True)
class AuditReport:
    """Whether a book is really forgotten, under attack.

    Made by `audit`, read back by `AuditReport.load`. Its fields are those of `audit.json`.

    Args:
        protocol (`Protocol`):
            How the models were asked.
        criteria (`Criteria`):
            What forgotten means.
        untouched, edited, reference (`str`):
            The fingerprints of the three models.
        reference_auc (`dict[str, Interval]`):
            For each book with unseen text, how well the reference tells its passages from unseen ones: near 0.5, or it
            has seen the book.
        books (`tuple` of `AuditedBook`):
            What was asked.
        plain (`AttackPoint`):
            The three models before any attack.
        findings (`tuple` of `Finding`):
            What came of each attack.
        inside (`InsideFinding`, *optional*):
            What the inner layers know, if that was looked at.
        membership (`tuple` of `MembershipFinding`):
            The membership tests, if they were made.
        not_tried (`dict[str, str]`):
            The attacks that could not be made, and why.
        settings (`AuditSettings`):
            Seeds and budgets.
        versions (`dict[str, str]`):
            Those of Python and the libraries.
        seconds (`dict[str, float]`):
            How long each part took: the only part that differs between equal runs.

    Example:
        >>> report = audit(model, -0.6 * vector, books, reference=retrained, output="out/")  # doctest: +SKIP
        >>> print(report.sentence)  # doctest: +SKIP
        >>> [finding.attack for finding in report.came_back]  # doctest: +SKIP

    """

    protocol: Protocol
    criteria: Criteria
    untouched: str
    edited: str
    reference: str
    reference_auc: dict[str, Interval]
    books: tuple[AuditedBook, ...]
    plain: AttackPoint
    findings: tuple[Finding, ...]
    inside: InsideFinding | None
    membership: tuple[MembershipFinding, ...]
    not_tried: dict[str, str]
    settings: AuditSettings
    versions: dict[str, str]
    seconds: dict[str, float]

    @property
    def came_back(self) -> tuple[Finding, ...]:
        """The attacks under which the book is surely known better than by the attacked reference."""
        return tuple(f for f in self.findings if f.last.verdict.outcome == "still_known")

    @property
    def passed(self) -> bool:
        """Whether the book is as if never seen, no other surely lost, and no attack surely brought it back.

        Nor may a membership test surely tell its passages from unseen ones, as known or as conspicuously avoided.
        """
        told_apart = any(found.outcome in ("known", "overdone") for found in self.membership)
        plain = self.plain.verdict
        forgotten = plain.outcome == "as_if_never_seen" and plain.kept != "lost"
        return forgotten and not self.came_back and not told_apart

    @property
    def sentence(self) -> str:
        """What the audit found, in a sentence or two."""
        from hf_taskvec.auditing.audit_words import audit_sentence

        return audit_sentence(self)

    def finding(self, attack: str) -> Finding:
        """What came of one attack.

        Args:
            attack (`str`):
                Its name.

        Returns:
            `Finding`: Its points, verdicts and robustness.

        Raises:
            `BadValueError`: If it was not tried; the message says why, if a reason is known.
        """
        for found in self.findings:
            if found.attack == attack:
                return found
        why = f": {self.not_tried[attack]}" if attack in self.not_tried else ""
        known = ", ".join(found.attack for found in self.findings)
        raise BadValueError(f"the attack {attack!r} was not tried{why}. Tried were {known or 'none'}")

    def to_dict(self) -> dict[str, Any]:
        """The report as `audit.json` holds it.

        Returns:
            `dict[str, Any]`: Numbers, strings, lists and dictionaries only.
        """
        return report_to_dict(self, _FORMAT)

    def to_markdown(self) -> str:
        """The text of `audit.md`: one page for a sceptical reader.

        Returns:
            `str`: Markdown.
        """
        from hf_taskvec.auditing.audit_words import audit_markdown

        return audit_markdown(self)

    def figures(self) -> "dict[str, Figure]":
        """The plots: `audit-attacks` (R under every attack), `audit-relearning` (curves), `audit-inside` (layers).

        Returns:
            `dict[str, matplotlib.figure.Figure]`: Those for which something was tried.

        Raises:
            `UnsupportedError`: If matplotlib is not installed.
        """
        from hf_taskvec.auditing.audit_plots import audit_figures

        return audit_figures(self)

    def save(self, output: str | Path, *, plots: bool = True) -> Path:
        """Write `audit.json`, `audit.md` and the plots as PNG and SVG; each appears when it is complete.

        Where the report of a sweep of the same model lies in the folder, its `report.html` shows the audit, too.

        Args:
            output (`str` or `Path`):
                The folder; made if it does not exist.
            plots (`bool`, *optional*, defaults to `True`):
                Also draw the plots, which need matplotlib.

        Returns:
            `Path`: The folder that was written.

        Raises:
            `OutputError`: If the folder cannot be written.
            `UnsupportedError`: If there is no matplotlib to draw the plots.
        """
        output = save_report(self, _FORMAT, output, self.figures if plots else None)
        if (output / REPORT_JSON).is_file():
            report = UnlearningReport.load(output)
            if report.model == self.untouched:
                write_text(output / REPORT_PAGE, report.to_html(self.overview()))
        return output

    def overview(self) -> dict[str, Any]:
        """What each attack brought back, as texts.

        Returns:
            `dict[str, Any]`: The `sentence`, and a table of R by attack and metric: `heads` and `rows`.
        """
        from hf_taskvec.auditing.audit_words import overview_rows

        heads = ["attack", *(f"R, {METRICS[name].title or name}" for name in self.criteria.judged), "says"]
        rows = overview_rows(self, lambda relative: format_number(relative.value, 2))
        return {"sentence": self.sentence, "heads": heads, "rows": rows}

    @classmethod
    def load(cls, path: str | Path) -> "AuditReport":
        """The report that `save` wrote.

        Args:
            path (`str` or `Path`):
                An `audit.json`, or the folder that holds it.

        Returns:
            `AuditReport`: Equal to the one that was saved.

        Raises:
            `MissingFileError`: If there is none.
            `CorruptFileError`: If it is damaged, or of another version.
        """
        return load_report(cls, _FORMAT, path, _check)


def _check(report: AuditReport) -> None:
    """Refuse what is of the right types and yet could not be shown."""
    groups = [(report.plain,), *(finding.points for finding in report.findings)]
    if not all(groups):
        raise CorruptFileError("an attack has no points.")
    named = {*report.criteria.metrics, *(r.metric for finding in report.findings for r in finding.robustness)}
    for points in groups:
        judged = {each.metric for each in points[-1].verdict.metrics}
        named |= judged | {each.metric for each in points[-1].verdict.retained}
        for point in points:
            if lacking := judged - {each.metric for each in point.results}:
                raise CorruptFileError(f"an attack is judged by {min(lacking)[:60]!r}, which has no result.")
    if unknown := named - METRICS.keys():
        raise CorruptFileError(f"there is no metric {min(unknown)[:60]!r}.")
    if report.inside is not None and len(report.inside.reference_drops) != len(report.inside.edited_drops):
        raise CorruptFileError("the layers that cost the untouched model something differ.")
