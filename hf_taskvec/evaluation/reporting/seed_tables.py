"""Summaries over seeds as Markdown: a line for each seed, the tests, and a note on what so few seeds can show."""

from hf_taskvec.escaping import markdown, markdown_cell
from hf_taskvec.evaluation.reporting.number_formats import format_interval, format_number
from hf_taskvec.evaluation.reporting.seed_summary import MethodComparison, SeedSummary, SeedTest, count_seeds
from hf_taskvec.evaluation.reporting.verdict_tables import OVERALL, markdown_table
from hf_taskvec.evaluation.scoring.seed_tests import EXACT_SEEDS, SeedMean, Side, smallest_p
from hf_taskvec.evaluation.scoring.statistics import Interval

_SIGNIFICANT = 0.05


def summary_markdown(summary: SeedSummary) -> str:
    """One experiment over its seeds."""
    tests = _tests_part(summary.tests, len(summary.rows), summary.level)
    brackets = (
        "Square brackets of a seed are bootstrap intervals over its passages; those of means and differences "
        f"{summary.level:.0%} t intervals over seeds."
    )
    return "\n\n".join([_rows_table(summary), f"{summary.sentence} {brackets}", *tests])


def comparison_markdown(found: MethodComparison) -> str:
    """Two methods on the same seeds."""
    told = [f"{markdown(n)}: {s.sentence}" for n, s in zip(found.names, (found.first, found.second), strict=True)]
    tests = _tests_part(found.tests, len(found.first.rows), found.level, found.names, "two_sided")
    if found.first.noun != found.second.noun:
        tests.append("One chose λ, the other an edit by its name, so the sizes of the edits are not compared.")
    return "\n\n".join([*told, *tests])


def _rows_table(summary: SeedSummary) -> str:
    titles = {info.name: markdown_cell(info.name) for info in summary.metrics}
    heads = ["seed", summary.noun, *(f"R, {title}" for title in titles.values()), "AUC above never seen"]
    heads += [*(f"retained lost, {title}" for title in titles.values()), "verdict", "passes"]
    body = []
    for row in summary.rows:
        scale = "–" if row.scale is None else format_number(row.scale) if row.edit is None else markdown_cell(row.edit)
        relative = [row.relative.get(name) for name in titles]
        cells = [
            scale + ("" if row.chosen or row.scale is None else " (nearest)"),
            *("–" if found is None else format_interval(found, 2) for found in relative),
            "–" if row.membership is None else format_number(row.membership, 2, sign=True),
            *(_percent(row.retained.get(name)) for name in titles),
            OVERALL[row.outcome],
            "yes" if row.passed else "no",
        ]
        body.append([str(row.seed), *cells])
    everything = len(summary.rows)
    # Numbers of edits are places in a list, of which there is no mean.
    scales = [row.scale for row in summary.rows if row.scale is not None and row.edit is None]
    means = [
        format_number(sum(scales) / len(scales), 2) if scales else "–",
        *(_mean(summary.relative.get(name), everything) for name in titles),
        _mean(summary.membership, everything, sign=True),
        *(_mean(summary.retained.get(name), everything, percent=True) for name in titles),
        "",
        f"{summary.passed} of {everything}",
    ]
    return markdown_table(heads, [*body, ["mean over seeds", *means]])


def _tests_part(
    tests: tuple[SeedTest, ...],
    seeds: int,
    level: float,
    names: tuple[str, str] = ("first", "second"),
    side: Side = "greater",
) -> list[str]:
    """The tests as a table, with a note on what so few seeds can show."""
    if not tests:
        return []
    kinds = list(tests[0].p_values)
    heads = ["compared", *map(markdown_cell, names), "difference", f"{markdown_cell(names[0])} is larger in"]
    rows = []
    for test in tests:
        count = len(test.first)
        sides = [
            _mean(SeedMean(sum(s.values()) / count, None, count), seeds, test.percent, digits=3)
            for s in (test.first, test.second)
        ]
        difference = _mean(test.difference, seeds, test.percent, sign=True, digits=3)
        p_values = [f"{test.p_values[kind]:.3f} ({test.adjusted[kind]:.3f})" for kind in kinds]
        rows.append([test.what, *sides, difference, f"{test.larger} of {count}", *p_values])
    return [markdown_table([*heads, *(f"p, {kind}" for kind in kinds)], rows), _note(tests, seeds, level, side)]


def _note(tests: tuple[SeedTest, ...], seeds: int, level: float, side: Side) -> str:
    made = sum(len(test.p_values) for test in tests)
    least, words = smallest_p(seeds, side), "one-sided" if side == "greater" else "two-sided"
    exact = "exact and " if seeds <= EXACT_SEEDS else ""
    needed = next(n for n in range(1, 64) if made * smallest_p(n, side) < _SIGNIFICANT)
    text = (
        f"Every seed counts once, however many passages it has. Square brackets: {level:.0%} t intervals over seeds. "
        f"p-values are {exact}{words}; in round brackets after Holm's correction over the {made} tests of this table. "
        f"With {count_seeds(seeds)} the smallest p-value there can be is 1/{round(1 / least)} = {least:.3g}, "
        f"and {min(1.0, made * least):.3g} after the correction"
    )
    if made * least >= _SIGNIFICANT:
        text += f": it would take {needed} seeds that all agree to go below {_SIGNIFICANT} there"
    return text + "."


def _mean(found: SeedMean | None, seeds: int, percent: bool = False, *, sign: bool = False, digits: int = 2) -> str:
    """A mean over seeds with its interval, and of how many seeds if some have none."""
    if found is None:
        return "–"
    shown = found.interval or Interval(found.value, found.value, found.value)
    return seed_cell(shown, found.seeds, seeds, percent, sign=sign, digits=digits)


def seed_cell(
    value: Interval, known: int, seeds: int, percent: bool = False, *, sign: bool = False, digits: int = 2
) -> str:
    """A number over seeds and what encloses it as a cell of a table, and how many seeds have it if some have none.

    >>> seed_cell(Interval(0.1, 0.05, 0.2), 4, 5, percent=True)
    '10.0 [5.0, 20.0] % (4 seeds)'
    """
    if percent:
        value = Interval(*(100 * end + 0.0 for end in (value.value, value.low, value.high)))
        text = format_interval(value, 1, sign) + " %"
    else:
        text = format_interval(value, digits, sign)
    return text if known == seeds else f"{text} ({count_seeds(known)})"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{format_number(100 * share + 0.0, 1)} %"
