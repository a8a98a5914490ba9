"""The controls of a sweep: the options, and the vectors of other books that are given for them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hf_taskvec.cli.arguments import load_vector
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.texts.books import Book

ControlsOption = Annotated[bool, typer.Option("--controls", help="Do noise and other vectors forget it as well?")]
ControlVectorOption = Annotated[
    list[str] | None,
    typer.Option("--control-vector", metavar="BOOK=PATH", help="A kept book's vector, for --controls."),
]


def control_paths(
    controls: bool, given: Sequence[str] | None, books: "Sequence[Book]", scales: Sequence[float] | None
) -> dict[str, str]:
    """Where the vectors of other books lie, by the books' names. What allows no controls is refused."""
    from hf_taskvec.evaluation.controls import check_control_books

    if not controls:
        if given:
            raise BadValueError(f"--control-vector {given[0]} counts for --controls only. Give that as well.")
        return {}
    if scales is None:
        raise BadValueError(
            "--controls stand beside one vector, not beside --edit and --grid. Make a vector of the edit that you "
            "take, with `taskvec combine`, and sweep that with --scales 0,1 --controls."
        )
    found: dict[str, str] = {}
    for each in given or ():
        book, _, path = each.partition("=")
        if not book or not path:
            raise BadValueError(f"--control-vector {each}: write it as BOOK=PATH, e.g. oz=vectors/oz.")
        if book in found:
            raise BadValueError(f"--control-vector {each}: {book} has one already. Give one for each book.")
        found[book] = path
    check_control_books(books, found)
    if not any(scales):
        raise BadValueError("--controls are for an edit, but --scales has no λ but 0. Give some, e.g. 0:-1:-0.2.")
    return found


def control_vectors(paths: Mapping[str, str], vector: "TaskVector", token: str | None) -> "dict[str, TaskVector]":
    """The vectors of other books, if they come from the same base as the one that is swept."""
    from hf_taskvec.models.recorded_base import check_same_base

    found = {book: load_vector(path, token=token) for book, path in paths.items()}
    for book, other in found.items():
        check_same_base(vector.provenance, other.provenance, f"the vector of {book}")
    return found
