"""The result of a sweep, as a value: every score with its interval, every text, and how they came about.

`report.json` is this dataclass, field for field (`REPORT_SCHEMA`, version `REPORT_VERSION`):

- `schema`, `version`: what the file is; the version goes up whenever a field changes its meaning.
- `protocol`: the protocol's fields and hash; only reports with the same hash may share a table.
- `model`, `edit`: fingerprints of the model at λ=0 and of the edit.
- `references`: models to compare with, by the names that the caller gave them, with their fingerprints and
  batch plans. λ is chosen against the first.
- `scales`: the values of λ, 0 first; or the numbers of `edits`, from 1 on, and 0 for none.
- `edits`: if whole edits were compared and not λ: their names, expressions and sizes, the gentlest first.
- `metrics`: for each metric its kind (`memory`, `health`), whether higher means more of that, its definition, and how
  it is averaged and shown. See `scoring.metrics.MetricInfo`.
- `books`: name, role, fingerprint, seed, and the number of passages in each split.
- `leaks`, `left_out`: the leak check over all books together, and how many passages it left out.
- `scores`: for each book, split, λ and metric the value, and the paired difference and relative change (a
  fraction) against λ=0, each with its confidence interval.
- `reference_scores`: the same for each reference model, compared with the model at λ=0.
- `tests`: for each λ, on all seen passages, whether one book lost more than another: forget against retain,
  aligned against retain, forget against aligned. The losses (shares of each book's score at λ=0), their
  difference with its interval, and the p-value of a one-sided permutation test. See `scoring.drop_tests.LossTest`.
- `membership`: AUC of Min-K %, seen against unseen passages (0.5: they cannot be told apart), and PrivLeak;
  `reference_membership`: the same AUC of each reference model, which shows whether it knows the book.
- `choice`: the chosen λ (`scale`), or none and the `nearest`, and why (`reason`); the `criteria`; where the never-seen
  level comes from (`never_seen`); the candidates on the choosing half; the Pareto front; and, from the other half, the
  `verdict` (relative forgetting by every metric, membership, what the kept books lost) and the `tests` at that λ.
- `theory`: task correlations, the λ that theory recommends for them, and how good that was; null if nobody asked.
- `controls`: what noise and other books' vectors do at the judged λ; null if nobody asked. See `ControlTable`.
- `utility`: abilities that no book measures, at each λ and of each reference; empty if nobody asked.
- `passages`: prompt, true answer, and for each λ and each reference the output and all values.
- `settings`: seed, level and number of resamples and permutations, the batch plan.
- `versions`: of Python and the libraries.
- `timing`: seconds, passages per second, processes: the only part that differs between equal runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.errors import BadValueError, CorruptFileError, MissingNameError, did_you_mean
from hf_taskvec.escaping import visible
from hf_taskvec.evaluation.reporting.control_table import ControlTable
from hf_taskvec.evaluation.reporting.earlier_reports import EARLIER_VERSION, upgraded
from hf_taskvec.evaluation.reporting.report_files import (
    ReportFormat,
    load_report,
    report_from_dict,
    report_to_dict,
    report_to_json,
    save_report,
)
from hf_taskvec.evaluation.reporting.report_parts import (
    BookInfo,
    EditInfo,
    Membership,
    PassageResult,
    ReferenceInfo,
    ReferenceMembership,
    ReferenceScore,
    Score,
    Settings,
    Timing,
    UtilityScore,
)
from hf_taskvec.evaluation.reporting.theory_verdict import Judgement, Theory, judge_scale
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.drop_tests import LossTest
from hf_taskvec.evaluation.scoring.edit_names import EditNames
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.scale_choice import Choice
from hf_taskvec.evaluation.texts.books import Split
from hf_taskvec.evaluation.texts.leaks import LeakReport
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.filenames import REPORT_JSON, REPORT_MARKDOWN, REPORT_PAGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

REPORT_SCHEMA = "hf_taskvec/unlearning-report"
REPORT_VERSION = 4

_FORMAT = ReportFormat(
    schema=REPORT_SCHEMA,
    version=REPORT_VERSION,
    json=REPORT_JSON,
    markdown=REPORT_MARKDOWN,
    noun="report",
    maker="sweep",
    upgrades={EARLIER_VERSION: upgraded},
    later={"theory": None, "controls": None, "edits": [], "utility": []},
)


@dataclass(frozen=True, repr=False)
class UnlearningReport:
    """What was forgotten, what was kept, and how sure we are.

    Made by `sweep`, read back by `UnlearningReport.load`. Its fields are those of `report.json`. A notebook shows it as
    a table.

    Args:
        protocol (`Protocol`):
            How the model was asked; only reports with the same `protocol.hash` may share a table.
        model (`str`):
            The fingerprint of the model at λ=0.
        edit (`str`):
            The fingerprint of the edit.
        references (`tuple` of `ReferenceInfo`):
            Models to compare with. λ is chosen against the first.
        scales (`tuple` of `float`):
            The values of λ, 0 first; or the numbers of `edits`, from 1 on, and 0 for none.
        metrics (`tuple` of `MetricInfo`):
            What was measured, with definitions.
        books (`tuple` of `BookInfo`):
            The books, with their roles and numbers of passages.
        leaks (`LeakReport`):
            The leak check over all books together.
        left_out (`int`):
            How many passages it left out.
        scores (`tuple` of `Score`):
            For each book, split, λ and metric the value, and its change against λ=0, with intervals.
        reference_scores (`tuple` of `ReferenceScore`):
            The same for each reference model, compared with the model at λ=0.
        tests (`tuple` of `LossTest`):
            For each λ, on all seen passages, whether one book lost more than another.
        membership (`tuple` of `Membership`):
            AUC of Min-K %, seen against unseen passages, and PrivLeak.
        reference_membership (`tuple` of `ReferenceMembership`):
            The same AUC of the reference models.
        choice (`Choice`, *optional*):
            The chosen λ, if any, why, and what the other half of the passages says of it; `None` without a book to
            forget.
        passages (`tuple` of `PassageResult`):
            Prompt, true answer, and for each λ and each reference the output and all values.
        settings (`Settings`):
            Seed, level, numbers of resamples and permutations, and the batch plan.
        versions (`dict[str, str]`):
            Those of Python and the libraries.
        timing (`Timing`):
            The only part that differs between equal runs.
        theory (`Theory`, *optional*):
            Task correlations, the λ that theory recommends for them, and how good that was; `None` unless it was asked.
        controls (`ControlTable`, *optional*):
            What noise and the vectors of other books do at the judged λ; `None` unless it was asked.
        edits (`tuple` of `EditInfo`, *optional*):
            The edits, if edits were compared and not values of λ; the gentlest first.
        utility (`tuple` of `UtilityScore`, *optional*):
            Abilities that no book measures, at each λ and of each reference; empty unless it was asked.

    Example:
        >>> report = sweep(model, vector, [0, -0.5, -1], books, output="out/")  # doctest: +SKIP
        >>> report.choice.scale  # the λ to take, or None  # doctest: +SKIP
        >>> report.choice.verdict.sentence  # which metric says what  # doctest: +SKIP
        >>> report.rechoose(Criteria(retain_bound=0.3)).choice.scale  # the same scores, other bounds  # doctest: +SKIP
        >>> report.score("Alice", -0.5).relative  # what Alice lost, with its interval  # doctest: +SKIP
        >>> report.figures()["pareto"]  # what forgetting costs  # doctest: +SKIP

    """

    protocol: Protocol
    model: str
    edit: str
    references: tuple[ReferenceInfo, ...]
    scales: tuple[float, ...]
    metrics: tuple[MetricInfo, ...]
    books: tuple[BookInfo, ...]
    leaks: LeakReport
    left_out: int
    scores: tuple[Score, ...]
    reference_scores: tuple[ReferenceScore, ...]
    tests: tuple[LossTest, ...]
    membership: tuple[Membership, ...]
    reference_membership: tuple[ReferenceMembership, ...]
    choice: Choice | None
    passages: tuple[PassageResult, ...]
    settings: Settings
    versions: dict[str, str]
    timing: Timing
    theory: Theory | None = None
    controls: ControlTable | None = None
    edits: tuple[EditInfo, ...] = ()
    utility: tuple[UtilityScore, ...] = ()

    @property
    def names(self) -> EditNames:
        """What the edits are called."""
        return EditNames(tuple(edit.name for edit in self.edits))

    def distance(self, scale: float) -> float:
        """How far one of `edits` moves the weights, by its number; 0 is the untouched model.

        Args:
            scale (`float`):
                One of `scales`, which are the numbers of `edits`.

        Returns:
            `float`: The norm of the whole change.

        Raises:
            `BadValueError`: If the report is of λ, or has no such edit.
        """
        if not self.edits or scale not in self.scales:
            raise BadValueError(f"the report has no edit of number {scale:g}: it has {len(self.edits)} named edits")
        return self.edits[int(scale) - 1].distance if scale else 0.0

    def score(self, book: str, scale: float | str, metric: str = "rouge_l", split: Split = "seen") -> Score:
        """The score of one book at one λ, or after one edit.

        Args:
            book (`str`):
                Its name.
            scale (`float` or `str`):
                λ, one of `scales`; or the name of one of `edits`.
            metric (`str`, *optional*, defaults to `"rouge_l"`):
                One of `metrics`.
            split (`"seen"` or `"held_out"`, *optional*, defaults to `"seen"`):
                Which of the book's passages.

        Returns:
            `Score`: The value, and its change against λ=0, each with its interval.

        Raises:
            `MissingNameError`: If the report has no such score.
        """
        called = [self.names.short(each) for each in self.scales]
        if isinstance(scale, str):
            if scale not in called:
                raise MissingNameError(
                    f"the report has no edit {scale!r}.{did_you_mean(scale, called)} It has {called}"
                )
            scale = self.scales[called.index(scale)]
        for found in self.scores:
            if (found.book, found.scale, found.metric, found.split) == (book, scale, metric, split):
                return found
        names = [info.name for info in self.books]
        metrics = [info.name for info in self.metrics]
        hint = did_you_mean(book, names) if book not in names else did_you_mean(metric, metrics)
        raise MissingNameError(
            f"the report has no {metric!r} of the {split} passages of {book!r} at {self.names.phrase(scale)}.{hint} "
            f"It has {self.names.noun} in {', '.join(called)} and the books {', '.join(names)}"
        )

    def test(self, first: str, second: str, scale: float | None = None) -> LossTest:
        """Whether one book lost more than another at one λ.

        Args:
            first (`str`):
                The name of the book that may have lost more.
            second (`str`):
                The name of the other.
            scale (`float`, *optional*):
                λ. Without it the answer is for the chosen λ (or the nearest, if none was chosen), from the half of the
                passages that did not choose it.

        Returns:
            `LossTest`: What both lost, the difference with its interval, and the p-value.

        Raises:
            `BadValueError`: If no λ was chosen and none is given.
            `MissingNameError`: If the report does not compare these books.
        """
        chosen = () if self.choice is None else self.choice.tests
        if scale is None and not chosen:
            raise BadValueError("no λ was chosen: say which one, as in report.test('forget', 'retain', -1)")
        tests = self.tests if scale is not None else chosen
        for found in tests:
            if (found.first, found.second) == (first, second) and scale in (None, found.scale):
                return found
        known = sorted({f"{test.first!r} against {test.second!r}" for test in tests})
        raise MissingNameError(
            f"the report has no test of {first!r} against {second!r}"
            + (f" at {self.names.phrase(scale)}" if scale is not None else f" at the chosen {self.names.noun}")
            + f"; it compares {', '.join(known) or 'nothing'}"
        )

    def judge(self, scale: float | None) -> Judgement:
        """How good a λ was that theory recommended before the sweep.

        Args:
            scale (`float`, *optional*):
                The recommended λ, as `recommend_scales(alpha).sweep_scale` gives it. The sweep must have evaluated it:
                `scales_with` puts it into the grid.

        Returns:
            `Judgement`: What it forgot and kept, and all of it as a sentence.

        Raises:
            `BadValueError`: If there is no such λ (`None`), or none was chosen, or the sweep did not evaluate it.
        """
        metric = None if self.choice is None else self.choice.criteria.headline
        return judge_scale(scale, self.choice, any(info.higher for info in self.metrics if info.name == metric))

    def metric(self, name: str) -> MetricInfo:
        """What a metric of the report means.

        Args:
            name (`str`):
                One of `metrics`.

        Returns:
            `MetricInfo`: Its direction, definition and form.

        Raises:
            `MissingNameError`: If the report has no such metric.
        """
        for info in self.metrics:
            if info.name == name:
                return info
        known = [info.name for info in self.metrics]
        raise MissingNameError(f"the report has no metric {name!r}.{did_you_mean(name, known)} It has {known}")

    def rechoose(self, criteria: Criteria) -> "UnlearningReport":
        """The same scores, with λ chosen and judged by other criteria.

        Args:
            criteria (`Criteria`):
                What forgotten and kept shall mean.

        Returns:
            `UnlearningReport`: With another `choice`, and `tests` by its first metric.

        Raises:
            `BadValueError`: If the report has no passages (one from the Hub has none), or no book to forget.
            `MissingNameError`: If there is no such metric.
            `CorruptFileError`: If a passage lacks a value.
        """
        from hf_taskvec.evaluation.reporting.rechoosing import rechosen

        return rechosen(self, criteria)

    def to_dict(self) -> dict[str, Any]:
        """The report as `report.json` holds it.

        Returns:
            `dict[str, Any]`: Numbers, strings, lists and dictionaries only, which JSON can hold.
        """
        return report_to_dict(self, _FORMAT)

    def to_json(self) -> str:
        """The text of `report.json`.

        Returns:
            `str`: JSON, the same for the same run, but for `timing`.
        """
        return report_to_json(self)

    def to_markdown(self) -> str:
        """The text of `report.md`.

        Returns:
            `str`: Tables in Markdown: λ across, books down, the relative drop in brackets, with intervals.
        """
        from hf_taskvec.evaluation.reporting.tables import report_markdown

        return report_markdown(self)

    def to_html(self, audit: dict[str, Any] | None = None) -> str:
        """The text of `report.html`: the report as a page that needs no other file and no network.

        A slider moves through λ or the edits; tables, curves and what the model writes move with it.

        Args:
            audit (`dict[str, Any]`, *optional*):
                What an audit of the same model found, as `AuditReport.overview` gives it.

        Returns:
            `str`: HTML. It holds the whole report, the passages' texts among it.
        """
        from hf_taskvec.evaluation.reporting.report_page import report_page

        return report_page(self, audit)

    def figures(self) -> "dict[str, Figure]":
        """The plots: `scores` and `forgetting` (R) against λ, `pareto` (what it costs), `samples` (before and after).

        Returns:
            `dict[str, matplotlib.figure.Figure]`: The figures by the names of the files that `save` writes them to.

        Raises:
            `UnsupportedError`: If matplotlib is not installed.
        """
        from hf_taskvec.evaluation.reporting.plots import report_figures

        return report_figures(self)

    def figure(self, name: str = "scores") -> "Figure":
        """One of the plots; a notebook shows it.

        Args:
            name (`str`, *optional*, defaults to `"scores"`):
                One of `figures()`.

        Returns:
            `matplotlib.figure.Figure`: The figure.

        Raises:
            `MissingNameError`: If there is no such plot.
            `UnsupportedError`: If matplotlib is not installed.
        """
        found = self.figures()
        if name not in found:
            raise MissingNameError(f"no plot {name!r}.{did_you_mean(name, found)} There are {', '.join(found)}")
        return found[name]

    def to_pandas(self) -> "DataFrame":
        """All scores as a table: a row for each book, split, λ (or edit, or reference model) and metric.

        Returns:
            `pandas.DataFrame`: With the columns `book`, `role`, `split`, `edit`, `scale` (none for reference models),
            `metric`, `passages`, `value`, `low` and `high`.
        """
        from hf_taskvec.evaluation.reporting.score_frame import score_frame

        return score_frame(self)

    def save(self, output: str | Path, *, plots: bool = True) -> Path:
        """Write `report.json`, `report.md`, `report.html` and the plots as PNG and SVG.

        Each file appears under its name only when it is complete.

        Args:
            output (`str` or `Path`):
                The folder; made if it does not exist.
            plots (`bool`, *optional*, defaults to `True`):
                Also draw the plots, which need matplotlib.

        Returns:
            `Path`: The folder that was written.

        Raises:
            `OutputError`: If the folder cannot be written.
            `UnsupportedError`: If there is no matplotlib to draw the plots.
        """
        pages = {REPORT_PAGE: self.to_html()}
        return save_report(self, _FORMAT, output, self.figures if plots else None, pages)

    def __repr__(self) -> str:
        books = ", ".join(f"{book.name} ({book.role})" for book in self.books)
        edits = ", ".join(map(self.names.short, self.scales))
        verdict = self.choice.verdict if self.choice is not None else None
        says = "nothing was judged" if verdict is None else verdict.outcome.replace("_", " ")
        return visible(f"UnlearningReport({books}; {self.names.noun} = {edits}; {says})")

    def _repr_html_(self) -> str:
        from hf_taskvec.evaluation.reporting.notebook_table import report_html

        return report_html(self)

    @classmethod
    def load(cls, path: str | Path) -> "UnlearningReport":
        """The report that `save` wrote.

        Args:
            path (`str` or `Path`):
                A `report.json`, or the folder that holds it.

        Returns:
            `UnlearningReport`: Equal to the one that was saved.

        Raises:
            `MissingFileError`: If there is none.
            `CorruptFileError`: If it is damaged, or of another version.
        """
        return load_report(cls, _FORMAT, path, _check_report)

    @classmethod
    def from_dict(cls, content: dict[str, Any], name: str = "the report") -> "UnlearningReport":
        """The report that `to_dict` described.

        Args:
            content (`dict[str, Any]`):
                What `to_dict` gave.
            name (`str`, *optional*, defaults to `"the report"`):
                What an error calls it.

        Returns:
            `UnlearningReport`: Equal to the one that was described.

        Raises:
            `CorruptFileError`: If it is damaged, no report, or of another version.
        """
        return report_from_dict(cls, _FORMAT, content, name, _check_report)


def _check_report(report: UnlearningReport) -> None:
    """Refuse scores and verdicts of metrics or edits that the report does not explain."""
    if report.edits and report.scales != tuple(map(float, range(len(report.edits) + 1))):
        raise CorruptFileError(f"it has {len(report.edits)} edits, and other numbers of them.")
    names = [report.names.short(scale) for scale in report.scales]
    if report.edits and len(set(names)) < len(names):
        raise CorruptFileError("two of its edits have one name, or one has that of the untouched model.")
    used = [score.metric for score in report.scores]
    if report.choice is not None:
        used += report.choice.criteria.metrics
        if (verdict := report.choice.verdict) is not None:
            used += [found.metric for found in verdict.metrics] + [lost.metric for lost in verdict.retained]
    unknown = set(used) - {info.name for info in report.metrics}
    if unknown:
        raise CorruptFileError(f"it has values of {min(unknown)[:60]!r}, but no such metric.")
