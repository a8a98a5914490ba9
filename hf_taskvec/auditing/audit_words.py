"""An audit in words and tables: one page that a sceptical reader understands."""

from collections.abc import Callable, Sequence

from hf_taskvec.auditing.audit_parts import AttackPoint, Finding, InsideFinding, MembershipFinding
from hf_taskvec.auditing.audit_report import AuditReport
from hf_taskvec.escaping import markdown, markdown_code
from hf_taskvec.evaluation.reporting.number_formats import format_interval, format_number
from hf_taskvec.evaluation.reporting.verdict_tables import (
    OUTCOMES,
    OVERALL,
    criteria_words,
    markdown_table,
    retained_table,
    verdict_table,
)
from hf_taskvec.evaluation.scoring.metrics import METRICS
from hf_taskvec.evaluation.scoring.statistics import Interval

_GROUPS = {
    "relearn": "Relearning",
    "quantise": "Quantising",
    "sample": "Sampling",
    "prompt": "Other prompts",
}
_TESTS = {
    "loss": "loss",
    "zlib": "loss by zlib's length",
    "min_k": "Min-K %",
    "min_k_plus_plus": "Min-K %++",
    "reference": "loss against the reference's",
}


def audit_sentence(report: AuditReport) -> str:
    """What was tried and what came back, in a few sentences."""
    text = f"Before any attack, {report.plain.verdict.sentence}."
    lost = dict.fromkeys(loss.book for loss in report.plain.verdict.retained if loss.outcome == "lost")
    if lost:
        text += f" But books to keep are surely lost with it, beyond the bound: {', '.join(lost)}."
    tried, back = len(report.findings), [finding.attack for finding in report.came_back]
    unsure = [f.attack for f in report.findings if f.last.verdict.outcome == "cannot_tell"]
    if tried:
        text += f" Attacks tried: {tried}; "
        text += f"under {len(back)} it is surely known: {', '.join(back)}." if back else "none surely brought it back."
        if unsure:
            text += f" {len(unsure)} cannot be told: {', '.join(unsure)}."
    known = [_TESTS.get(found.test, found.test) for found in report.membership if found.outcome == "known"]
    if known:
        text += f" Membership tests still tell its passages from unseen ones: {', '.join(dict.fromkeys(known))}."
    avoided = [_TESTS.get(found.test, found.test) for found in report.membership if found.outcome == "overdone"]
    if avoided:
        text += f" By membership tests its passages are conspicuously avoided: {', '.join(dict.fromkeys(avoided))}."
    if report.inside is not None and report.inside.depth is not None:
        text += f" Unlearning depth {format_interval(report.inside.depth, 2)} (0 untouched, 1 never seen)."
    if report.not_tried:
        text += f" Not tried: {', '.join(report.not_tried)}."
    return text


def audit_markdown(report: AuditReport) -> str:
    """`audit.md`."""
    books = ", ".join(f"{markdown(b.name)} ({b.role}; {b.seen} seen, {b.held_out} held out)" for b in report.books)
    parts = [
        "# Audit",
        markdown(report.sentence),
        f"Protocol {markdown_code(report.protocol.id)} · untouched {markdown_code(report.untouched[:12])} · edited "
        f"{markdown_code(report.edited[:12])} · reference {markdown_code(report.reference[:12])}\n\nBooks, and "
        f"how many passages of them were asked: {books}.",
        "Every attack is made on three models with the same seeds and budget. R tells where the attacked edited model "
        "stands between the attacked untouched model (0) and the attacked reference, which never saw the book (1). "
        f"Square brackets: {report.settings.level:.0%} bootstrap intervals over passages. "
        f"{markdown(criteria_words(report.criteria))}",
        _reference(report),
        f"## Before any attack\n\n{verdict_table(report.plain.verdict, METRICS.__getitem__)}",
        *([retained_table(report.plain.verdict, METRICS.__getitem__)] if report.plain.verdict.retained else []),
        f"## What came back\n\n{_overview(report)}",
    ]
    added = dict.fromkeys(finding.group for finding in report.findings if finding.group not in _GROUPS)
    for group, title in (_GROUPS | {name: markdown(name) for name in added}).items():
        found = [finding for finding in report.findings if finding.group == group]
        if found:
            parts.append(f"## {title}\n\n" + "\n\n".join(_finding(each) for each in found))
    if report.inside is not None:
        parts.append(_inside(report.inside))
    if report.membership:
        parts.append(_membership(report.membership))
    if report.not_tried:
        rows = [f"- {markdown(name)}: {markdown(reason)}" for name, reason in report.not_tried.items()]
        parts.append("## What could not be tried\n\n" + "\n".join(rows))
    parts.append(_limits(report))
    return "\n\n".join(parts) + "\n"


def _reference(report: AuditReport) -> str:
    if not report.reference_auc:
        return "Whether the reference knows the book could not be checked: too little text like it is given."
    told = [f"{markdown(book)} {format_interval(auc, 2)}" for book, auc in report.reference_auc.items()]
    return (
        "The reference does not know the book: it tells seen from unseen passages with an AUC of "
        f"{', '.join(told)} (0.5 is chance)."
    )


def overview_rows(report: AuditReport, shown: Callable[[Interval], str]) -> list[list[str]]:
    """Each attack in one row: its name, R by each judged metric, and what that says.

    Args:
        report (`AuditReport`):
            What was tried.
        shown (`Callable`):
            R as a text. Of several books to forget it is the one that is known best.

    Returns:
        `list[list[str]]`: Plain texts, in the order of the findings.
    """
    rows = []
    for finding in report.findings:
        verdict = finding.last.verdict
        cells = []
        for name in report.criteria.judged:
            found = [m.relative for m in verdict.metrics if m.metric == name and m.relative is not None]
            cells.append(shown(min(found, key=lambda each: each.value)) if found else "–")
        rows.append([finding.attack, *cells, OVERALL[verdict.outcome]])
    return rows


def _overview(report: AuditReport) -> str:
    rows = overview_rows(report, lambda relative: format_interval(relative, 2))
    known = OVERALL["still_known"]
    rows = [[*cells, f"**{says}**" if says == known else says] for *cells, says in rows]
    return markdown_table(["attack", *(f"R, {name}" for name in report.criteria.judged), "says"], rows)


def _finding(finding: Finding) -> str:
    left = f"; {finding.left_out} passages could not be asked so" if finding.left_out else ""
    head = f"### {markdown(finding.attack)}\n\n{markdown(finding.words)} ({finding.last.passages} passages{left})."
    parts = [head, _scores(finding)]
    if finding.robustness:
        told = [f"{r.metric} {r.one_sided:.2f} and {r.symmetric:.2f}" for r in finding.robustness]
        forms = "min(Δ_reference/Δ_edited, 1) and 1 − |Δ_edited − Δ_reference|/(|Δ_edited| + |Δ_reference|)"
        if finding.group == "quantise":
            forms = "min(after/before, 1) and 1 − |after − before|/(after + before)"
        parts.append(f"Robustness, one-sided and symmetric, {forms}: {'; '.join(told)}.")
    return "\n\n".join(parts)


def _scores(finding: Finding) -> str:
    unit = {"relearn": "steps", "sample": "samples"}.get(finding.group)
    shown = [m.metric for m in finding.last.verdict.metrics]
    heads = [*([unit] if unit else []), "metric", "untouched", "edited", "reference", "edited − reference", "R"]
    rows = []
    for point in finding.points:
        rows += _point_rows(point, list(dict.fromkeys(shown)), unit is not None)
    return markdown_table(heads, rows)


def _point_rows(point: AttackPoint, metrics: Sequence[str], counted: bool) -> list[list[str]]:
    rows = []
    for name in metrics:
        result = next(r for r in point.results if r.metric == name)
        digits = METRICS[name].digits
        relative = [m.relative for m in point.verdict.metrics if m.metric == name and m.relative is not None]
        cells = [format_interval(getattr(result, which), digits) for which in ("untouched", "edited", "reference")]
        cells.append(format_interval(result.difference, digits, sign=True))
        cells.append(", ".join(format_interval(each, 2) for each in relative) or "–")
        title = METRICS[name].title
        rows.append([str(point.step), title, *cells] if counted else [title, *cells])
    return rows


def _inside(inside: InsideFinding) -> str:
    parts = ["## Looking inside"]
    if inside.depth is not None:
        parts.append(
            f"Unlearning depth (the variant of UDS for books) {format_interval(inside.depth, 3)}: 0 if the untouched "
            "model can still read the book off the edited model's hidden states, 1 if it can read no more than off "
            "those of the reference. Checked: the untouched model itself has "
            f"{format_number(inside.depth_untouched or 0.0, 3)}, the reference "
            f"{format_number(inside.depth_reference or 0.0, 3)}."
        )
    elif inside.depth_reason:
        parts.append(f"No unlearning depth: {markdown(inside.depth_reason)}")
    rows = []
    for view in inside.lens:
        drops = ["–", "–"]
        if 0 < view.layer <= len(inside.reference_drops):
            drops = [
                format_number(inside.reference_drops[view.layer - 1], 3),
                format_number(inside.edited_drops[view.layer - 1], 3),
            ]
        cells = [format_interval(getattr(view, which), 3) for which in ("untouched", "edited", "reference")]
        rows.append([f"{view.layer}" if view.layer else "embedding", *cells, *drops])
    heads = ["layer", "untouched", "edited", "reference", "reference's states cost", "edited model's states cost"]
    note = (
        "Logit lens: the mean log-probability of a true token, read off after each layer; then what the states of the "
        "other two cost the untouched model there, in nats a token."
    )
    return "\n\n".join([*parts, note, markdown_table(heads, rows)])


def _membership(found: Sequence[MembershipFinding]) -> str:
    rows = []
    several = len({each.book for each in found}) > 1
    for each in found:
        name = _TESTS.get(each.test, each.test) + (f", {each.book}" if several else "")
        cells = [format_interval(getattr(each, which), 3) for which in ("untouched", "edited", "reference")]
        leak = "–" if each.priv_leak is None else format_number(each.priv_leak, 1, sign=True)
        rows.append([name, *cells, format_interval(each.difference, 3, sign=True), leak, OUTCOMES[each.outcome]])
    heads = ["test", "untouched", "edited", "reference", "edited − reference", "PrivLeak", "says"]
    note = "AUC: how well each score tells seen passages from unseen ones; 0.5 is chance."
    return f"## Membership tests\n\n{note}\n\n{markdown_table(heads, rows)}"


def _limits(report: AuditReport) -> str:
    settings = report.settings
    return (
        "## What this does not show\n\n"
        "That an attack brought nothing back does not show that none can. The attacks had this budget: "
        f"{settings.epochs} epoch(s) of relearning at {settings.learning_rate:g} (LoRA "
        f"{settings.lora_learning_rate:g}), {settings.samples} samples, at most {settings.passages} passages of a "
        "book. The verdict is on passages that were asked, not on all that the book says."
    )
