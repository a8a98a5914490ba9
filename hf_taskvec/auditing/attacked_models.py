"""The three models of an audit, asked for the same passages in the same way."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_taskvec.auditing.audit_parts import AttackPoint, MetricResult
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.metrics import METRICS, measure_answers
from hf_taskvec.evaluation.scoring.statistics import Array, Draws
from hf_taskvec.evaluation.scoring.verdict import BookColumns, Half, judge
from hf_taskvec.evaluation.texts.books import Book
from hf_taskvec.evaluation.texts.passages import Passage
from hf_taskvec.evaluation.texts.protocols import Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages

#: for each passage's id its metrics by name
Values = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Subjects:
    """The live models that every attack is made on.

    Args:
        untouched (`PreTrainedModel`):
            Knows the book.
        edited (`PreTrainedModel`):
            Is said to have forgotten it.
        reference (`PreTrainedModel`):
            Never saw it.
    """

    untouched: Any
    edited: Any
    reference: Any

    @property
    def by_name(self) -> dict[str, Any]:
        """The three by the names that reports use."""
        return {"untouched": self.untouched, "edited": self.edited, "reference": self.reference}


@contextmanager
def open_subjects(
    model: "PreTrainedModel", change: "TaskVector | PreTrainedModel", reference: Any
) -> Iterator[Subjects]:
    """The three models; a vector is written into a copy of the model, which is let go of afterwards."""
    import torch

    from hf_taskvec.algebra.task_vector import TaskVector

    for what, each in (("model", model), ("reference", reference)):
        if not isinstance(each, torch.nn.Module):
            raise BadValueError(f"{what}= must be a live model, not a {type(each).__name__}. Load it first.")
    if isinstance(change, TaskVector):
        edited = copy.deepcopy(model)
        change.edit(edited).keep()
    elif isinstance(change, torch.nn.Module):
        edited = change
    else:
        raise BadValueError(
            "the edit must be a task vector, scaled by its λ, or the edited model itself, not a "
            f"{type(change).__name__}"
        )
    if edited is model or reference in (model, edited):
        raise BadValueError("the model, the edited model and the reference must be three models, not one twice")
    yield Subjects(model, edited, reference)


@dataclass(frozen=True)
class Asking:
    """How passages are asked, and where what is finished is kept: the same for all models and attacks.

    Args:
        protocol (`Protocol`):
            How the model is asked.
        tokenizer (`PreTrainedTokenizerBase`):
            Of all three models.
        store (`FinishedPassages`):
            Keeps what is finished; an interrupted audit goes on from it.
        batch_size (`int`, *optional*):
            Rows in one batch.
        progress (`bool`, *optional*):
            Show progress bars.
    """

    protocol: Protocol
    tokenizer: Any
    store: "FinishedPassages"
    batch_size: int | None
    progress: bool | None

    def values(self, model: Any, passages: Sequence[Passage], label: str) -> dict[str, dict[str, float]]:
        """Every metric of every passage, by the passage's id."""
        from hf_taskvec.evaluation.asking.batched_asking import ask
        from hf_taskvec.evaluation.asking.scalable_edits import NoEdit

        asked = ask(
            model,
            NoEdit(),
            (0.0,),
            passages=passages,
            protocol=self.protocol,
            tokenizer=self.tokenizer,
            store=self.store,
            batch_size=self.batch_size,
            label=label,
            progress=self.progress,
        )
        answers = measure_answers(asked, 0.0, self.protocol)
        return {passage.text.id: values for passage, (_, values) in zip(asked.passages, answers, strict=True)}


@dataclass(frozen=True)
class Judging:
    """What turns the three models' values into a point of an attack."""

    criteria: Criteria
    draws: Draws

    def point(
        self,
        step: int,
        passages: Sequence[Passage],
        values: Mapping[str, Values],
        criteria: Criteria | None = None,
        kept: Sequence[Passage] = (),
    ) -> AttackPoint:
        """The verdict on the edited model between the other two, on these passages.

        Args:
            step (`int`):
                How much of the attack was made.
            passages (`Sequence[Passage]`):
                Those that were asked, of the forget books.
            values (`Mapping`):
                By the model's name, the values of each passage.
            criteria (`Criteria`, *optional*):
                Others than the audit's.
            kept (`Sequence[Passage]`, *optional*):
                Of books to keep: a model that forgets everything has not forgotten a book.
        """
        judged = criteria or self.criteria
        books, others = _by_book(passages), _by_book(kept)
        measured = [name for name in METRICS if name in next(iter(values["edited"].values()))]

        def column(name: str, ids: Sequence[str], metric: str) -> Array:
            return np.array([values[name][each][metric] for each in ids])

        def columns(ids: Sequence[str], metric: str) -> BookColumns:
            at = {0.0: column("untouched", ids, metric), 1.0: column("edited", ids, metric)}
            return BookColumns(at, column("reference", ids, metric))

        forget, retain = (
            {book: {m: columns(ids, m) for m in judged.judged} for book, ids in group.items()}
            for group in (books, others)
        )
        half = Half(forget, retain, None)
        every = [passage.id for passage in passages]
        draw = self.draws.bootstrap(len(every))
        results = []
        for name in measured:
            geometric = METRICS[name].geometric
            three = {model: column(model, every, name) for model in values}
            means = {model: draw.mean(each, geometric) for model, each in three.items()}
            difference = draw.difference(three["edited"], three["reference"], geometric)
            results.append(MetricResult(name, means["untouched"], means["edited"], means["reference"], difference))
        return AttackPoint(step, len(every), tuple(results), judge(1.0, half, judged, METRICS, self.draws))


def _by_book(passages: Sequence[Passage]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for passage in passages:
        found.setdefault(passage.book, []).append(passage.id)
    return found


def told_apart(passages: Sequence[Passage], book: Book) -> tuple[list[Passage], list[Passage]]:
    """A book's seen passages, and unseen ones: of text that was declared unseen, or its own held-out ones."""
    seen = [p for p in passages if p.book == book.name and p.split == "seen"]
    own = [p for p in passages if p.book == book.name and p.split == "held_out"]
    books_with_seen = {p.book for p in passages if p.split == "seen"}
    declared = [p for p in passages if p.split == "held_out" and p.book not in books_with_seen]
    return seen, declared or own
