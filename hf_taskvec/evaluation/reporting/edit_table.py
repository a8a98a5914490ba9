"""One row for each edit over several seeds: what it forgets, what it costs, and how often it is good enough.

`compare_seeds` follows what each seed chose. Here every edit is followed through all seeds, by its name: its number in
a report is its place by size, which differs from seed to seed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hf_taskvec.errors import BadValueError
from hf_taskvec.escaping import markdown_cell
from hf_taskvec.evaluation.reporting.rechoosing import verdicts_by_scale
from hf_taskvec.evaluation.reporting.seed_rows import checked_choices
from hf_taskvec.evaluation.reporting.seed_summary import count_seeds
from hf_taskvec.evaluation.reporting.seed_tables import seed_cell
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.reporting.verdict_tables import criteria_words, markdown_table
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.scale_choice import Candidate
from hf_taskvec.evaluation.scoring.statistics import Interval


@dataclass(frozen=True)
class SeedRange:
    """A number of several seeds.

    Args:
        value (`Interval`):
            Its mean, and the smallest and the largest of them: no confidence interval.
        seeds (`int`):
            How many seeds have it.
    """

    value: Interval
    seeds: int


@dataclass(frozen=True)
class EditRow:
    """One edit over the seeds that have it, on the half of the passages that chooses.

    Args:
        name (`str`):
            What the reports call it; λ, if they are of λ.
        seeds (`tuple` of `int`):
            Those that have it.
        distance (`SeedRange`, *optional*):
            How far it moves the weights; `None` if the reports are of λ.
        relative (`dict[str, SeedRange]`):
            R by each metric, in the seeds whose model knew the book by it.
        membership (`SeedRange`, *optional*):
            How far the membership AUC is above the reference's.
        retained (`dict[str, SeedRange]`):
            By each metric, the share that the worst retained book lost.
        qualifies (`tuple` of `int`):
            The seeds in which it meets the criteria there.
        passes (`tuple` of `int`, *optional*):
            The seeds in which the verdict on it, from the other half, passes. `None` if a report has no passages to
            judge it by.
        chosen (`tuple` of `int`):
            The seeds that chose it.
    """

    name: str
    seeds: tuple[int, ...]
    distance: SeedRange | None
    relative: dict[str, SeedRange]
    membership: SeedRange | None
    retained: dict[str, SeedRange]
    qualifies: tuple[int, ...]
    passes: tuple[int, ...] | None
    chosen: tuple[int, ...]


@dataclass(frozen=True)
class EditTable:
    """Every edit over several seeds. Made by `edit_table`.

    Args:
        rows (`tuple` of `EditRow`):
            The untouched model first, then the edits from the gentlest on, by their mean distance.
        seeds (`tuple` of `int`):
            All of them.
        criteria (`Criteria`):
            What forgotten and kept mean in all reports.
        noun (`str`):
            What a row is: `"edit"`, or `"λ"`.
    """

    rows: tuple[EditRow, ...]
    seeds: tuple[int, ...]
    criteria: Criteria
    noun: str

    def to_markdown(self) -> str:
        """The table as Markdown.

        Returns:
            `str`: A line for each edit, and a note on what its numbers are.
        """
        metrics = {name: markdown_cell(name) for name in self.criteria.judged}
        heads = [self.noun, *(["distance"] if self.noun == "edit" else []), *(f"R, {m}" for m in metrics.values())]
        heads += ["AUC above never seen", *(f"retained lost, {m}" for m in metrics.values())]
        heads += ["qualifies", "passes", "chosen"]
        body = [self._cells(row, tuple(metrics)) for row in self.rows]
        return f"{markdown_table(heads, body)}\n\n{self._note()}"

    def _cells(self, row: EditRow, metrics: Sequence[str]) -> list[str]:
        def count(seeds: tuple[int, ...] | None) -> str:
            return "–" if seeds is None else f"{len(seeds)} of {len(row.seeds)}"

        def cell(found: SeedRange | None, percent: bool = False, sign: bool = False, digits: int = 2) -> str:
            if found is None:
                return "–"
            return seed_cell(found.value, found.seeds, len(row.seeds), percent, sign=sign, digits=digits)

        return [
            row.name,
            *([cell(row.distance, digits=3)] if self.noun == "edit" else []),
            *(cell(row.relative.get(name)) for name in metrics),
            cell(row.membership, sign=True),
            *(cell(row.retained.get(name), percent=True) for name in metrics),
            count(row.qualifies),
            count(row.passes),
            count(row.chosen),
        ]

    def _note(self) -> str:
        passes = "the verdict on the other half, with whole intervals"
        if any(row.passes is None for row in self.rows):
            passes += " (–: a report has no passages to judge by)"
        return (
            f"The mean over {count_seeds(len(self.seeds))}, in square brackets the smallest and the largest; where a "
            "number of seeds follows, the others cannot tell. Numbers and “qualifies” are from the half of the "
            f"passages that chooses; “passes” is {passes}. A row that is picked because it looks best was chosen by "
            f"these seeds: try it on others. {criteria_words(self.criteria)}"
        )


def edit_table(reports: Mapping[int, UnlearningReport]) -> EditTable:
    """Every edit of an experiment over its seeds, matched by name: what it forgets and costs, and how often it passes.

    Args:
        reports (`Mapping[int, UnlearningReport]`):
            One report for each seed, all of named edits or all of λ. A seed that lacks an edit does not count in its
            row.

    Returns:
        `EditTable`: A row for each edit; `to_markdown` shows it.

    Raises:
        `BadValueError`: If there are no reports, or one has no book to forget or too few passages.
        `MismatchError`: If their protocols or criteria differ, two of them are of one model, or some are of λ and some
            of named edits.
        `CorruptFileError`: If a passage lacks a value.

    Example:
        >>> reports = {seed: UnlearningReport.load(f"outputs/seed-{seed}") for seed in range(5)}  # doctest: +SKIP
        >>> print(edit_table(reports).to_markdown())  # doctest: +SKIP

    """
    choices = checked_choices(reports)
    criteria, noun = next(iter(choices.values())).criteria, next(iter(reports.values())).names.noun
    found: dict[str | float, list[_EditOfSeed]] = {}
    for seed, choice in choices.items():
        if not choice.candidates:
            raise BadValueError(f"seed {seed} has nothing to compare: {choice.reason}. Leave it out, or run it again")
        names, verdicts = reports[seed].names, verdicts_by_scale(reports[seed])
        for each in choice.candidates:
            name, verdict = names.short(each.scale), verdicts.get(each.scale)
            size = reports[seed].distance(each.scale) if names.names else abs(each.scale)
            passes = None if verdict is None else verdict.passed
            of_seed = _EditOfSeed(seed, name, size, each, passes, each.scale == choice.scale)
            found.setdefault(name if names.names else each.scale, []).append(of_seed)
    ordered = sorted(found.values(), key=lambda seeds: (fmean(each.size for each in seeds), seeds[0].candidate.scale))
    return EditTable(
        tuple(_row(seeds, criteria.judged, noun == "edit") for seeds in ordered), tuple(reports), criteria, noun
    )


@dataclass(frozen=True)
class _EditOfSeed:
    seed: int
    name: str
    size: float
    candidate: Candidate
    passes: bool | None
    chosen: bool


def _row(seeds: Sequence[_EditOfSeed], metrics: Sequence[str], named: bool) -> EditRow:
    candidates = [each.candidate for each in seeds]
    relative = {name: _range(c.relative.get(name) for c in candidates) for name in metrics}
    retained = {name: _range(c.retained.get(name) for c in candidates) for name in metrics}
    return EditRow(
        name=seeds[0].name,
        seeds=tuple(each.seed for each in seeds),
        distance=_range(each.size for each in seeds) if named else None,
        relative={name: value for name, value in relative.items() if value is not None},
        membership=_range(c.membership for c in candidates),
        retained={name: value for name, value in retained.items() if value is not None},
        qualifies=tuple(each.seed for each in seeds if each.candidate.qualifies),
        passes=None
        if any(each.passes is None for each in seeds)
        else tuple(each.seed for each in seeds if each.passes),
        chosen=tuple(each.seed for each in seeds if each.chosen),
    )


def _range(given: Iterable[float | None]) -> SeedRange | None:
    values = [value for value in given if value is not None]
    return SeedRange(Interval(fmean(values), min(values), max(values)), len(values)) if values else None
