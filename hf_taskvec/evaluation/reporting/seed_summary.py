"""What several seeds say together: means and tests over seeds, and two methods on the same seeds, compared in pairs.

The seed is the unit: every number here is one number for each seed (`seed_rows`), however many passages it rests on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from hf_taskvec.errors import MismatchError, some
from hf_taskvec.evaluation.reporting.seed_rows import SeedRow, check_comparable, checked_choices, seed_row
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.reporting.verdict_tables import OVERALL
from hf_taskvec.evaluation.scoring.drop_tests import PAIRS
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.seed_tests import (
    SeedMean,
    Side,
    holm,
    mean_over_seeds,
    sign_flip_test,
    sign_test,
)
from hf_taskvec.evaluation.scoring.verdict import Overall
from hf_taskvec.evaluation.texts.books import Role

_ROLES: dict[Role, str] = {"forget": "forgotten", "aligned": "aligned", "retain": "retained"}


@dataclass(frozen=True)
class SeedTest:
    """Whether one number is larger than another, paired by seed.

    Args:
        what (`str`):
            What is compared.
        first, second (`dict[int, float]`):
            The two numbers of each seed that has both.
        difference (`SeedMean`):
            `first − second`, its mean over seeds.
        p_values (`dict[str, float]`):
            By `"sign test"`, and perhaps `"sign-flip test"`.
        adjusted (`dict[str, float]`):
            The same after Holm's correction over all tests of the table.
        percent (`bool`):
            Whether the numbers are shares.
    """

    what: str
    first: dict[int, float]
    second: dict[int, float]
    difference: SeedMean
    p_values: dict[str, float]
    adjusted: dict[str, float]
    percent: bool

    @property
    def larger(self) -> int:
        """In how many seeds the first is the larger one."""
        return sum(self.first[seed] > self.second[seed] for seed in self.first)


@dataclass(frozen=True)
class SeedSummary:
    """One experiment over several seeds. Made by `compare_seeds`.

    Args:
        rows (`tuple` of `SeedRow`):
            For each seed.
        metrics (`tuple` of `MetricInfo`):
            Those that judge; the first is the headline.
        passed (`int`):
            How many seeds pass.
        outcomes (`dict[str, int]`):
            How many seeds have each outcome.
        relative (`dict[str, SeedMean]`):
            The mean R by each metric, over the seeds that have one.
        membership (`SeedMean`, *optional*):
            The mean distance of the membership AUC from the reference's.
        retained (`dict[str, SeedMean]`):
            By each metric, the mean share that the worst retained book lost.
        tests (`tuple` of `SeedTest`):
            Whether the forgotten and the aligned book lost more than the retained one; one-sided.
        level (`float`):
            Of the t intervals.
        noun (`str`, *optional*, defaults to `"λ"`):
            What the seeds chose: λ, or an `"edit"` with a name.
    """

    rows: tuple[SeedRow, ...]
    metrics: tuple[MetricInfo, ...]
    passed: int
    outcomes: dict[Overall, int]
    relative: dict[str, SeedMean]
    membership: SeedMean | None
    retained: dict[str, SeedMean]
    tests: tuple[SeedTest, ...]
    level: float
    noun: str = "λ"

    @property
    def sentence(self) -> str:
        """How many seeds pass, and what the others are."""
        told = ", ".join(f"{count} {OVERALL[outcome]}" for outcome, count in self.outcomes.items() if count)
        verb = "passes" if self.passed == 1 else "pass"
        return f"{self.passed} of {count_seeds(len(self.rows))} {verb} (the verdicts: {told})."

    def to_markdown(self) -> str:
        """The summary as Markdown.

        Returns:
            `str`: A line for each seed and one for their mean, how many pass, and the tests with a note on what so few
                seeds can show.
        """
        from hf_taskvec.evaluation.reporting.seed_tables import summary_markdown

        return summary_markdown(self)


@dataclass(frozen=True)
class MethodComparison:
    """Two methods on the same seeds. Made by `compare_methods`.

    Args:
        names (`tuple[str, str]`):
            What tables call them.
        first, second (`SeedSummary`):
            Each method alone.
        tests (`tuple` of `SeedTest`):
            How far R is from 1 by each metric, what the worst retained book lost, and the size of λ, or how far the
            named edits move the weights (neither, if one method has λ and the other edits); two-sided.
        level (`float`):
            Of the t intervals.
    """

    names: tuple[str, str]
    first: SeedSummary
    second: SeedSummary
    tests: tuple[SeedTest, ...]
    level: float

    def to_markdown(self) -> str:
        """The comparison as Markdown.

        Returns:
            `str`: A line for each number that is compared, and a note on what so few seeds can show.
        """
        from hf_taskvec.evaluation.reporting.seed_tables import comparison_markdown

        return comparison_markdown(self)


def compare_seeds(reports: Mapping[int, UnlearningReport], *, level: float = 0.95) -> SeedSummary:
    """What an experiment shows that was repeated with several seeds: every seed counts once.

    Args:
        reports (`Mapping[int, UnlearningReport]`):
            One report for each seed, all of λ or all of named edits; `edit_table` follows each edit through the seeds.
            Runs of two methods on one seed are no two seeds: see `compare_methods`.
        level (`float`, *optional*, defaults to 0.95):
            Of the t intervals over seeds.

    Returns:
        `SeedSummary`: The seeds, how many pass, the means, and the tests; `to_markdown` shows it.

    Raises:
        `BadValueError`: If there are no reports, or one has no book to forget.
        `MismatchError`: If their protocols or criteria differ; if two of them are of one model, so that they are no two
            experiments; or if some are of λ and some of named edits.

    Example:
        >>> reports = {seed: UnlearningReport.load(f"outputs/seed-{seed}") for seed in range(5)}  # doctest: +SKIP
        >>> print(compare_seeds(reports).to_markdown())  # doctest: +SKIP

    """
    choices = checked_choices(reports)
    first = next(iter(reports.values()))
    metrics = tuple(first.metric(name) for name in next(iter(choices.values())).criteria.judged)
    rows = tuple(seed_row(seed, reports[seed], choice) for seed, choice in choices.items())
    tests = []
    for pair in PAIRS[:2]:
        lost = {row.seed: row.lost[pair] for row in rows if pair in row.lost}
        if lost:
            words = f"the {_ROLES[pair[0]]} book lost more of its {metrics[0].name} than the {_ROLES[pair[1]]} one"
            share = not (metrics[0].geometric or metrics[0].nats)
            tests.append(_test(words, lost, share, level, "greater", flip=True))
    known = {name: [row.relative[name].value for row in rows if name in row.relative] for name in _names(metrics)}
    kept = {name: [row.retained[name] for row in rows if name in row.retained] for name in _names(metrics)}
    apart = [row.membership for row in rows if row.membership is not None]
    return SeedSummary(
        rows=rows,
        metrics=metrics,
        passed=sum(row.passed for row in rows),
        outcomes={outcome: sum(row.outcome == outcome for row in rows) for outcome in get_args(Overall)},
        relative={name: mean_over_seeds(values, level) for name, values in known.items() if values},
        membership=mean_over_seeds(apart, level) if apart else None,
        retained={name: mean_over_seeds(values, level) for name, values in kept.items() if values},
        tests=_corrected(tests),
        level=level,
        noun=first.names.noun,
    )


def compare_methods(
    a: Mapping[int, UnlearningReport],
    b: Mapping[int, UnlearningReport],
    *,
    names: tuple[str, str] = ("first", "second"),
    level: float = 0.95,
) -> MethodComparison:
    """Whether one method forgets more exactly, keeps more or needs a larger edit than another: paired by seed.

    Args:
        a (`Mapping[int, UnlearningReport]`):
            The reports of the first method: of λ or of named edits. What one seed chose is one number either way.
        b (`Mapping[int, UnlearningReport]`):
            Those of the second, of the same seeds. The two of one seed are a pair: they share books and model.
        names (`tuple[str, str]`, *optional*, defaults to `("first", "second")`):
            What tables call the methods.
        level (`float`, *optional*, defaults to 0.95):
            Of the t intervals over seeds.

    Returns:
        `MethodComparison`: Each method's summary and the paired tests; `to_markdown` shows them.

    Raises:
        `BadValueError`: If there are no reports, or one has no book to forget.
        `MismatchError`: If a seed is missing from one side, a pair is of different books, protocols or criteria differ,
            or one side has both reports of λ and of named edits.

    Example:
        >>> print(compare_methods(full, lora, names=("full", "LoRA")).to_markdown())  # doctest: +SKIP

    """
    if alone := sorted(a.keys() ^ b.keys()):
        raise MismatchError(
            f"the seeds {some(map(str, alone))} are only of one method: a pair needs both. Run them, or leave them out"
        )
    for seed in a:
        books = [{(book.name, book.role, book.fingerprint) for book in side[seed].books} for side in (a, b)]
        if books[0] != books[1]:
            raise MismatchError(f"the two reports of seed {seed} are of different books, so they are no pair")
    first, second = compare_seeds(a, level=level), compare_seeds(b, level=level)
    check_comparable({names[0]: next(iter(a.values())), names[1]: next(iter(b.values()))})
    tests = []

    def add(what: str, number: Callable[[SeedRow], float | None], percent: bool = False) -> None:
        sides = [{row.seed: number(row) for row in summary.rows} for summary in (first, second)]
        pairs = {
            seed: (one, other)
            for seed in a
            if (one := sides[0][seed]) is not None and (other := sides[1][seed]) is not None
        }
        if pairs:
            tests.append(_test(what, pairs, percent, level, "two_sided", flip=False))

    for info in first.metrics:

        def distance(row: SeedRow, name: str = info.name) -> float | None:
            return abs(row.relative[name].value - 1) if name in row.relative else None

        add(f"how far R is from 1, {info.name}", distance)
    add("what the worst retained book lost", lambda row: row.worst_retained, True)
    if first.noun == second.noun == "λ":
        add("size of λ", lambda row: None if row.scale is None else abs(row.scale))
    else:  # λ has no distance: then there are no pairs
        add("how far the edit moves the weights", lambda row: row.distance)
    return MethodComparison(names, first, second, _corrected(tests), level)


def _test(
    what: str, pairs: Mapping[int, tuple[float, float]], percent: bool, level: float, side: Side, flip: bool
) -> SeedTest:
    differences = [first - second for first, second in pairs.values()]
    p_values = {"sign test": sign_test(differences, side)}
    if flip:
        p_values["sign-flip test"] = sign_flip_test(differences, side)
    first, second = ({seed: pair[place] for seed, pair in pairs.items()} for place in (0, 1))
    return SeedTest(what, first, second, mean_over_seeds(differences, level), p_values, {}, percent)


def _corrected(tests: list[SeedTest]) -> tuple[SeedTest, ...]:
    """The tests with the p-values after Holm's correction over all of them."""
    together = {f"{place}/{name}": p for place, test in enumerate(tests) for name, p in test.p_values.items()}
    adjusted = holm(together)
    return tuple(
        replace(test, adjusted={name: adjusted[f"{place}/{name}"] for name in test.p_values})
        for place, test in enumerate(tests)
    )


def _names(metrics: tuple[MetricInfo, ...]) -> list[str]:
    return [info.name for info in metrics]


def count_seeds(count: int) -> str:
    """How many, in words.

    >>> count_seeds(1), count_seeds(5)
    ('1 seed', '5 seeds')
    """
    return "1 seed" if count == 1 else f"{count} seeds"
