"""The search for an edit: kinds in the order of what they cost, each tried until one of its edits qualifies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.scale_choice import Candidate
from hf_taskvec.forgetting.edit_kinds import ADJUSTMENTS, PROPOSALS, EditKind, ForgetCase, TriedEdit
from hf_taskvec.progress import progress_line


@dataclass(frozen=True)
class EditSearch:
    """What a search has tried, and the report that compares all of it.

    Args:
        tried (`tuple` of `TriedEdit`):
            In the order in which they were tried.
        report (`UnlearningReport`):
            Of all of them, with the choice and the verdict.
    """

    tried: tuple[TriedEdit, ...]
    report: UnlearningReport

    @property
    def chosen(self) -> TriedEdit | None:
        """The edit that was chosen, if one was."""
        return self._named(None if self.report.choice is None else self.report.choice.scale)

    @property
    def judged(self) -> TriedEdit | None:
        """The edit that the verdict is on: the chosen one, or else the nearest."""
        return self._named(None if self.report.choice is None else self.report.choice.judged)

    def _named(self, number: float | None) -> TriedEdit | None:
        name = self.report.names.short(number) if number else None
        return next((edit for edit in self.tried if edit.name == name), None)


def search_edits(
    case: ForgetCase,
    kinds: Sequence[EditKind],
    evaluate: Callable[[Mapping[str, TaskVector]], UnlearningReport],
    *,
    rounds: int = 3,
) -> EditSearch:
    """Try edits until one qualifies on the half of the passages that chooses.

    Args:
        case (`ForgetCase`):
            What the edits are made from.
        kinds (`Sequence[str]`):
            Which, the cheapest first: those after one that qualifies are not tried.
        evaluate (`Callable`):
            From all edits so far, by name, to the report that compares them: `sweep` with a store, so that nothing is
            asked twice.
        rounds (`int`, *optional*, defaults to 3):
            How many edits of one kind are made at most. Adjustments of an edit that need no training do not count.

    Returns:
        `EditSearch`: All that was tried.

    Raises:
        `BadValueError`: If there is no round to try in, or no kind has an edit to try.
    """
    check_rounds(rounds)
    tried: list[TriedEdit] = []
    report: UnlearningReport | None = None
    for kind in kinds:
        last, reached, begun = None, None, 0
        progress_line(f"edits of the kind {kind}", case.progress)
        while True:
            edit = ADJUSTMENTS[kind](case, last, reached) if last is not None and kind in ADJUSTMENTS else None
            if edit is None and begun < rounds:
                edit, begun = PROPOSALS[kind](case, last, reached), begun + 1
            if edit is None or any(edit.name == each.name for each in tried):
                break
            tried.append(edit)
            progress_line(f"edit {len(tried)}: {edit.name}", case.progress)
            report = evaluate({each.name: each.vector for each in tried})
            last, reached = edit, _candidate(report, edit.name)
            if report.choice is not None and report.choice.scale:
                return EditSearch(tuple(tried), report)
    if report is None:
        raise BadValueError(
            f"no edit of the kind {' or '.join(kinds)} was found that is better than none: try other kinds."
        )
    return EditSearch(tuple(tried), report)


def check_rounds(rounds: int) -> None:
    """Refuse a number of tries that is none."""
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise BadValueError(f"rounds={rounds!r} must be a whole number of at least 1.")


def _candidate(report: UnlearningReport, name: str) -> Candidate | None:
    found = report.choice.candidates if report.choice is not None else ()
    return next((each for each in found if report.names.short(each.scale) == name), None)
