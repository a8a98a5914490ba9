"""The controls of an edit as a value and as one table: what each change of the model took of each book."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_taskvec.errors import CorruptFileError, MissingNameError, did_you_mean
from hf_taskvec.escaping import markdown, markdown_cell
from hf_taskvec.evaluation.reporting.number_formats import format_interval, format_number
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.relative_forgetting import relative_forgetting, share_lost
from hf_taskvec.evaluation.scoring.specificity import (
    QUESTIONS,
    ChangeColumns,
    ChangeKind,
    LossComparison,
    Specificity,
    compare_losses,
    specificity,
)
from hf_taskvec.evaluation.scoring.statistics import Draws, Interval
from hf_taskvec.evaluation.texts.books import Role
from hf_taskvec.typed_values import typed

_SHORT = {
    "rouge_l": "Rouge-L",
    "loss": "token probability",
    "extraction_strength": "extraction",
    "exact_memorisation": "exact memory",
}
_HEADS: dict[Specificity, str] = {
    "specific": "Specific",
    "not_specific": "Not specific",
    "not_shown": "Specificity is not shown",
    "cannot_tell": "Whether it is specific cannot be told",
}
_WORST_FIRST: tuple[Specificity, ...] = ("not_specific", "not_shown", "cannot_tell", "specific")


@dataclass(frozen=True)
class ControlBook:
    """A book of the table, with the number of its seen passages."""

    name: str
    role: Role
    passages: int


@dataclass(frozen=True)
class ControlScore:
    """One metric of one book under one change.

    Args:
        book, metric (`str`):
            Of what.
        value (`Interval`):
            The mean score of the book's seen passages.
        lost (`Interval`, *optional*):
            The share of the untouched model's score that is gone (of a metric in nats: of a true token's probability);
            `None` where there was nothing to lose.
        relative (`Interval`, *optional*):
            R, of a forget book beside a model that never saw it: 0 is untouched, 1 never seen. `None` elsewhere, and
            where the untouched model does not clearly know the book.
    """

    book: str
    metric: str
    value: Interval
    lost: Interval | None
    relative: Interval | None


@dataclass(frozen=True)
class ControlRow:
    """One change of the model, and what it took of each book.

    Args:
        name (`str`):
            What the table calls it.
        kind (`str`):
            `"untouched"`, `"vector"`, `"other_vector"`, `"noise"`, `"output_noise"` or `"reference"`.
        fingerprint (`str`):
            Of the edit; of a reference or the untouched model, the model's.
        scale (`float`):
            λ.
        size (`float`):
            Of a vector, ‖λτ‖; of noise on the output, its standard deviation in logits; else 0.
        scores (`tuple` of `ControlScore`):
            For each book and metric.
        book (`str`, *optional*):
            Of another book's vector: which.
    """

    name: str
    kind: ChangeKind
    fingerprint: str
    scale: float
    size: float
    scores: tuple[ControlScore, ...]
    book: str | None = None


@dataclass(frozen=True)
class ControlTable:
    """The controls of an edit at one λ, and whether it is this vector that forgets this book.

    Made by `run_controls`. All numbers are over the books' seen passages.

    Args:
        scale (`float`):
            λ.
        level (`float`):
            Of the intervals.
        books (`tuple` of `ControlBook`):
            The columns.
        metrics (`tuple` of `MetricInfo`):
            What was measured.
        rows (`tuple` of `ControlRow`):
            The changes: the untouched model first, then the vector and its controls, then the reference models.
        comparisons (`tuple` of `LossComparison`):
            The differences on which the answers rest.
        answers (`dict[str, str]`):
            For each question (`"control"`, `"swapped"`, `"mirrored"`; see `scoring.specificity`) `"specific"`,
            `"not_specific"`, `"not_shown"` or `"cannot_tell"`; without those for which no book to keep, or no vector of
            one, was given.
        sentence (`str`):
            The same in words, with the numbers that decide.

    Example:
        >>> table = run_controls(model, vector, -0.6, books, others={"Oz": oz_vector})  # doctest: +SKIP
        >>> table.is_specific, table.sentence  # doctest: +SKIP

    """

    scale: float
    level: float
    books: tuple[ControlBook, ...]
    metrics: tuple[MetricInfo, ...]
    rows: tuple[ControlRow, ...]
    comparisons: tuple[LossComparison, ...]
    answers: dict[str, Specificity]
    sentence: str

    @property
    def is_specific(self) -> bool:
        """Whether every question that was asked is answered by yes, surely."""
        return set(self.answers.values()) == {"specific"}

    def score(self, row: str, book: str, metric: str = "rouge_l") -> ControlScore:
        """One metric of one book under one change.

        Args:
            row (`str`):
                The name of the change.
            book (`str`):
                The book's name.
            metric (`str`, *optional*, defaults to `"rouge_l"`):
                One of `metrics`.

        Returns:
            `ControlScore`: The score and what was lost.

        Raises:
            `MissingNameError`: If the table has no such number.
        """
        for each in self.rows:
            for found in each.scores:
                if (each.name, found.book, found.metric) == (row, book, metric):
                    return found
        names = [each.name for each in self.rows]
        raise MissingNameError(
            f"the controls have no {metric!r} of {book!r} under {row!r}.{did_you_mean(row, names)} They have the rows "
            f"{', '.join(names)} and the books {', '.join(each.name for each in self.books)}"
        )

    def to_markdown(self) -> str:
        """The answer in a sentence, and the table: changes down, books across."""
        return f"{markdown(self.sentence)}\n\n{markdown(self._note())}\n\n{self._table()}"

    def to_dict(self) -> dict[str, Any]:
        """The table as plain values, for a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ControlTable":
        """What `to_dict` gave.

        Raises:
            `CorruptFileError`: If it is damaged, or no such table.
        """
        try:
            found: ControlTable = typed(cls, content)
        except CorruptFileError as error:
            raise CorruptFileError(f"the table of controls is damaged: {error} Run the controls again") from None
        return found

    def _note(self) -> str:
        return (
            f"At λ = {format_number(self.scale)}, over all seen passages. In each cell, what the book lost: the share "
            "of the untouched model's score (of the loss: of a true token's probability), with its "
            f"{self.level:.0%} interval; beside a model that never saw the book also R (0 is untouched, 1 never seen)."
        )

    def _table(self) -> str:
        head = " | ".join(markdown_cell(f"{book.name} ({book.role}; {book.passages} passages)") for book in self.books)
        lines = [f"| change | {head} |", "|---|" + "---|" * len(self.books)]
        for row in self.rows:
            name = markdown_cell(row.name)
            if row.kind == "output_noise":
                name += f"<br>standard deviation {format_number(row.size, 3)}"
            elif row.size:
                name += f"<br>‖λτ‖ = {format_number(float(f'{row.size:.4g}'))}"
            cells = ("<br>".join(self._lines(row, book.name)) for book in self.books)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def _lines(self, row: ControlRow, book: str) -> list[str]:
        lines = []
        for info in self.metrics:
            found = next((each for each in row.scores if (each.book, each.metric) == (book, info.name)), None)
            title = markdown_cell(_title(info))
            if found is None:  # in a file that was written otherwise
                lines.append(f"{title}: –")
                continue
            if row.kind == "untouched":
                title = "loss" if info.name == "loss" else title
                lines.append(f"{title}: {format_interval(found.value, info.digits)}")
                continue
            text = "nothing to lose" if found.lost is None else f"{_percent(found.lost)}"
            if found.relative is not None:
                text += f", R = {format_interval(found.relative, 2)}"
            lines.append(f"{title}: {text}")
        return lines


def control_table(
    changes: Sequence[tuple[ChangeColumns, str, float, float]],
    roles: dict[str, Role],
    metrics: Sequence[MetricInfo],
    draws: Draws,
) -> ControlTable:
    """The table of these changes.

    Args:
        changes (`Sequence` of `tuple`):
            For each change its values, fingerprint, λ and size. The untouched model and the vector must be there.
        roles (`dict[str, str]`):
            The books with seen passages.
        metrics (`Sequence[MetricInfo]`):
            What was measured.
        draws (`Draws`):
            For the intervals.
    """
    columns = [each[0] for each in changes]
    before = next(each for each in columns if each.kind == "untouched")
    never = next((each for each in columns if each.kind == "reference"), None)

    def score(change: ChangeColumns, book: str, metric: MetricInfo) -> ControlScore:
        old, new = before.values[book][metric.name], change.values[book][metric.name]
        relative = None
        if never is not None and roles[book] == "forget":
            unseen = never.values[book][metric.name]
            relative = relative_forgetting(old, new, unseen, metric, draws, paired=True).relative
        value = draws.bootstrap(len(new)).mean(new, metric.geometric)
        return ControlScore(book, metric.name, value, share_lost(old, new, metric, draws), relative)

    rows = tuple(
        ControlRow(
            name=change.name,
            kind=change.kind,
            fingerprint=fingerprint,
            scale=scale,
            size=size,
            scores=tuple(score(change, book, metric) for book in roles for metric in metrics),
            book=change.book,
        )
        for change, fingerprint, scale, size in changes
    )
    comparisons = compare_losses(columns, roles, metrics, draws)
    kept = {book for book, role in roles.items() if role == "retain"}
    asked = {"control": True, "swapped": bool(kept), "mirrored": any(change.book in kept for change in columns)}
    answers: dict[str, Specificity] = {each: specificity(comparisons, each) for each in QUESTIONS if asked[each]}
    any_metric = metrics[0].name
    return ControlTable(
        scale=next(scale for change, _, scale, _ in changes if change.kind == "vector"),
        level=draws.level,
        books=tuple(ControlBook(book, role, len(before.values[book][any_metric])) for book, role in roles.items()),
        metrics=tuple(metrics),
        rows=rows,
        comparisons=comparisons,
        answers=answers,
        sentence=_sentence(comparisons, answers, {metric.name: metric for metric in metrics}, roles),
    )


def control_heads(table: ControlTable) -> list[str]:
    """The heads above `control_rows`."""
    return ["change", *(_title(info) for info in table.metrics)]


def control_rows(table: ControlTable, book: str) -> list[list[str]]:
    """For a terminal, plain texts: what each change took of one book, by each metric, with its interval."""
    rows = []
    for row in table.rows:
        if row.kind != "untouched":
            lost = {found.metric: found.lost for found in row.scores if found.book == book}
            shares = [lost.get(info.name) for info in table.metrics]
            rows.append([row.name, *("–" if share is None else _percent(share) for share in shares)])
    return rows


def _sentence(
    comparisons: Sequence[LossComparison],
    answers: dict[str, Specificity],
    metrics: dict[str, MetricInfo],
    roles: dict[str, Role],
) -> str:
    forget = " and ".join(book for book, role in roles.items() if role == "forget")
    claims = {
        "control": f"the vector takes more of {forget} than every control does",
        "swapped": f"the vector takes more of {forget} than of every book to keep",
        "mirrored": "every other vector takes more of its own book than this one does",
    }
    worst = next(each for each in _WORST_FIRST if each in answers.values())
    parts = []
    for question, answer in answers.items():
        found = [each for each in comparisons if each.question == question and each.counts]
        if answer == "cannot_tell":
            parts.append(f"nothing that counts tells whether {claims[question]}")
            continue
        nearest = min(found, key=lambda each: (each.difference.low > 0, each.difference.value))
        where = f"{_title(metrics[nearest.metric])} of {nearest.book}"
        if question == "swapped":
            where += f" against {nearest.other_book}"
        else:
            where += f", {nearest.change} against {nearest.other_change}"
        number = f"{_points(nearest.difference)} ({where})"
        if answer == "specific":
            parts.append(f"{claims[question]}, in every comparison, at least by {number}")
            continue
        failed = sum(each.difference.low <= 0 for each in found)
        unsure = "it is not so that" if answer == "not_specific" else "it is not sure that"
        parts.append(f"{unsure} {claims[question]}: {failed} of {len(found)} comparisons fail, the worst by {number}")
    return f"{_HEADS[worst]}: {'; '.join(parts)}."


def _title(metric: MetricInfo) -> str:
    return _SHORT.get(metric.name, metric.title or metric.name)


def _percent(share: Interval) -> str:
    value, low, high = (format_number(100 * each, 0) for each in (share.value, share.low, share.high))
    return f"{value} %" if share.low == share.high == share.value else f"{value} % [{low}, {high}]"


def _points(difference: Interval) -> str:
    shown = Interval(100 * difference.value, 100 * difference.low, 100 * difference.high)
    return f"{format_interval(shown, 1)} percentage points"
