"""Is it this vector that forgets this book? What a book lost by its own vector, beside what it lost by controls.

Three questions, each with an answer that can be no:

- `control`: does the vector take more of its book than a control does: noise of its norms, another book's vector, noise
  on the output? The same passages, so the comparison is paired.
- `swapped`: does it take more of its book than of the others? The same edit, judged as if another book was meant.
- `mirrored`: does another book's vector take more of that book than this vector does? Paired again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.relative_forgetting import difference_of_losses, relative_forgetting, share_lost
from hf_taskvec.evaluation.scoring.statistics import Array, Draws, Interval
from hf_taskvec.evaluation.texts.books import Role

ChangeKind = Literal["untouched", "vector", "other_vector", "noise", "output_noise", "reference"]
Question = Literal["control", "swapped", "mirrored"]
Specificity = Literal["specific", "not_shown", "not_specific", "cannot_tell"]
QUESTIONS: tuple[Question, ...] = ("control", "swapped", "mirrored")
_CONTROLS = ("other_vector", "noise", "output_noise")


@dataclass(frozen=True)
class ChangeColumns:
    """What a book's passages scored under one change of the model.

    Args:
        name (`str`):
            What tables call the change.
        kind (`str`):
            `"untouched"`; `"vector"`, the one that is judged; `"other_vector"`, `"noise"` and `"output_noise"`, its
            controls; or `"reference"`, another model.
        values (`Mapping[str, Mapping[str, ndarray]]`):
            By book and metric.
        book (`str`, *optional*):
            Of another book's vector: which.
    """

    name: str
    kind: ChangeKind
    values: Mapping[str, Mapping[str, Array]]
    book: str | None = None


@dataclass(frozen=True)
class LossComparison:
    """How much more one book lost by one change than another book, or by another change.

    Args:
        question (`"control"`, `"swapped"` or `"mirrored"`):
            What it answers.
        metric (`str`):
            Of what.
        change, book (`str`):
            The change that should take more, and of which book.
        other_change, other_book (`str`):
            What it is compared with.
        difference (`Interval`):
            The share that the first lost minus the share that the second lost (of a metric in nats: of a true token's
            probability).
        counts (`bool`):
            Whether the answer hangs on it. It does not where there is nothing to lose: if the untouched model does not
            surely know the forget book better than a model that never saw it, or no change whatever surely takes
            anything of the metric. Nor for books of the role `"aligned"`, which are expected to fall together.
    """

    question: Question
    metric: str
    change: str
    book: str
    other_change: str
    other_book: str
    difference: Interval
    counts: bool


def compare_losses(
    changes: Sequence[ChangeColumns], roles: Mapping[str, Role], metrics: Sequence[MetricInfo], draws: Draws
) -> tuple[LossComparison, ...]:
    """All comparisons of the three questions, over the seen passages of the books.

    Args:
        changes (`Sequence[ChangeColumns]`):
            The untouched model, the vector, its controls, and models that never saw the forget books, if any; all over
            the same passages in the same order.
        roles (`Mapping[str, str]`):
            The books that have seen passages.
        metrics (`Sequence[MetricInfo]`):
            What is compared.
        draws (`Draws`):
            For the intervals.

    Returns:
        `tuple` of `LossComparison`: Those in which there was something to lose.
    """
    before, vector = (next(each for each in changes if each.kind == kind) for kind in ("untouched", "vector"))
    reference = next((change for change in changes if change.kind == "reference"), None)

    def can_be_lost(book: str, metric: MetricInfo) -> bool:
        known = before.values[book][metric.name]
        # A reference never saw the forget books. Of the others it says nothing: it may have seen them.
        if reference is not None and roles[book] == "forget":
            never = reference.values[book][metric.name]
            return relative_forgetting(known, known, never, metric, draws, paired=True).gap.low > 0
        lost = (share_lost(known, change.values[book][metric.name], metric, draws) for change in changes)
        return any(each is not None and each.low > 0 for each in lost)

    losable = {(book, metric.name): can_be_lost(book, metric) for book in roles for metric in metrics}
    found = []
    for metric in metrics:
        for question, first, book, second, other, counts in _pairs(changes, vector, roles):
            columns = [
                (before.values[where][metric.name], change.values[where][metric.name])
                for change, where in ((first, book), (second, other))
            ]
            difference = difference_of_losses(columns[0], columns[1], metric, draws, paired=book == other)
            if difference is not None:
                names = (first.name, book, second.name, other)
                counts = counts and losable[book, metric.name] and losable[other, metric.name]
                found.append(LossComparison(question, metric.name, *names, difference, counts))
    return tuple(found)


_Pair = tuple[Question, ChangeColumns, str, ChangeColumns, str, bool]


def _pairs(changes: Sequence[ChangeColumns], vector: ChangeColumns, roles: Mapping[str, Role]) -> Iterator[_Pair]:
    controls = [change for change in changes if change.kind in _CONTROLS]
    forget = [book for book, role in roles.items() if role == "forget"]
    for book in forget:
        for control in controls:
            counts = control.book is None or roles.get(control.book) != "aligned"
            yield "control", vector, book, control, book, counts
        for other, role in roles.items():
            if role != "forget":
                yield "swapped", vector, book, vector, other, role == "retain"
    for control in controls:
        if control.book is not None and control.book in roles:
            yield "mirrored", control, control.book, vector, control.book, roles[control.book] == "retain"


def specificity(comparisons: Sequence[LossComparison], question: Question) -> Specificity:
    """What the comparisons of one question come to.

    `"specific"`: every difference is surely above 0. `"not_specific"`: one is not above 0 at all. `"not_shown"`: all
    are above 0, but some not surely. `"cannot_tell"`: nothing was compared that counts.
    """
    found = [each.difference for each in comparisons if each.question == question and each.counts]
    if not found:
        return "cannot_tell"
    if all(difference.low > 0 for difference in found):
        return "specific"
    return "not_specific" if any(difference.value <= 0 for difference in found) else "not_shown"
