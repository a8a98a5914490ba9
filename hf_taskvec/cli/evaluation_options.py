"""What `eval`, `sweep` and `audit` share: the books, the protocol and the models."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec.cli.dry_run import DryRun, weights_size
from hf_taskvec.cli.results import CommandResult
from hf_taskvec.errors import BadValueError
from hf_taskvec.hub_names import is_folder

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.texts.books import Book, Role
    from hf_taskvec.evaluation.texts.protocols import Protocol

ForgetOption = Annotated[
    list[str] | None, typer.Option("--forget", metavar="BOOK", help="A book to forget: text file, folder or data set.")
]
RetainOption = Annotated[list[str] | None, typer.Option("--retain", metavar="BOOK", help="A book to keep.")]
AlignedOption = Annotated[
    list[str] | None, typer.Option("--aligned", metavar="BOOK", help="A related book, for the record.")
]
UnseenOption = Annotated[
    list[str] | None, typer.Option("--unseen", metavar="BOOK", help="Text like it that no model was trained on.")
]
AllSeenOption = Annotated[bool, typer.Option("--all-seen", help="Trained on the whole books: hold nothing out.")]
HeldOutOption = Annotated[
    float | None, typer.Option("--held-out", metavar="SHARE", help="Of each book, not trained on; 0.3.")
]
ProtocolOption = Annotated[str | None, typer.Option("--protocol", help="How to ask: taskvec-v1, muse-verbmem, …")]
ProtocolFieldsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the protocol, e.g. samples=50.")
]
BatchSizeOption = Annotated[
    int | None, typer.Option("--batch-size", metavar="ROWS", min=1, help="In a batch; found by itself.")
]
ModelDtypeOption = Annotated[str, typer.Option("--dtype", help="What the model computes in.")]
BlockWordsOption = Annotated[
    int, typer.Option("--block-words", metavar="WORDS", min=10, help="Held out together, about.")
]
UtilityOption = Annotated[
    list[str] | None, typer.Option("--utility", metavar="TASK", help="A task of lm-eval, asked at each λ: arc_easy, …")
]
UtilityLimitOption = Annotated[
    int | None, typer.Option("--utility-limit", metavar="N", min=1, help="Of each task, the first N documents.")
]
LogWithOption = Annotated[
    list[str] | None, typer.Option("--log-with", metavar="TRACKER", help="tensorboard, wandb, trackio, …")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of split, intervals and choice.")]

#: what is typed for the vector's own base
OWN_BASE = "base"


def load_books(given: "Mapping[Role, list[str] | None]", *, held_out: float | None, **options: Any) -> "list[Book]":
    """The books that were named for each role; `options` are those of `load_book`."""
    from hf_taskvec.evaluation import load_book

    if held_out is not None:
        options["held_out"] = held_out
    books = [load_book(where, role=role, **options) for role, each in given.items() for where in each or ()]
    if not books:
        raise BadValueError("no book was given. Name at least one with --forget, --retain or --aligned.")
    return books


def held_out_share(all_seen: bool, held_out: float | None) -> float | None:
    """The share of the books that is held out: 0 with `--all-seen`; `None` is the library's own."""
    if all_seen and held_out:
        raise BadValueError(f"--all-seen holds nothing out, --held-out {held_out:g} does: give one of them.")
    return 0.0 if all_seen else held_out


def chosen_protocol(name: str | None, fields: list[str] | None) -> "Protocol":
    """The protocol of that name, with the fields changed that `--set KEY=VALUE` names."""
    from hf_taskvec.evaluation.texts import protocols

    changes: dict[str, Any] = {}
    for each in fields or ():
        key, equals, text = each.partition("=")
        if not equals:
            raise BadValueError(f"--set {each}: write it as KEY=VALUE, e.g. samples=50.")
        try:
            changes[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            changes[key] = text
    return protocols.get(name, **changes)


def load_model(model: str, dtype: str, token: str | None) -> tuple[Any, Any]:
    """A model on this process's device, and its tokenizer."""
    from hf_taskvec.algebra.rounding import parse_dtype
    from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer

    loaded = load_for_evaluation(model, dtype=parse_dtype(dtype), token=token)
    return loaded, load_tokenizer(model, token=token)


def load_reference(where: str | None, name: str | None, dtype: str, token: str | None) -> dict[str, Any] | None:
    """A model to compare with, under the name that tables show: by default its folder's name, or its Hub id."""
    if where is None:
        return None
    return {name or (Path(where).resolve().name if is_folder(where) else where): load_model(where, dtype, token)[0]}


def own_base(where: Iterable[str], vector: "TaskVector") -> str:
    """Where the base of a vector lies: on the Hub, here, or beside one of the folders that it was read from."""
    from hf_taskvec.models.recorded_base import find_base

    return find_base(vector.provenance, (Path(), *(Path(each).parent for each in where)))


def answers_note(books: "Sequence[Book]", protocol: "Protocol", asked: int) -> list[str]:
    """How many passages a sweep asks for, and how many answers that makes; nothing where only a tokenizer tells.

    Raises:
        `BadValueError`: If a book is too short for the protocol, as the sweep itself would say.
    """
    from hf_taskvec.evaluation.texts.leaks import find_all_passages

    if protocol.unit == "tokens":
        return []
    count = len(find_all_passages(books, protocol, None)[0])
    return [f"{count:,} passages, asked {asked} times: {count * asked:,} answers; the sweep tells the time they take"]


def evaluation_dry_run(
    model: str,
    vectors: Mapping[str, int],
    reference: str | None,
    output: Path,
    token: str | None,
    notes: Sequence[str] = (),
) -> CommandResult:
    """What measuring a model would read and write; of the vectors, one after another on the model, the bytes."""
    sizes = {model: weights_size(model, token)} | ({reference: weights_size(reference, token)} if reference else {})
    copies = 4 if vectors else 2  # in fp32, twice the usual 16 bits; a merged edit keeps the original beside it
    memory = copies * (sizes[model] or 0) + (2 * (sizes[reference] or 0) if reference else 0)
    told = ["the report's size grows with the number of passages; a few MB is usual", *notes]
    return DryRun({**sizes, **vectors}, {output.name: None}, memory, told).result(output)
