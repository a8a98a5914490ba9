"""A claim of a paper beside what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """What a paper claims, what it predicts here, what was measured, and whether that agrees."""

    paper: str
    claim: str
    predicted: str
    measured: str
    holds: bool


def markdown(claims: Sequence[Claim]) -> str:
    """The table *claim – predicted – measured – holds*, under the name of each paper."""
    lines = []
    for paper in dict.fromkeys(claim.paper for claim in claims):
        lines += [f"### {paper}", "", "| claim | predicted | measured | holds |", "|---|---|---|---|"]
        for each in claims:
            if each.paper == paper:
                cells = (each.claim, each.predicted, each.measured, "yes" if each.holds else "**no**")
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
