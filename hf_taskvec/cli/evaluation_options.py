"""What `eval` and `sweep` share: the books, the protocol, the model, and the report on the screen."""

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec.cli.command_record import record_command
from hf_taskvec.cli.dry_run import DryRun, weights_size
from hf_taskvec.cli.results import CommandResult, TextTable
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
    from hf_taskvec.evaluation.texts.books import Book, Role
    from hf_taskvec.evaluation.texts.protocols import Protocol

ForgetOption = Annotated[
    list[str] | None, typer.Option("--forget", metavar="BOOK", help="A book to forget: text file, folder or data set.")
]
RetainOption = Annotated[list[str] | None, typer.Option("--retain", metavar="BOOK", help="A book to keep.")]
AlignedOption = Annotated[
    list[str] | None, typer.Option("--aligned", metavar="BOOK", help="A related book, for the record.")
]
ProtocolOption = Annotated[str | None, typer.Option("--protocol", help="How to ask: taskvec-v1, muse-verbmem, …")]
ProtocolFieldsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the protocol, e.g. samples=50.")
]
BatchSizeOption = Annotated[int | None, typer.Option("--batch-size", min=1, help="Rows in a batch; found by itself.")]
ModelDtypeOption = Annotated[str, typer.Option("--dtype", help="What the model computes in.")]
BlockWordsOption = Annotated[int, typer.Option("--block-words", min=10, help="What is held out as a whole, about.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the split, the intervals and the choice.")]


def load_books(
    forget: list[str] | None, retain: list[str] | None, aligned: list[str] | None, block_words: int, seed: int
) -> "list[Book]":
    """The books that were named, each with its role."""
    from hf_taskvec.evaluation import load_book

    given: dict[Role, list[str] | None] = {"forget": forget, "retain": retain, "aligned": aligned}
    books = [
        load_book(where, role=role, block_words=block_words, seed=seed)
        for role, each in given.items()
        for where in each or ()
    ]
    if not books:
        raise BadValueError("no book was given. Name at least one with --forget, --retain or --aligned.")
    return books


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


def evaluation_dry_run(model: str, vector: tuple[str, int] | None, output: Path, token: str | None) -> CommandResult:
    """What measuring a model would read and write. A vector is given as its name and its bytes."""
    nbytes = weights_size(model, token)
    reads = {model: nbytes} | ({vector[0]: vector[1]} if vector else {})
    copies = 4 if vector else 2  # in fp32, twice the usual 16 bits; a merged edit keeps the original beside it
    notes = ["the report's size grows with the number of passages; a few MB is usual"]
    return DryRun(dict(reads), {output.name: None}, copies * (nbytes or 0), notes).result(output)


def show_report(report: "UnlearningReport", output: Path, as_json: bool) -> None:
    """Store the command beside the report, and show the scores and the choice of λ; in the main process only."""
    from hf_taskvec.distributed import processes

    if not processes().is_main_process:
        return
    record_command(output)
    shown = [score for score in report.scores if score.metric == "rouge_l"]
    choice = report.choice
    values = {
        "output": str(output),
        "protocol": report.protocol.id,
        "scale": choice.scale if choice else None,
        "reason": choice.reason if choice else None,
        "rouge_l": [
            {
                "book": s.book,
                "split": s.split,
                "scale": s.scale,
                "value": s.value.value,
                "low": s.value.low,
                "high": s.value.high,
            }
            for s in shown
        ],
    }
    rows = []
    for book in report.books:
        for split in ("seen", "held_out"):
            here = {s.scale: s.value for s in shown if (s.book, s.split) == (book.name, split)}
            if here:
                cells = [f"{here[scale].value:.3f}" for scale in report.scales]
                rows.append((f"{book.name} ({book.role}, {split.replace('_', ' ')})", *cells))
    lines: list[str | TextTable] = [
        TextTable("Rouge-L", ["book", *(f"λ={scale:g}" for scale in report.scales)], rows),
        "",
    ]
    if choice is not None:
        lines.append(choice.reason)
    lines.append(f"{output}: report.json, report.md and plots, with intervals and all other measures")
    CommandResult(values, lines).show(as_json)
