"""What a report is made of: the books, every score with its interval, every text, and how they came about."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.texts.books import Role, Split

UNNAMED = "reference"  # the name of a reference model whose caller gave it none


def named_references(reference: Any) -> dict[str, Any]:
    """The reference models by name: none, one without a name, or several under theirs."""
    if reference is None:
        return {}
    return dict(reference) if isinstance(reference, Mapping) else {UNNAMED: reference}


@dataclass(frozen=True)
class BookInfo:
    """A book of the report; `seen` and `held_out` count its passages."""

    name: str
    role: Role
    fingerprint: str
    seed: int
    seen: int
    held_out: int


@dataclass(frozen=True)
class EditInfo:
    """An edit with a name of its own.

    Args:
        name (`str`):
            What tables call it.
        expression (`str`):
            What it is made of.
        fingerprint (`str`):
            Tells it from any other.
        distance (`float`):
            How far it moves the weights: the norm of the whole change.
    """

    name: str
    expression: str
    fingerprint: str
    distance: float


@dataclass(frozen=True)
class Score:
    """One number of the report. `difference` and `relative` compare with λ=0 on the same passages."""

    book: str
    split: Split
    scale: float
    metric: str
    n: int
    value: Interval
    difference: Interval | None
    relative: Interval | None


@dataclass(frozen=True)
class ReferenceInfo:
    """A model to compare with: its name in tables, its fingerprint, and the batches it was asked in."""

    name: str
    model: str
    batch_size: int
    plan: str


@dataclass(frozen=True)
class ReferenceScore:
    """A score of a reference model. `difference` and `relative` compare it with λ=0 on the same passages."""

    reference: str
    book: str
    split: Split
    metric: str
    n: int
    value: Interval
    difference: Interval
    relative: Interval | None


@dataclass(frozen=True)
class UtilityScore:
    """What an ability that no book measures is, at one λ or of one reference model.

    Args:
        metric (`str`):
            Such as `"arc_easy/acc"`.
        scale (`float`, *optional*):
            λ, or the number of an edit.
        reference (`str`, *optional*):
            The reference model, where it is no λ.
        n (`int`):
            Of how many documents the score is the mean; 0 if it is no mean, or nobody knows. Then it has no interval.
        value (`Interval`):
            The score.
        difference (`Interval`):
            Compared with λ=0, on the same documents.
        dataset (`str`, *optional*):
            What was asked, such as a Hub id; empty if it is not known.
    """

    metric: str
    scale: float | None
    reference: str | None
    n: int
    value: Interval
    difference: Interval
    dataset: str = ""


@dataclass(frozen=True)
class Membership:
    """How well Min-K % tells the seen passages of a book from unseen ones, at one λ.

    `priv_leak` compares with the first reference model, or with chance without one; `None` in reports that lack it.
    """

    book: str
    scale: float
    auc: Interval
    priv_leak: float | None


@dataclass(frozen=True)
class ReferenceMembership:
    """The same of a reference model: near 0.5 unless it has seen the book."""

    reference: str
    book: str
    auc: Interval


@dataclass(frozen=True)
class PassageAtScale:
    """A passage at one λ."""

    scale: float
    output: str
    values: dict[str, float]


@dataclass(frozen=True)
class PassageAtReference:
    """A passage asked of a reference model."""

    reference: str
    output: str
    values: dict[str, float]


@dataclass(frozen=True)
class PassageResult:
    """A passage, what the model wrote after it at each λ, and what each reference model wrote."""

    id: str
    book: str
    split: Split
    prompt: str
    answer: str
    at: tuple[PassageAtScale, ...]
    references: tuple[PassageAtReference, ...] = ()


@dataclass(frozen=True)
class Settings:
    """How the numbers were drawn, and the batch plan: which passages went through the model together."""

    seed: int
    resamples: int
    level: float
    permutations: int
    batch_size: int
    batches: int
    plan: str
    mixed_scales: bool


@dataclass(frozen=True)
class Timing:
    """How long it took, over the sweep and its references; `model_seconds` were spent inside the model."""

    seconds: float
    model_seconds: float
    generated: int
    reused: int
    passages_per_second: float
    processes: int
    halved_batches: int
