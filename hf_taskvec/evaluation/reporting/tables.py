"""The report as Markdown, laid out as the main paper's tables 3–5: λ across, books down, drops bracketed."""

from collections.abc import Mapping, Sequence

from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.escaping import markdown, markdown_cell, markdown_code
from hf_taskvec.evaluation.reporting.number_formats import (
    format_interval,
    format_number,
    format_share,
)
from hf_taskvec.evaluation.reporting.report_parts import UNNAMED, ReferenceScore, Score
from hf_taskvec.evaluation.reporting.theory_verdict import Theory
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.reporting.verdict_tables import (
    candidates_table,
    criteria_words,
    markdown_table,
    never_seen_words,
    retained_table,
    verdict_table,
)
from hf_taskvec.evaluation.scoring.drop_tests import LossTest
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.texts.books import Split

_SPLITS: dict[Split, str] = {"seen": "seen passages", "held_out": "held-out passages"}
_HEALTH = ("perplexity", "repetition", "distinct_2", "empty")


def report_markdown(report: UnlearningReport) -> str:
    """`report.md`: the choice of λ in words, all tables, the tests and the definitions."""
    books = ", ".join(f"{markdown(b.name)} ({b.role}; {b.seen} seen, {b.held_out} held out)" for b in report.books)
    parts = [
        "# Unlearning report",
        f"Protocol {markdown_code(report.protocol.id)} · model {markdown_code(report.model[:12])} · "
        f"edit {markdown_code(report.edit[:40])}\n\n"
        f"Books: {books}.\n\nSquare brackets: {report.settings.level:.0%} bootstrap intervals over passages. "
        "Round brackets: change against the untouched model on the same passages.",
        *([_edits(report)] if report.edits else []),
        _choice(report),
        *([_theory(report.theory)] if report.theory is not None else []),
        *([f"## Controls\n\n{report.controls.to_markdown()}"] if report.controls is not None else []),
    ]
    for split, words in _SPLITS.items():
        if any(score.split == split for score in report.scores):
            parts.append(f"## Rouge-L, {words}\n\n{_both_tables(report, 'rouge_l', split)}")
    if report.tests:
        parts.append(_tests(report))
    parts.append("## Health\n\nTells forgetting from breaking; on all seen passages.")
    measured = {info.name for info in report.metrics}
    health = [name for name in _HEALTH if name in measured]
    parts += [f"### {report.metric(name).title}\n\n{_both_tables(report, name)}" for name in health]
    parts.append("## Memory, further measures (seen passages)")
    shown = ("rouge_l", "perplexity")
    further = [m for m in report.metrics if m.kind == "memory" and m.name not in shown]
    parts += [f"### {m.title or m.name}\n\n{_both_tables(report, m.name)}" for m in further]
    if report.membership:
        parts.append(_membership(report))
    if report.utility:
        parts.append(_utility(report))
    parts += [_leaks(report), _definitions(report)]
    return "\n\n".join(parts) + "\n"


def _both_tables(report: UnlearningReport, metric: str, split: Split = "seen") -> str:
    """One number a cell; then, folded, the same with intervals and changes."""
    rows = {b.name: _cells(report, b.name, metric, split, plain=True) for b in report.books}
    plain = _table(_heads(report), rows, turned=bool(report.edits))
    whole = score_table(report, metric, split)
    return f"{plain}\n\n<details><summary>With intervals and changes</summary>\n\n{whole}\n\n</details>"


def score_table(report: UnlearningReport, metric: str = "rouge_l", split: Split = "seen") -> str:
    """One metric: λ across (and the reference models, if any), books down; of named edits, which are long, across."""
    rows = {b.name: _cells(report, b.name, metric, split) for b in report.books}
    return _table(_heads(report), rows, turned=bool(report.edits))


def compare_reports(reports: Mapping[str, UnlearningReport], metric: str = "rouge_l", split: Split = "seen") -> str:
    """One Markdown table of several reports, each under its name.

    Args:
        reports (`Mapping[str, UnlearningReport]`):
            The reports by the names that the table shall show.
        metric (`str`, *optional*, defaults to `"rouge_l"`):
            What is compared.
        split (`"seen"` or `"held_out"`, *optional*, defaults to `"seen"`):
            Of which passages.

    Returns:
        `str`: λ and the reference models across, the books of all reports down.

    Raises:
        `MismatchError`: If their protocols differ: such numbers do not belong side by side.
        `BadValueError`: If there are no reports.
        `MissingNameError`: If there is no such metric.
    """
    if not reports:
        raise BadValueError("no reports to compare")
    (first, base), *rest = reports.items()
    base.metric(metric)
    for name, report in rest:
        if (report.protocol.name, report.protocol.hash) != (base.protocol.name, base.protocol.hash):
            raise MismatchError(
                f"{first!r} was measured under protocol {base.protocol.id}, {name!r} under "
                f"{report.protocol.id}: their scores are not comparable. Run both under one protocol"
            )
    edits = sorted({(abs(s), s, r.names.head(s)) for r in reports.values() for s in r.scales})
    references = [reference_head(info.name) for r in reports.values() for info in r.references]
    rows = {
        f"{name}: {book.name}": _cells(report, book.name, metric, split)
        for name, report in reports.items()
        for book in report.books
    }
    title = f"{base.metric(metric).title or metric}, {_SPLITS[split]}, protocol {markdown_code(base.protocol.id)}"
    columns = list(dict.fromkeys([*(name for _, _, name in edits), *references]))
    turned = any(report.edits for report in reports.values())
    return f"{title}\n\n{_table(columns, rows, turned=turned)}\n"


def reference_head(name: str) -> str:
    """A reference model as a column's head."""
    return name if name == UNNAMED else f"reference: {name}"


def verdict(report: UnlearningReport) -> str:
    """The chosen λ and why, or why there is none, in a sentence."""
    if report.choice is None:
        return f"No book is marked as one to forget, so no {report.names.noun} is chosen."
    reason = report.choice.reason
    return f"{reason[0].upper()}{reason[1:]}." if reason[0] != "λ" else f"{reason}."


def _heads(report: UnlearningReport) -> list[str]:
    """λ or the edits, then the reference models."""
    return [*map(report.names.head, report.scales), *(reference_head(info.name) for info in report.references)]


def _table(
    columns: Sequence[str], rows: Mapping[str, Mapping[str, str]], corner: str = "book", turned: bool = False
) -> str:
    if turned:
        there = {column: {name: cells[column] for name, cells in rows.items() if column in cells} for column in columns}
        return _table(list(rows), there, "edit")
    head = f"| {corner} | " + " | ".join(markdown_cell(column) for column in columns) + " |"
    rule = "|---|" + "---|" * len(columns)
    body = [
        f"| {markdown_cell(name)} | " + " | ".join(cells.get(column, "–") for column in columns) + " |"
        for name, cells in rows.items()
    ]
    return "\n".join([head, rule, *body])


def _cells(report: UnlearningReport, book: str, metric: str, split: Split, plain: bool = False) -> dict[str, str]:
    wanted = (book, metric, split)
    cells, info = {}, report.metric(metric)

    def shown(score: Score | ReferenceScore) -> str:
        return format_number(score.value.value, min(info.digits, 3)) if plain else _cell(score, info)

    for score in report.scores:
        if (score.book, score.metric, score.split) == wanted:
            cells[report.names.head(score.scale)] = shown(score)
    for other in report.reference_scores:
        if (other.book, other.metric, other.split) == wanted:
            cells[reference_head(other.reference)] = shown(other)
    return cells


def _cell(score: Score | ReferenceScore, metric: MetricInfo) -> str:
    text = format_interval(score.value, metric.digits)
    if score.relative is not None:
        text += f"<br>({format_share(score.relative)})"
    elif score.difference is not None and score.difference != Interval(0, 0, 0):
        text += f"<br>({format_interval(score.difference, metric.digits, sign=True)})"
    return text


def _edits(report: UnlearningReport) -> str:
    rows = [[e.name, markdown_code(e.expression), f"{e.distance:.4g}"] for e in report.edits]
    note = "The gentlest first: by how far they move the weights (the norm of the change)."
    return f"## The edits\n\n{note}\n\n{markdown_table(['edit', 'expression', 'distance'], rows)}"


def _choice(report: UnlearningReport) -> str:
    choice = report.choice
    lines = ["## The verdict", markdown(verdict(report))]
    if choice is None:
        return "\n\n".join(lines)
    if choice.verdict is not None and choice.judged is not None:
        which = "the chosen" if choice.scale is not None else "the nearest"
        name = markdown(report.names.head(choice.judged))
        lines.append(f"{name}, {which}, on the half of the passages that did not choose it:")
        lines.append(verdict_table(choice.verdict, report.metric))
        if choice.verdict.retained:
            lines.append(retained_table(choice.verdict, report.metric))
    lines.append(f"{criteria_words(choice.criteria)} {never_seen_words(choice.never_seen)}")
    if choice.candidates:
        noun, names = report.names.noun, report.names
        table = candidates_table(choice.candidates, choice.criteria, names)
        lines += [f"### The choice of {'the edit' if report.edits else noun}", "On the other half:", table]
        lines.append(f"Pareto front: {noun} ∈ {{{', '.join(markdown(names.short(s)) for s in choice.pareto)}}}.")
    return "\n\n".join(lines)


def _theory(theory: Theory) -> str:
    pairs = "\n".join(f"- {markdown(line)}" for line in theory.correlations)
    head = "## What theory said\n\nTask correlation α̂, eq. (11) of Li et al. 2025, before anything was edited:"
    return "\n\n".join([head, pairs, *map(markdown, theory.verdicts)])


def _membership(report: UnlearningReport) -> str:
    rows: dict[str, dict[str, str]] = {}
    for found in report.membership:
        text = format_interval(found.auc, 3)
        if found.priv_leak is not None:
            text += f"<br>(PrivLeak {format_number(found.priv_leak, 1, sign=True)})"
        rows.setdefault(found.book, {})[report.names.head(found.scale)] = text
    for other in report.reference_membership:
        rows.setdefault(other.book, {})[reference_head(other.reference)] = format_interval(other.auc, 3)
    note = (
        "AUC of Min-K %: how well seen passages are told from unseen ones; 0.5 is chance. PrivLeak (percent) compares "
        "it with the first reference's, or with chance: below 0 the book is still known, above 0 conspicuously avoided."
    )
    return f"## Membership\n\n{note}\n\n{_table(_heads(report), rows, turned=bool(report.edits))}"


def _utility(report: UnlearningReport) -> str:
    note = (
        "Abilities that no book measures. Square brackets: bootstrap intervals over documents, where a score is the "
        "mean of theirs. Round brackets: the difference from the untouched model on the same documents."
    )
    return f"## Utility\n\n{note}\n\n{utility_table(report)}"


def utility_table(report: UnlearningReport) -> str:
    """Abilities that no book measures: λ across (and the reference models, if any), scores down."""
    rows: dict[str, dict[str, str]] = {}
    for found in report.utility:
        head = report.names.head(found.scale) if found.scale is not None else reference_head(found.reference or "")
        text = format_interval(found.value, 3)
        if found.scale != 0:
            text += f"<br>({format_interval(found.difference, 3, sign=True)})"
        rows.setdefault(found.metric, {})[head] = text
    return _table(_heads(report), rows, "task", turned=bool(report.edits))


def _tests(report: UnlearningReport) -> str:
    metric = report.metric(report.tests[0].metric)
    rows: dict[str, dict[str, str]] = {}
    for test in report.tests:
        rows.setdefault(f"{test.first} > {test.second}", {})[report.names.head(test.scale)] = _test(test, metric)
    what, unit = f"lost a larger share of its {metric.name}", "the difference in percentage points"
    if metric.geometric:
        what, unit = f"grew its {metric.name} by a larger factor", "the difference of the logarithms"
    elif metric.nats:
        what, unit = f"lost more by its {metric.name}", "the difference in nats"
    note = (
        f"Has the first book {what} than the second? In each cell {unit}, with its interval, and the p-value of the "
        "one-sided permutation test; on all seen passages."
    )
    edits = [report.names.head(scale) for scale in report.scales[1:]]
    parts = ["## Which book lost more?", note, _table(edits, rows, "books", turned=bool(report.edits))]
    choice = report.choice
    if choice is not None and choice.tests:
        lines = [f"- {markdown(f'{t.first} > {t.second}')}: {_test(t, metric, ', ')}" for t in choice.tests]
        name = markdown(report.names.head(choice.tests[0].scale))
        parts.append(f"At {name}, on the half that did not choose it:")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _test(test: LossTest, metric: MetricInfo, between: str = "<br>") -> str:
    d = test.difference
    if metric.geometric or metric.nats:
        text = format_interval(d, 3, sign=True)
    else:
        text = format_interval(Interval(100 * d.value, 100 * d.low, 100 * d.high), 1, sign=True)
    return text + between + ("p < 0.001" if test.p_value < 0.001 else f"p = {test.p_value:.3f}")


def _leaks(report: UnlearningReport) -> str:
    leaks = report.leaks
    if leaks.clean:
        text = f"No answer of {leaks.checked} stands in a prompt, no held-out answer in the training text"
    else:
        text = (
            f"By the protocol's design, {len(leaks.in_prompts)} of {leaks.checked} answers stand in a prompt "
            f"and {len(leaks.in_training)} held-out ones in the training text"
        )
    out = f"; {report.left_out} passages were left out for leaking between books" if report.left_out else ""
    return f"## Leaks\n\n{text} (runs of {leaks.run} words){out}."


def _definitions(report: UnlearningReport) -> str:
    rows = [
        f"- {markdown_code(m.name)} ({m.kind}; {'higher' if m.higher else 'lower'} means "
        f"{'better remembered' if m.kind == 'memory' else 'healthier'}): {markdown(m.definition)}."
        for m in report.metrics
    ]
    return "## Definitions\n\n" + "\n".join(rows)
