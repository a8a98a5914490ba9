"""The report as Markdown, laid out as the main paper's tables 3–5: λ across, books down, drops bracketed."""

from collections.abc import Mapping, Sequence

from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.evaluation.books import Split
from hf_taskvec.evaluation.losses import LossTest
from hf_taskvec.evaluation.metrics import METRICS, Metric
from hf_taskvec.evaluation.report import Score, UnlearningReport

_SPLITS: dict[Split, str] = {"seen": "seen passages", "held_out": "held-out passages"}
_TITLES = {
    "rouge_l": "Rouge-L (F1)",
    "rouge_l_precision": "Rouge-L precision",
    "rouge_l_recall": "Rouge-L recall",
    "perplexity": "Perplexity of the true continuation",
    "repetition": "Repeated 4-grams",
    "distinct_2": "Distinct bigrams",
    "empty": "Empty outputs",
    "longest_run": "Longest verbatim run (words)",
    "extraction_strength": "Extraction strength",
    "exact_memorisation": "Exact memorisation",
    "min_k": "Min-K % (log-probability)",
}
_HEALTH = ("perplexity", "repetition", "distinct_2", "empty")


def markdown(report: UnlearningReport) -> str:
    """All tables of one report, with the choice of λ and the tests in words."""
    books = ", ".join(f"{b.name} ({b.role}; {b.seen} seen, {b.held_out} held out)" for b in report.books)
    parts = [
        "# Unlearning report",
        f"Protocol `{report.protocol.id}` · model `{report.model[:12]}` · edit `{report.edit[:40]}`\n\n"
        f"Books: {books}.\n\nSquare brackets: {report.settings.level:.0%} bootstrap intervals over passages. "
        "Round brackets: change against λ=0 on the same passages.",
        _choice(report),
    ]
    for split, words in _SPLITS.items():
        if any(score.split == split for score in report.scores):
            parts.append(f"## Rouge-L, {words}\n\n{score_table(report, 'rouge_l', split)}")
    if report.tests:
        parts.append(_tests(report))
    parts.append("## Health\n\nTells forgetting from breaking; on all seen passages.")
    measured = {info.name for info in report.metrics}
    health = [name for name in _HEALTH if name in measured]
    parts += [f"### {_TITLES[name]}\n\n{score_table(report, name, 'seen')}" for name in health]
    parts.append("## Memory, further measures (seen passages)")
    shown = ("rouge_l", "perplexity")
    further = [m for m in report.metrics if m.kind == "memory" and m.name not in shown]
    parts += [f"### {_TITLES[m.name]}\n\n{score_table(report, m.name, 'seen')}" for m in further]
    if report.membership:
        parts.append(_membership(report))
    parts += [_leaks(report), _definitions(report)]
    return "\n\n".join(parts) + "\n"


def score_table(report: UnlearningReport, metric: str = "rouge_l", split: Split = "seen") -> str:
    """One metric: λ across, books down."""
    return _table(report.scales, {b.name: _cells(report, b.name, metric, split) for b in report.books})


def compare(reports: Mapping[str, UnlearningReport], metric: str = "rouge_l", split: Split = "seen") -> str:
    """One Markdown table of several reports, each under its name.

    Raises `MismatchError` if their protocols differ: such numbers do not belong side by side.
    """
    if not reports:
        raise BadValueError("no reports to compare")
    (first, base), *rest = reports.items()
    for name, report in rest:
        if (report.protocol.name, report.protocol.hash) != (base.protocol.name, base.protocol.hash):
            raise MismatchError(
                f"{first!r} was measured under protocol {base.protocol.id}, {name!r} under "
                f"{report.protocol.id}: "
                "their scores are not comparable. Run both under one protocol"
            )
    scales = sorted({s for r in reports.values() for s in r.scales}, key=lambda scale: (abs(scale), scale))
    rows = {
        f"{name}: {book.name}": _cells(report, book.name, metric, split)
        for name, report in reports.items()
        for book in report.books
    }
    title = f"{_TITLES[metric]}, {_SPLITS[split]}, protocol `{base.protocol.id}`"
    return f"{title}\n\n{_table(scales, rows)}\n"


def _table(scales: Sequence[float], rows: Mapping[str, Mapping[float, str]]) -> str:
    head = "| book | " + " | ".join(f"λ = {_number(scale)}" for scale in scales) + " |"
    rule = "|---|" + "---|" * len(scales)
    body = [
        f"| {name} | " + " | ".join(cells.get(scale, "–") for scale in scales) + " |" for name, cells in rows.items()
    ]
    return "\n".join([head, rule, *body])


def _cells(report: UnlearningReport, book: str, metric: str, split: Split) -> dict[float, str]:
    found = [s for s in report.scores if (s.book, s.metric, s.split) == (book, metric, split)]
    return {score.scale: _cell(score, METRICS[metric]) for score in found}


def _cell(score: Score, metric: Metric) -> str:
    d = metric.digits
    v = score.value
    text = f"{_number(v.value, d)} [{_number(v.low, d)}, {_number(v.high, d)}]"
    if score.relative is not None:
        r = score.relative
        text += f"<br>({_percent(r.value)} [{_percent(r.low)}, {_percent(r.high)}])"
    elif score.difference is not None:
        c = score.difference
        text += f"<br>({_number(c.value, d, sign=True)} [{_number(c.low, d)}, {_number(c.high, d)}])"
    return text


def _number(value: float, digits: int | None = None, sign: bool = False) -> str:
    form = "+" if sign else ""
    if abs(value) >= 1e5:
        digits, value = None, float(f"{value:.3g}")  # a broken model's perplexity
    text = format(value, f"{form}g") if digits is None else format(value, f"{form}.{digits}f")
    return text.replace("-", "−")


def _percent(share: float) -> str:
    if share >= 10:
        return f"×{1 + share:.3g}"
    return f"{100 * share + 0.0:+.2f} %".replace("-", "−")  # + 0.0: there is no −0 %


def _choice(report: UnlearningReport) -> str:
    choice = report.choice
    if choice is None:
        return "## λ\n\nNo book is marked as one to forget, so no λ is chosen."
    lines = [
        "## λ",
        f"{choice.reason[0].upper()}{choice.reason[1:]}." if choice.reason[0] != "λ" else f"{choice.reason}.",
    ]
    if confirmed := choice.confirmation:
        d, f, n = confirmed.difference, confirmed.forget, METRICS[choice.metric].digits
        kind = "paired difference" if confirmed.paired else "difference"
        lines.append(
            f"On the reporting half: {choice.metric} {_number(f.value, n)} [{_number(f.low, n)}, "
            f"{_number(f.high, n)}], never-seen level {_number(confirmed.target, n)}, {kind} "
            f"{_number(d.value, n, sign=True)} [{_number(d.low, n)}, {_number(d.high, n)}]."
        )
        for book, loss in confirmed.retain_losses.items():
            lines.append(
                f"{book} lost {_percent(loss.value)} [{_percent(loss.low)}, {_percent(loss.high)}] of its score there."
            )
    source = "a model retrained without the book" if choice.target_from == "retrain" else "held-out text at λ=0"
    lines.append(
        f"The never-seen level comes from {source}; retained books may lose at most "
        f"{choice.retain_bound:.0%}; "
        f"Pareto front: λ ∈ {{{', '.join(_number(s) for s in choice.pareto)}}}."
    )
    return "\n\n".join(lines)


def _membership(report: UnlearningReport) -> str:
    rows: dict[str, dict[float, str]] = {}
    for found in report.membership:
        a = found.auc
        text = f"{_number(a.value, 3)} [{_number(a.low, 3)}, {_number(a.high, 3)}]"
        rows.setdefault(found.book, {})[found.scale] = text
    note = "AUC of Min-K %: how well seen passages are told from held-out ones; 0.5 is chance."
    return f"## Membership\n\n{note}\n\n{_table(report.scales, rows)}"


def _tests(report: UnlearningReport) -> str:
    rows: dict[str, dict[float, str]] = {}
    for test in report.tests:
        rows.setdefault(f"{test.first} > {test.second}", {})[test.scale] = _test(test)
    metric = METRICS[report.tests[0].metric]
    what = "grew its perplexity by a larger factor" if metric.geometric else f"lost a larger share of its {metric.name}"
    unit = "the difference of the logarithms" if metric.geometric else "the difference in percentage points"
    note = (
        f"Has the first book {what} than the second? In each cell {unit}, with its interval, and the p-value of the "
        "one-sided permutation test; on all seen passages."
    )
    parts = ["## Which book lost more?", note, _table(report.scales[1:], rows)]
    confirmation = None if report.choice is None else report.choice.confirmation
    if confirmation is not None and confirmation.tests:
        parts.append(f"At the chosen λ = {_number(confirmation.scale)}, on the half that did not choose it:")
        parts.append("\n".join(f"- {t.first} > {t.second}: {_test(t, ', ')}" for t in confirmation.tests))
    return "\n\n".join(parts)


def _test(test: LossTest, between: str = "<br>") -> str:
    d = test.difference
    if METRICS[test.metric].geometric:
        text = f"{_number(d.value, 3, sign=True)} [{_number(d.low, 3)}, {_number(d.high, 3)}]"
    else:
        text = f"{_number(100 * d.value, 1, sign=True)} [{_number(100 * d.low, 1)}, {_number(100 * d.high, 1)}]"
    return text + between + ("p < 0.001" if test.p_value < 0.001 else f"p = {test.p_value:.3f}")


def _leaks(report: UnlearningReport) -> str:
    leaks = report.leaks
    if leaks.clean:
        text = f"No answer of {leaks.checked} stands in a prompt, no held-out answer in the training text"
    else:
        text = (
            f"By the protocol's design, {len(leaks.in_prompts)} of {leaks.checked} answers stand in a "
            f"prompt and "
            f"{len(leaks.in_training)} held-out ones in the training text"
        )
    out = f"; {report.left_out} passages were left out for leaking between books" if report.left_out else ""
    return f"## Leaks\n\n{text} (runs of {leaks.run} words){out}."


def _definitions(report: UnlearningReport) -> str:
    rows = [
        f"- `{m.name}` ({m.kind}; {'higher' if m.higher else 'lower'} means "
        f"{'better remembered' if m.kind == 'memory' else 'healthier'}): {m.definition}."
        for m in report.metrics
    ]
    return "## Definitions\n\n" + "\n".join(rows)
