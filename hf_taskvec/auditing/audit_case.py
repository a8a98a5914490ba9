"""What every attack starts from, and what it gives back: an attack is a function from the one to the other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hf_taskvec.auditing.attacked_models import Asking, Judging, Subjects, Values, told_apart
from hf_taskvec.auditing.audit_parts import AttackPoint, Finding, InsideFinding, MembershipFinding
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.statistics import Draws, Interval, auc_interval
from hf_taskvec.evaluation.texts.books import Book
from hf_taskvec.evaluation.texts.passages import Passage


@dataclass(frozen=True)
class AuditCase:
    """The models of an audit, what they are asked and how they are judged, and what they said before any attack.

    Args:
        subjects (`Subjects`):
            The three models.
        books (`tuple` of `Book`):
            All books of the audit.
        passages (`tuple` of `Passage`):
            All that are asked before any attack.
        asking (`Asking`):
            How.
        judging (`Judging`):
            What makes a point of an attack of the answers.
        values (`Mapping[str, Values]`):
            By the model's name, the values of every passage before any attack.
        plain (`AttackPoint`):
            What they come to.
        reference_auc (`dict[str, Interval]`):
            How well the reference tells the passages of each book from unseen ones.
    """

    subjects: Subjects
    books: tuple[Book, ...]
    passages: tuple[Passage, ...]
    asking: Asking
    judging: Judging
    values: Mapping[str, Values]
    plain: AttackPoint
    reference_auc: dict[str, Interval]

    @property
    def forget(self) -> list[Book]:
        """The books to forget."""
        return [book for book in self.books if book.role == "forget"]

    @property
    def seen(self) -> list[Passage]:
        """The passages of these books that the untouched model has seen."""
        return _seen(self.passages, self.forget)


def open_case(
    subjects: Subjects, books: tuple[Book, ...], passages: tuple[Passage, ...], asking: Asking, judging: Judging
) -> AuditCase:
    """Ask the three models before any attack.

    Raises:
        `BadValueError`: If the reference knows a book to forget.
    """
    # The reference first: if it knows the book, nothing else needs to be asked.
    reference = asking.values(subjects.reference, passages, "batches of the reference")
    forget = [book for book in books if book.role == "forget"]
    aucs = _reference_aucs(reference, passages, forget, judging.draws)
    _check_reference(aucs, judging.criteria)
    values = {
        "untouched": asking.values(subjects.untouched, passages, "batches of the untouched model"),
        "edited": asking.values(subjects.edited, passages, "batches of the edited model"),
        "reference": reference,
    }
    kept = _seen(passages, [book for book in books if book.role != "forget"])
    plain = judging.point(0, _seen(passages, forget), values, kept=kept)
    return AuditCase(subjects, books, passages, asking, judging, values, plain, aucs)


def _seen(passages: Sequence[Passage], books: Sequence[Book]) -> list[Passage]:
    names = {book.name for book in books}
    return [passage for passage in passages if passage.split == "seen" and passage.book in names]


def _reference_aucs(
    values: Values, passages: Sequence[Passage], forget: Sequence[Book], draws: Draws
) -> dict[str, Interval]:
    """How well the reference tells the seen passages of each book from unseen ones, by Min-K %."""
    found = {}
    for book in forget:
        seen, unseen = told_apart(passages, book)
        if min(len(seen), len(unseen)) >= draws.fewest:
            first, second = ([values[p.id]["min_k"] for p in group] for group in (seen, unseen))
            found[book.name] = auc_interval(first, second, min(draws.resamples, 500), draws.level, draws.seed)
    return found


def _check_reference(aucs: Mapping[str, Interval], criteria: Criteria) -> None:
    for book, auc in aucs.items():
        if auc.low > 0.5 + criteria.membership:
            raise BadValueError(
                f"the reference model knows {book}: it tells its seen passages from unseen ones with an AUC of "
                f"{auc.value:.2f} [{auc.low:.2f}, {auc.high:.2f}]; 0.5 is not to know it. Give a model that never saw "
                "the book as reference=, such as the base"
            )


@dataclass(frozen=True)
class AttackResult:
    """What one kind of attack brought, in the fields of `AuditReport`.

    Args:
        findings (`tuple` of `Finding`, *optional*):
            Of attacks that ask for passages.
        inside (`InsideFinding`, *optional*):
            Of looking into the models.
        membership (`tuple` of `MembershipFinding`, *optional*):
            Of membership tests.
        not_tried (`dict[str, str]`, *optional*):
            The attacks that could not be made, and why.
    """

    findings: tuple[Finding, ...] = ()
    inside: InsideFinding | None = None
    membership: tuple[MembershipFinding, ...] = ()
    not_tried: dict[str, str] = field(default_factory=dict)


def together(results: Iterable[AttackResult]) -> AttackResult:
    """Several results as one, in their order."""
    each = list(results)
    return AttackResult(
        findings=tuple(finding for result in each for finding in result.findings),
        inside=next((result.inside for result in each if result.inside is not None), None),
        membership=tuple(finding for result in each for finding in result.membership),
        not_tried={name: reason for result in each for name, reason in result.not_tried.items()},
    )
