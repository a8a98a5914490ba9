"""A verdict as Markdown: what each metric says, and how every λ did on the half that chose."""

from collections.abc import Callable, Sequence

from hf_taskvec.escaping import markdown, markdown_cell
from hf_taskvec.evaluation.reporting.number_formats import format_interval, format_number
from hf_taskvec.evaluation.reporting.report_parts import UNNAMED
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.edit_names import EditNames
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.scale_choice import Candidate, NeverSeen
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.scoring.verdict import Kept, Outcome, Overall, Verdict

OVERALL: dict[Overall, str] = {
    "as_if_never_seen": "as if never seen",
    "still_known": "still known",
    "over_forgotten": "forgotten beyond never seen",
    "cannot_tell": "cannot tell",
}
OUTCOMES: dict[Outcome, str] = {
    "forgotten": "as if never seen",
    "known": "still known",
    "overdone": "beyond never seen",
    "unsure": "not sure",
    "untestable": "hardly known before",
}
_KEPT: dict[Kept, str] = {"kept": "kept", "lost": "**lost**", "unsure": "not sure"}

VERDICT_HEADS = ("metric", "untouched", "edited", "never seen", "R", "says")


def short_verdict(verdict: Verdict, info_of: Callable[[str], MetricInfo]) -> list[list[str]]:
    """The rows under `VERDICT_HEADS` for a terminal: plain texts, and an interval for R alone."""
    several = len({found.book for found in verdict.metrics}) > 1
    rows = []
    for found in verdict.metrics:
        of = f", {found.book}" if several else ""
        digits = min(info_of(found.metric).digits, 3)
        levels = [format_number(value, digits) for value in (found.before, found.after.value, found.never)]
        relative = "–" if found.relative is None else format_interval(found.relative, 2)
        rows.append([found.metric + of, *levels, relative, OUTCOMES[found.outcome]])
    for member in verdict.membership:
        of = f", {member.book}" if several else ""
        level = 0.5 if member.reference is None else member.reference.value
        leak = "–" if member.priv_leak is None else f"PrivLeak {format_number(member.priv_leak, 0, sign=True)}"
        levels = ["–", f"{member.auc.value:.3f}", f"{level:.3f}"]
        rows.append(["membership AUC" + of, *levels, leak, OUTCOMES[member.outcome]])
    return rows


def verdict_table(verdict: Verdict, info_of: Callable[[str], MetricInfo]) -> str:
    """What each metric says of each forget book: before, after, never seen, R and the outcome."""
    several = len({found.book for found in verdict.metrics}) > 1
    rows = []
    for found in verdict.metrics:
        info = info_of(found.metric)
        name = (info.title or info.name) + (f", {found.book}" if several else "")
        cells = [
            format_number(found.before, info.digits),
            format_interval(found.after, info.digits),
            format_number(found.never, info.digits),
            "–" if found.relative is None else format_interval(found.relative, 2),
            _emphasised(found.outcome),
        ]
        rows.append([name, *cells])
    for member in verdict.membership:
        name = "Membership AUC" + (f", {member.book}" if several else "")
        never = "0.5 (chance)" if member.reference is None else format_interval(member.reference, 3)
        leak = "–" if member.priv_leak is None else f"PrivLeak {format_number(member.priv_leak, 1, sign=True)}"
        rows.append([name, "–", format_interval(member.auc, 3), never, leak, _emphasised(member.outcome)])
    return markdown_table(VERDICT_HEADS, rows)


def _emphasised(outcome: Outcome) -> str:
    """What fails a verdict stands out."""
    return f"**{OUTCOMES[outcome]}**" if outcome in ("known", "overdone") else OUTCOMES[outcome]


def retained_table(verdict: Verdict, info_of: Callable[[str], MetricInfo]) -> str:
    """What each book to keep lost of each metric, in percent."""
    rows = [
        [loss.book, info_of(loss.metric).title or loss.metric, format_percent(loss.lost), _KEPT[loss.outcome]]
        for loss in verdict.retained
    ]
    return markdown_table(["book to keep", "metric", "lost", "says"], rows)


def candidates_table(candidates: Sequence[Candidate], criteria: Criteria, names: EditNames) -> str:
    """R by every metric at every λ on the half that chooses, and what it cost there."""
    told = (f"R, {name}" for name in criteria.judged)
    heads = [names.noun, *told, "AUC above reference", "worst loss kept", "qualifies"]
    rows = [[names.short(each.scale), *candidate_cells(each, criteria)] for each in candidates]
    return markdown_table(heads, rows)


def candidate_cells(candidate: Candidate, criteria: Criteria) -> list[str]:
    """R by every metric that decides, the AUC above the reference's, the worst loss kept, and whether it qualifies."""
    relative = [candidate.relative.get(name) for name in criteria.judged]
    return [
        *("–" if value is None else format_number(value, 2) for value in relative),
        "–" if candidate.membership is None else format_number(candidate.membership, 2, sign=True),
        f"{100 * candidate.worst_retain:.0f} %".replace("-", "−"),
        "yes" if candidate.qualifies else "no",
    ]


def criteria_words(criteria: Criteria) -> str:
    """What forgotten and kept had to mean."""
    if criteria.rule == "margin":
        text = f"{criteria.headline} within ± {criteria.margin:g} of the never-seen level (the rule “margin”)"
    else:
        text = (
            f"relative forgetting R = (untouched − edited) / (untouched − never seen) between {criteria.low:g} and "
            f"{criteria.high:g} with its whole interval, by each of {', '.join(criteria.metrics)}, and a membership "
            f"AUC within ± {criteria.membership:g} of the reference's"
        )
    sure = " It is enough only where whole intervals say so on the choosing half." if criteria.certain else ""
    return f"As if never seen means: {text}. Kept means: at most {criteria.retain_bound:.0%} lost of each.{sure}"


def never_seen_words(never_seen: NeverSeen) -> str:
    """Where the never-seen level comes from."""
    named = "" if never_seen.name in (None, UNNAMED) else f" “{markdown(str(never_seen.name))}”"
    held_out = "the books' held-out parts, as the untouched model knows them"
    source = {
        "reference": f"the reference model{named}, on the same passages",
        "unseen": "text that the caller says no model saw, asked of the untouched model",
        "split": f"{held_out}; the training record says that they were left out",
        "assumed": f"{held_out}. That training left them out is an *assumption*: no record tells",
    }[never_seen.source]
    return f"The never-seen level comes from {source}."


def format_percent(share: Interval) -> str:
    """A share in percent with its interval.

    >>> format_percent(Interval(0.1, 0.05, 0.15))
    '10.0 % [5.0, 15.0]'
    """
    ends = f"{format_number(100 * share.low, 1)}, {format_number(100 * share.high, 1)}"
    return f"{format_number(100 * share.value, 1)} % [{ends}]"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column holds names, which are escaped."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += [f"| {markdown_cell(row[0])} | " + " | ".join(row[1:]) + " |" for row in rows]
    return "\n".join(lines)
