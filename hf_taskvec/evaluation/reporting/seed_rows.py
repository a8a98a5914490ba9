"""What each seed of an experiment came to: its report as one row of numbers, if the reports may stand side by side."""

from collections.abc import Mapping
from dataclasses import dataclass

from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.drop_tests import PAIRS
from hf_taskvec.evaluation.scoring.scale_choice import Choice
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.scoring.verdict import Overall, Verdict
from hf_taskvec.evaluation.texts.books import Role


@dataclass(frozen=True)
class SeedRow:
    """What one seed came to, on the half of its passages that did not choose λ.

    Args:
        seed (`int`):
            Which.
        scale (`float`, *optional*):
            The λ that was judged, or the number of the edit in its report; `None` if there were too few passages to
            judge any.
        chosen (`bool`):
            Whether it met the criteria on the half that chooses; else it only came nearest.
        outcome (`str`):
            As `Verdict.outcome`; `"cannot_tell"` without a verdict.
        passed (`bool`):
            Whether a λ was chosen, the book is as if never seen there, and the others are kept.
        relative (`dict[str, Interval]`):
            R by each metric, of the book where it is farthest from 1, with its interval over passages. Metrics by which
            the model hardly knew the book are left out.
        membership (`float`, *optional*):
            How far the membership AUC is above the reference's, of the book where it is farthest.
        retained (`dict[str, float]`):
            By each metric, the share that the retained book lost that lost most.
        lost (`dict[tuple[str, str], tuple[float, float]]`):
            For two roles, what the books of each lost of the headline metric, as `LossTest` counts it.
        edit (`str`, *optional*):
            The name of the edit that was judged; `None` if the report is of λ.
        distance (`float`, *optional*):
            How far that edit moves the weights.
    """

    seed: int
    scale: float | None
    chosen: bool
    outcome: Overall
    passed: bool
    relative: dict[str, Interval]
    membership: float | None
    retained: dict[str, float]
    lost: dict[tuple[Role, Role], tuple[float, float]]
    edit: str | None = None
    distance: float | None = None

    @property
    def worst_retained(self) -> float | None:
        """The largest of `retained`."""
        return max(self.retained.values(), default=None)


def checked_choices(reports: Mapping[int, UnlearningReport]) -> dict[int, Choice]:
    """What each seed's report chose, if the reports are one experiment with several seeds.

    Raises:
        `BadValueError`: If there are no reports, or one has no book to forget.
        `MismatchError`: If their protocols or criteria differ, two of them are of one model, or some are of λ and some
            of named edits.
    """
    if not reports:
        raise BadValueError("no reports: a summary over seeds needs at least one")
    choices = {}
    for seed, report in reports.items():
        if report.choice is None:
            raise BadValueError(f"the report of seed {seed} has no book to forget, so nothing in it was judged")
        choices[seed] = report.choice
    models: dict[str, int] = {}
    for seed, report in reports.items():
        if (other := models.setdefault(report.model, seed)) != seed:
            raise MismatchError(
                f"the reports of seeds {other} and {seed} are of one model, so they are one experiment and not two. "
                "Give one report for each seed; two methods on one seed are a pair for compare_methods"
            )
    check_comparable({f"seed {seed}": report for seed, report in reports.items()})
    by_name = [seed for seed, report in reports.items() if report.edits]
    if by_name and len(by_name) < len(reports):
        other = next(seed for seed in reports if seed not in by_name)
        raise MismatchError(
            f"the report of seed {by_name[0]} is of named edits, that of seed {other} of λ: they are two experiments. "
            "Run all seeds alike; two methods on the same seeds are compared by compare_methods"
        )
    return choices


def check_comparable(reports: Mapping[str, UnlearningReport]) -> None:
    """Refuse reports of different protocols or criteria; each has a name for the message, and has chosen.

    Raises:
        `MismatchError`: If two of them differ.
    """
    (first, base), *rest = reports.items()
    for name, report in rest:
        if (report.protocol.name, report.protocol.hash) != (base.protocol.name, base.protocol.hash):
            raise MismatchError(
                f"{first} was measured under protocol {base.protocol.id}, {name} under {report.protocol.id}: "
                "their scores are not comparable. Run all under one protocol"
            )
        assert base.choice is not None and report.choice is not None
        if report.choice.criteria != base.choice.criteria:
            raise MismatchError(
                f"{first} was judged by {base.choice.criteria}, {name} by {report.choice.criteria}: judge all alike, "
                "by report.rechoose(criteria)"
            )


def seed_row(seed: int, report: UnlearningReport, choice: Choice) -> SeedRow:
    """What one seed came to, from its report and what that chose."""
    retained: dict[str, float] = {}
    apart: list[float] = []
    verdict, judged = choice.verdict, choice.judged
    if verdict is not None:
        for loss in verdict.retained:
            retained[loss.metric] = max(retained.get(loss.metric, loss.lost.value), loss.lost.value)
        apart = [member.difference.value for member in verdict.membership]
    return SeedRow(
        seed=seed,
        scale=judged,
        chosen=choice.scale is not None,
        outcome="cannot_tell" if verdict is None else verdict.outcome,
        passed=choice.scale is not None and verdict is not None and verdict.passed,
        relative={} if verdict is None else relative_by_metric(verdict),
        membership=max(apart, key=abs, default=None),
        retained=retained,
        lost=_lost(report, choice),
        edit=report.names.short(judged) if report.edits and judged is not None else None,
        distance=report.distance(judged) if report.edits and judged is not None else None,
    )


def relative_by_metric(verdict: Verdict) -> dict[str, Interval]:
    """R by each metric, of the book where it is farthest from 1; without metrics by which no book was known.

    Args:
        verdict (`Verdict`):
            On one λ, or on one attack.

    Returns:
        `dict[str, Interval]`: R with its interval over passages.
    """
    relative: dict[str, Interval] = {}
    for found in verdict.metrics:
        old = relative.get(found.metric)
        if found.relative is not None and (old is None or abs(found.relative.value - 1) > abs(old.value - 1)):
            relative[found.metric] = found.relative
    return relative


def _lost(report: UnlearningReport, choice: Choice) -> dict[tuple[Role, Role], tuple[float, float]]:
    """What the books of two roles lost, each role's books averaged."""
    roles = {book.name: book.role for book in report.books}
    found = {}
    for pair in PAIRS:
        tests = [test for test in choice.tests if (roles.get(test.first), roles.get(test.second)) == pair]
        if tests:
            sides = ([test.first_loss for test in tests], [test.second_loss for test in tests])
            found[pair] = (sum(sides[0]) / len(tests), sum(sides[1]) / len(tests))
    return found
