"""A claim of a paper beside what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """What a paper claims and where, what it predicts here, what was measured, and whether that agrees.

    `setting` names the set-up where a claim is measured in two ("" is the one that counts); `erratum` marks what we
    hold for a misprint: it is listed, but neither held nor failed.
    """

    paper: str
    claim: str
    where: str
    predicted: str
    measured: str
    holds: bool
    setting: str = ""
    erratum: bool = False


def markdown(claims: Sequence[Claim]) -> str:
    """The tables *claim – where – predicted – measured – holds*, under the name of each paper; then the misprints."""
    lines = []
    for paper in dict.fromkeys(claim.paper for claim in claims):
        lines += [f"### {paper}", ""]
        lines += _table(
            ("claim", "where", "predicted", "measured", "holds"),
            [
                (each.claim, each.where, each.predicted, each.measured, _verdict(each))
                for each in counted(claims)
                if each.paper == paper
            ],
        )
        misprints = [each for each in claims if each.paper == paper and each.erratum and not each.setting]
        if misprints:
            lines += ["Misprints, as we read them:", ""]
            rows = [(each.claim, each.where, each.predicted, each.measured) for each in misprints]
            lines += _table(("printed", "where", "would give", "measured"), rows)
    return "\n".join(lines)


def counted(claims: Sequence[Claim]) -> list[Claim]:
    """The claims that are held or failed: no misprints, and one setting each."""
    return [each for each in claims if not each.erratum and not each.setting]


def side_by_side(claims: Sequence[Claim]) -> str:
    """Claims that were measured in two settings, both verdicts in a line; "" if there are none."""
    rows = []
    for each in counted(claims):
        for other in claims:
            if other.setting and (other.paper, other.claim) == (each.paper, each.claim):
                change = "" if other.holds == each.holds else "now holds" if each.holds else "**no longer holds**"
                old, new = f"{_verdict(other)}: {other.measured}", f"{_verdict(each)}: {each.measured}"
                rows.append((each.claim, old, new, change))
    if not rows:
        return ""
    setting = next(claim.setting for claim in claims if claim.setting)
    return "\n".join(["### Two settings", "", *_table(("claim", setting, "margin 1, exact counts", "change"), rows)])


def _verdict(claim: Claim) -> str:
    return "yes" if claim.holds else "**no**"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [*lines, ""]
