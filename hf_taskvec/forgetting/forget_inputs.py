"""What `forget` is given: books with their roles, models that fit together, settings where none are named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.texts.books import Book, Role, load_book
from hf_taskvec.evaluation.texts.text_overlap import check_books_differ
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.trained_model import TrainingBase

if TYPE_CHECKING:
    import datasets

#: a book, or where its text lies
BookLike = Book | str | Path

_EPOCHS = 5


def checked_books(book: BookLike | Sequence[BookLike], keep: BookLike | Sequence[BookLike]) -> tuple[Book, ...]:
    """The books with their roles. A text file is taken whole: nobody knows that some of it was held out."""

    def read(given: BookLike | Sequence[BookLike], roles: tuple[Role, ...]) -> list[Book]:
        each = [given] if isinstance(given, Book | str | Path) else list(given)
        found = [one if isinstance(one, Book) else load_book(one, role=roles[0], held_out=0.0) for one in each]
        return [one if one.role in roles else replace(one, role=roles[0]) for one in found]

    books = (*read(book, ("forget",)), *(kept := read(keep, ("retain", "aligned"))))
    if not kept:
        raise BadValueError(
            "there is no text to keep: without some of it nobody can tell what forgetting costs, nor repair it. Give "
            "text that the model shall still know, as keep=['other.txt']."
        )
    if len(books) == len(kept):
        raise BadValueError("there is no book to forget.")
    check_books_differ(books)
    return books


def default_training(seed: int) -> TrainingSettings:
    """How the book's vector is trained if nobody says so."""
    return TrainingSettings(epochs=_EPOCHS, seed=seed)


def default_repairing(training: TrainingSettings) -> TrainingSettings:
    """How a model is repaired if nobody says so."""
    return replace(
        training,
        epochs=-(-training.epochs // 2),
        batch_size=max(1, training.batch_size // 2),
        micro_batch_size=None,
    )


def model_fingerprints(source: TrainingBase, models: Mapping[str, str | Path | None]) -> dict[str, str]:
    """What each model is known by; each must be of the model's shape."""
    shapes = {name: tensor.shape for name, tensor in source.weights.tensors.items()}
    found = {}
    for role, where in models.items():
        if where is None:
            continue
        opened = open_checkpoint(where)
        if {name: tensor.shape for name, tensor in opened.tensors.items()} != shapes:
            raise BadValueError(f"the {role} {opened.name} is not of the model's shape: they do not fit together.")
        found[role] = opened.sampled_fingerprint
    return found


def never_seen_model(
    vector: TaskVector | None, base: str | Path | None, reference: str | Path | None, prints: Mapping[str, str]
) -> str | Path:
    """The model that stands for never having seen the book."""
    if vector is None and base is None:
        raise BadValueError(
            "neither the book's vector nor a base to make it from is given. Name the model that this one was "
            "fine-tuned from: base=MODEL."
        )
    if prints.get("reference") == prints["model"]:
        raise BadValueError("the reference is the model itself, which knows the book. Give one that never saw it.")
    if reference is not None:
        return reference
    if base is None:
        raise BadValueError("no model is given that never saw the book: give base=MODEL or reference=MODEL.")
    if prints["base"] == prints["model"]:
        raise BadValueError(
            "the base is the model itself, which knows the book: give a model that never saw it, reference=MODEL."
        )
    return base


@dataclass(frozen=True)
class PackedTexts:
    """How text becomes blocks."""

    tokenizer: Any
    length: int
    stride: int | None

    def blocks(self, books: Sequence[Book]) -> "datasets.Dataset":
        """The packed blocks of some books, one after another."""
        import datasets

        return datasets.concatenate_datasets(
            [book.training_blocks(self.tokenizer, self.length, self.stride) for book in books]
        )
