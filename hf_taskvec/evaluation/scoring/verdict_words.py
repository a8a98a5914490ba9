"""A verdict in words that a person can act on: which metric says what, with the numbers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.statistics import Interval

if TYPE_CHECKING:
    from hf_taskvec.evaluation.scoring.verdict import MembershipVerdict, MetricVerdict, Overall

FEW_PASSAGES = 20


def verdict_sentence(
    outcome: "Overall",
    metrics: "Sequence[MetricVerdict]",
    membership: "Sequence[MembershipVerdict] | None",
    infos: Mapping[str, MetricInfo],
    criteria: Criteria,
) -> str:
    """The verdict as one sentence, without its full stop. A `membership` of `None` is not spoken of."""
    knowing = [found for found in membership or () if found.reference_knows]
    if knowing:
        found = knowing[0]
        assert found.reference is not None
        text = (
            f"cannot tell: the reference model itself knows {found.book} (it tells its passages from unseen ones with "
            f"an AUC of {_interval(found.reference)}). Give one that never saw the book"
        )
    elif outcome == "as_if_never_seen":
        alone = "" if any(infos[m.metric].likelihood for m in metrics) else ", as far as generated text shows"
        text = f"the book is as if never seen{alone} ({_numbers(metrics, criteria)})"
    elif outcome == "cannot_tell":
        text = _cannot_tell(metrics, criteria)
    else:
        books = list(dict.fromkeys(found.book for found in metrics))
        what = [f"the model {_what([m for m in metrics if m.book == book], infos, criteria)}" for book in books]
        named = what[0] if len(books) == 1 else "; ".join(f"{b}: {w}" for b, w in zip(books, what, strict=True))
        text = f"{_head(outcome, metrics)}{named} ({_numbers(metrics, criteria)})"
    if not knowing and membership is not None:
        text += _membership(membership, criteria)
    fewest = min((found.passages for found in metrics), default=FEW_PASSAGES)
    if fewest < FEW_PASSAGES:
        text += f"; mind that this rests on only {fewest} passage{'s' if fewest > 1 else ''}"
    return text


def _head(outcome: "Overall", metrics: "Sequence[MetricVerdict]") -> str:
    """What the outcome is, where what the model does with the book would not tell."""
    found = {m.outcome for m in metrics}
    if outcome == "over_forgotten":
        return f"forgotten beyond never seen{'' if 'overdone' in found else ' by the membership test'}: "
    return "" if "known" in found else "still known by the membership test: "


def _what(metrics: "Sequence[MetricVerdict]", infos: Mapping[str, MetricInfo], criteria: Criteria) -> str:
    """What the model still does with a book, and what it does no more."""
    groups = {
        "generate": [m for m in metrics if not infos[m.metric].likelihood],
        "predict": [m for m in metrics if infos[m.metric].likelihood],
    }
    told = [_does(verb, group, criteria) for verb, group in groups.items() if group]
    if len(told) == 1:
        return told[0][1]
    (first, words), (second, more) = told
    agree = first == second or {first, second} in ({"known", "unsure"}, {"overdone", "perhaps overdone"})
    return f"{words}, {'and' if agree else 'but'} {more}"


def _does(verb: str, group: "Sequence[MetricVerdict]", criteria: Criteria) -> tuple[str, str]:
    """The outcome of a group of metrics, and its words."""
    by = {outcome: [m.metric for m in group if m.outcome == outcome] for outcome in {m.outcome for m in group}}
    if "known" in by:
        words = f"still {verb}s it"
        if "overdone" in by:
            words += f" (though by {_and(by['overdone'])} less than one that never saw it)"
        elif len(by) > 1:
            words += f" (by {_and(by['known'])})"
        return "known", words
    if "overdone" in by:
        return "overdone", f"{verb}s it less than one that never saw it"
    if set(by) == {"forgotten"}:
        return "forgotten", f"{verb}s it no more"
    if set(by) == {"untestable"}:
        return "untestable", f"hardly {verb.removesuffix('e')}ed it before"
    unsure = [m.relative for m in group if m.outcome == "unsure"]
    if unsure and "untestable" not in by and all(r is not None and r.low >= criteria.low for r in unsure):
        return "perhaps overdone", f"perhaps {verb}s it less than one that never saw it"
    return "unsure", f"perhaps still {verb}s it"


def _cannot_tell(metrics: "Sequence[MetricVerdict]", criteria: Criteria) -> str:
    hardly = [m for m in metrics if m.outcome == "untestable"]
    unsure = [m for m in metrics if m.outcome == "unsure"]
    counts = [(m.needed, m.passages) for m in (*hardly, *unsure) if m.needed is not None]
    needed = (
        "about {} in place of {}".format(*max(counts)) if counts else None
    )  # half of all that were asked, in a sweep
    if hardly:
        by = "" if len(hardly) == len(metrics) else f" by {_and(dict.fromkeys(m.metric for m in hardly))}"
        text = f"cannot tell: the model hardly knew the book{by} ({_numbers(metrics, criteria)})"
        remedy = "it must learn the book better first, by more epochs or a higher learning rate"
        if needed is not None:
            remedy = f"{needed} passages would show a gap this small, or more epochs of training a larger one"
        return f"{text}; {remedy}"
    if unsure:
        text = f"cannot tell: the passages are too few for this closeness ({_numbers(metrics, criteria)})"
        return f"{text}; {needed} would do" if needed is not None else text
    return f"cannot tell, because of the membership test alone ({_numbers(metrics, criteria)})"


def _numbers(metrics: "Sequence[MetricVerdict]", criteria: Criteria) -> str:
    several = len({m.book for m in metrics}) > 1
    told: list[str] = []
    symbol = "R = "
    for m in metrics:
        of = f" of {m.book}" if several else ""
        if criteria.rule == "margin":
            told.append(f"{m.metric}{of} {_interval(m.difference, sign=True)} from the never-seen level")
        elif m.relative is not None:
            told.append(f"{symbol}{_interval(m.relative)} by {m.metric}{of}")
            symbol = ""
        elif m.gap is not None:
            told.append(f"{m.metric}{of} {_interval(m.gap, sign=True)} better than never seen")
            symbol = "R = "
    return ", ".join(told)


def _membership(membership: "Sequence[MembershipVerdict]", criteria: Criteria) -> str:
    if criteria.rule == "margin":
        return ""
    if not membership:
        return "; membership was not tested, which takes the likelihood of text that the model never saw"
    words = {
        "forgotten": "its passages are not told from unseen ones",
        "known": "its passages are still told from unseen ones",
        "overdone": "its passages are conspicuously avoided",
    }
    told = []
    for found in membership:
        of = f" of {found.book}" if len(membership) > 1 else ""
        level = 0.5 if found.reference is None else found.reference.value
        leak = "" if found.priv_leak is None else f", PrivLeak {found.priv_leak:+.0f}".replace("-", "−")
        what = words.get(found.outcome, "whether its passages are told from unseen ones is not sure")
        told.append(f"{what} (AUC{of} {_interval(found.auc)}, never seen {level:.2f}{leak})")
    return "; " + "; ".join(told)


def _interval(found: Interval, sign: bool = False) -> str:
    value, low, high = (round(number, 2) + 0.0 for number in (found.value, found.low, found.high))  # there is no −0.00
    return f"{value:{'+' if sign else ''}.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")


def _and(names: "Mapping[str, None] | Sequence[str]") -> str:
    given = list(names)
    return given[0] if len(given) == 1 else f"{', '.join(given[:-1])} and {given[-1]}"
