"""Write the committed outcomes and the page about them from a complete run: `make matrix-table`.

python tests/matrix/make_table.py          # from the outcomes that `make test-matrix` found
python tests/matrix/make_table.py --part   # the same of a part of them; what was not run stays as it is committed
python tests/matrix/make_table.py --page   # the page alone, from tests/matrix/expected.json
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matrix import results
from matrix.other_classes import CLASSES
from matrix.outcomes import CRASHED, EXACT, IMPOSSIBLE, KINDS, NOT_BUILT, PARTLY, REFUSED, WRONG
from matrix.results import LORA, Outcomes

README = results.ROOT / "README.md"
PAGE = results.ROOT / "docs" / "coverage.md"
CHECKS = ["streamed", "live", "lora", "attached", "vocabulary", "export"]
CLASS_CHECKS = ["streamed", "live", "attached"]
_MARKS = {
    EXACT: "✓",
    PARTLY: "✓ −",
    REFUSED: "−",
    IMPOSSIBLE: "·",
    NOT_BUILT: "",
    WRONG: "**wrong**",
    CRASHED: "**crashed**",
}

#: an outcome in the middle of a sentence
_TOLD = {kind: kind for kind in KINDS} | {NOT_BUILT: "cannot be built here"}

_INTRODUCTION = Path(__file__).with_name("coverage_introduction.md")


def page(committed: dict[str, str], outcomes: Outcomes) -> str:
    """The page, from committed versions and outcomes."""
    types, classes = _rows(outcomes)
    options = {check: outcome for (row, check), outcome in outcomes.items() if row == LORA}
    single = [kind.kind for check, kind in options.items() if "×" not in check]
    paired = [kind.kind for check, kind in options.items() if "×" in check]
    tables = sorted({_auto_class(each) for each in classes})
    numbers = {"types": len(types), "classes": len(classes), "tables": len(tables)}
    parts = [_INTRODUCTION.read_text("utf-8").format(**numbers, **committed)]
    parts.append("## Counts\n")
    columns = {check: [outcomes[each, check].kind for each in types] for check in CHECKS}
    columns |= {
        f"{check}, other classes": [outcomes[e, check].kind for e in classes if (e, check) in outcomes]
        for check in CLASS_CHECKS
    }
    columns |= {"LoraConfig, one field": single, "LoraConfig, two fields": paired}
    counts = {what: Counter(kinds) for what, kinds in columns.items()}
    shown = [kind for kind in KINDS if any(count[kind] for count in counts.values())]
    rows = [[what, *(str(count[kind] or "") for kind in shown)] for what, count in counts.items()]
    parts.append(_table(["", *shown], rows))
    parts.append("## Model types\n")
    rows = [[f"`{each}`", *(_MARKS[outcomes[each, check].kind] for check in CHECKS)] for each in types]
    parts.append(_table(["type", *CHECKS], rows))
    parts.append("## Other classes\n")
    parts.append(
        "By the auto class that gives them first. A class that is not named under [Reasons](#reasons) is exact; one "
        "that could not be built is named there as well.\n"
    )
    rows = [_row_of_table(table, [e for e in classes if _auto_class(e) == table], outcomes) for table in tables]
    head = ["auto class", "classes", "not built", "streamed: exact", "live: tried", "live: exact"]
    head += ["attached: exact", "attached: in part"]
    parts.append(_table(head, rows))
    parts.append("## Reasons\n\n`…` stands for the name of a parameter, a file or a model, `N` for a number.\n")
    for check in CHECKS:
        parts.append(f"### {check}\n")
        rows_of_check = [each for each in (*types, *classes) if (each, check) in outcomes]
        parts.append(_reasons({each: outcomes[each, check] for each in rows_of_check}))
    parts.append("## Fields of LoraConfig\n")
    rows = [
        [f"`{check}`", options[check].kind, _escaped("; ".join(options[check].reasons))]
        for check in sorted(options)
        if "×" not in check
    ]
    parts.append(_table(["case", "outcome", "why"], rows))
    parts.append("### Pairs of fields that are not exact\n")
    parts.append(_reasons({check: outcome for check, outcome in sorted(options.items()) if "×" in check}))
    return "\n".join(parts)


def _rows(outcomes: Outcomes) -> tuple[list[str], list[str]]:
    """The causal model types, and the other classes."""
    rows = sorted({row for row, _ in outcomes if row != LORA})
    return [row for row in rows if row not in CLASSES], [row for row in rows if row in CLASSES]


def _auto_class(name: str) -> str:
    """What transformers calls the auto class: the words of its table's name."""
    return CLASSES[name][0]


def _row_of_table(table: str, classes: list[str], outcomes: Outcomes) -> list[str]:
    found = {c: Counter(outcomes[e, c].kind for e in classes if (e, c) in outcomes) for c in CLASS_CHECKS}
    streamed, live, attached = (found[check] for check in CLASS_CHECKS)
    counts = [streamed[NOT_BUILT], streamed[EXACT], live.total() - live[NOT_BUILT], live[EXACT]]
    counts += [attached[EXACT], attached[PARTLY]]
    return [f"`{table}`", str(len(classes)), *(str(count or "") for count in counts)]


def with_summary(readme: str, outcomes: Outcomes) -> str:
    """The README with the sentence that tells what works."""
    types, classes = _rows(outcomes)
    kinds = [Counter(outcomes[each, "streamed"].kind for each in rows) for rows in (types, classes)]
    left = sum((kind for kind in kinds), Counter())
    rest = ", ".join(f"{left[kind]} {_TOLD[kind]}" for kind in KINDS if kind != EXACT and left[kind])
    text = (
        f"{kinds[0][EXACT]} of {len(types)} causal model types of transformers and {kinds[1][EXACT]} of {len(classes)} "
        f"other classes (classifiers, encoders, sequence to sequence, pictures, sounds) are exact from "
        f"folder to folder{f'; {rest}' if rest else ''}. [The table](docs/coverage.md) has each, and every option of "
        "LoRA."
    )
    return re.sub(r"(?s)(<!-- matrix -->).*?(<!-- end -->)", lambda found: f"{found[1]}{text}{found[2]}", readme)


def _reasons(outcomes: dict[str, results.Outcome]) -> str:
    """The rows of each reason; the most common first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row, outcome in outcomes.items():
        for reason in outcome.reasons:
            groups.setdefault((outcome.kind, reason), []).append(row)
    if not groups:
        return "All are exact.\n"
    order = sorted(groups.items(), key=lambda item: (-KINDS.index(item[0][0]), -len(item[1]), item[0]))
    rows = [
        [kind, _escaped(reason), str(len(rows)), ", ".join(f"`{row}`" for row in rows)]
        for (kind, reason), rows in order
    ]
    return _table(["outcome", "why", "", "which"], rows)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _escaped(text: str) -> str:
    """A message as Markdown shows it, letter for letter."""
    return re.sub(r"([\\|<>*_\[\]`])", r"\\\1", text)


def main() -> None:
    """Write what the arguments ask for."""
    if "--page" not in sys.argv[1:]:
        from matrix.cases import all_cases

        found = results.kept()
        if "--part" in sys.argv[1:]:
            found = results.expected()[1] | found
        if missing := [key for key in all_cases() if key not in found]:
            sys.exit(f"{len(missing)} outcomes are missing, such as {missing[0]}. Run `make test-matrix` first.")
        results.EXPECTED.write_text(results.as_expected({key: found[key] for key in all_cases()}), "utf-8")
    PAGE.write_text(page(*results.expected()), "utf-8")
    README.write_text(with_summary(README.read_text("utf-8"), results.expected()[1]), "utf-8")


if __name__ == "__main__":
    main()
