"""Commands that touch models: apply, adapter, eval, sweep."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec.cli.common import (
    STREAMING,
    Debug,
    DryRun,
    Json,
    Output,
    Overwrite,
    Plan,
    Report,
    Result,
    Scale,
    Token,
    check_output,
    chosen_scale,
    load_vector,
    numbers,
    register,
    remember,
    size,
    table,
    weights_size,
)
from hf_taskvec.cli.vectors import Vector
from hf_taskvec.errors import BadValueError, UnsupportedError

if TYPE_CHECKING:
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
    from hf_taskvec.evaluation.texts.books import Book

Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model: a folder or a Hub id.")]
Forget = Annotated[
    list[str] | None, typer.Option("--forget", metavar="BOOK", help="A book to forget: text file, folder or data set.")
]
Retain = Annotated[list[str] | None, typer.Option("--retain", metavar="BOOK", help="A book to keep.")]
Aligned = Annotated[list[str] | None, typer.Option("--aligned", metavar="BOOK", help="A related book, for the record.")]
ProtocolName = Annotated[str | None, typer.Option("--protocol", help="How to ask: taskvec-v1, muse-verbmem, …")]
Fields = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the protocol, e.g. samples=50.")
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="Rows in a batch; found by itself.")]
ModelDtype = Annotated[str, typer.Option("--dtype", help="What the model computes in.")]
BlockWords = Annotated[int, typer.Option("--block-words", min=10, help="What is held out as a whole, about.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the split, the intervals and the choice.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    register(app, "Models", {"apply": apply, "adapter": adapter, "eval": evaluate, "sweep": sweep})


def apply(
    vector: Vector,
    model: Model,
    output: Output,
    scale: Scale = None,
    report: Report = None,
    dtype: Annotated[str | None, typer.Option(help="Of the result; by default the model's own.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="E.g. 5GB; by default the model's own files.")] = None,
    strict_base: Annotated[
        bool, typer.Option("--strict-base", help="Refuse a model that the vector was not made from.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Write the model MODEL + λ·VECTOR, streamed.

    taskvec apply hp1 me/books-model --report report -o forgot

    No model is ever in memory. With --report the report goes into the output, for its card.
    """
    from hf_taskvec.application.to_checkpoint import RECORD

    check_output(output, RECORD, overwrite)
    found = load_vector(vector, token=token)
    amount, measured = chosen_scale(scale, report)
    if dry_run:
        reads = {model: weights_size(model, token), vector: found.nbytes}
        plan = Plan(reads, {output.name: weights_size(model, token)}, STREAMING, [f"λ = {amount:g}"])
        return plan.result(output).show(json)
    found.apply(
        model,
        output,
        scale=amount,
        dtype=dtype,
        max_shard_size=max_shard_size,
        strict_base=strict_base,
        overwrite=overwrite,
        token=token,
    )
    _finish(output, measured, {"scale": amount, "expression": (found * amount).expression}, json)
    return None


def _finish(folder: Path, report: "UnlearningReport | None", values: dict[str, Any], as_json: bool) -> None:
    from hf_taskvec.publishing.written_folder import REPORT

    if report is not None:
        report.save(folder / REPORT, plots=False)  # the card draws what it shows
    remember(folder)
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    lines = [f"{folder}: {values['expression']}, {size(nbytes)}"]
    Result({"output": str(folder), **values, "bytes": nbytes}, lines).show(as_json)


def adapter(
    vector: Vector,
    output: Output,
    scale: Scale = None,
    report: Report = None,
    base: Annotated[str | None, typer.Option(help="The base, for its architecture: a folder or a Hub id.")] = None,
    base_name: Annotated[str | None, typer.Option(help="The base's Hub id, for the adapter's config.")] = None,
    rank: Annotated[int | None, typer.Option(help="Compress to this rank first.", min=1)] = None,
    dense: Annotated[
        str, typer.Option(help="Changes that are not low-rank: refuse, save (whole values) or drop.")
    ] = "refuse",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Export λ·VECTOR as a PEFT adapter."""
    from hf_taskvec.application.to_adapter import MARKER

    check_output(output, MARKER, overwrite)
    found = load_vector(vector, token=token)
    amount, measured = chosen_scale(scale, report)
    if measured is not None and rank is not None:
        raise UnsupportedError(
            "a report of the whole vector says nothing of a compressed one: sweep that, or drop --rank."
        )
    if dry_run:
        factors = [found.shape(n) for n in found if len(found.shape(n)) == 2]
        written = sum(4 * (rank or found.rank(n)) * sum(found.shape(n)) for n in found if len(found.shape(n)) == 2)
        largest = max((8 * shape[0] * shape[1] for shape in factors), default=0)
        return Plan({vector: found.nbytes}, {output.name: written}, written + 3 * largest).result(output).show(json)
    if rank is not None:
        found = found.compress(rank=rank)
    found.to_adapter(output, base_name, base=base, dense=dense, overwrite=overwrite, scale=amount)
    _finish(output, measured, {"scale": amount, "expression": (found * amount).expression}, json)
    return None


def evaluate(
    model: Model,
    output: Output,
    forget: Forget = None,
    retain: Retain = None,
    aligned: Aligned = None,
    protocol: ProtocolName = None,
    fields: Fields = None,
    block_words: BlockWords = 1000,
    dtype: ModelDtype = "float32",
    batch_size: BatchSize = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Measure how well a model knows some books.

    taskvec eval me/model --forget hp1.txt --retain pp.txt -o report
    """
    books = _books(forget, retain, aligned, block_words, seed)
    settings = _protocol(protocol, fields)
    if dry_run:
        return _evaluation_plan(model, None, output, token).show(json)
    from hf_taskvec.evaluation import sweep as run

    loaded, tokenizer = _load(model, dtype, token)
    report = run(
        loaded, None, [0.0], books, settings, tokenizer=tokenizer, output=output, batch_size=batch_size, seed=seed
    )
    _tell(report, output, json)
    return None


def sweep(
    vector: Vector,
    model: Model,
    output: Output,
    forget: Forget = None,
    retain: Retain = None,
    aligned: Aligned = None,
    scales: Annotated[str, typer.Option(help="λ: a list, or start:stop:step.")] = "0:-1:-0.2",
    attach: Annotated[
        bool, typer.Option("--attach", help="Low-rank vectors: beside the weights, all λ in one batch.")
    ] = False,
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model that never saw the books to forget.")
    ] = None,
    protocol: ProtocolName = None,
    fields: Fields = None,
    block_words: BlockWords = 1000,
    dtype: ModelDtype = "float32",
    batch_size: BatchSize = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Measure MODEL + λ·VECTOR at many λ, and choose one.

    taskvec sweep hp1 me/books-model --forget hp1.txt --retain pp.txt -o report
    """
    amounts = numbers(scales)
    books = _books(forget, retain, aligned, block_words, seed)
    settings = _protocol(protocol, fields)
    found = load_vector(vector, token=token)
    if dry_run:
        return _evaluation_plan(model, (vector, found.nbytes), output, token).show(json)
    from hf_taskvec.evaluation import sweep as run

    loaded, tokenizer = _load(model, dtype, token)
    never_saw = _load(reference, dtype, token)[0] if reference else None
    edit: Any = found.edit(loaded, 0.0, merge=not attach)
    options: dict[str, Any] = {"tokenizer": tokenizer, "reference": never_saw, "batch_size": batch_size, "seed": seed}
    report = run(loaded, edit, amounts, books, settings, output=output, **options)
    _tell(report, output, json)
    return None


def _books(
    forget: list[str] | None, retain: list[str] | None, aligned: list[str] | None, words: int, seed: int
) -> "list[Book]":
    from hf_taskvec.evaluation import load_book

    given = {"forget": forget, "retain": retain, "aligned": aligned}
    books = [
        load_book(where, role=role, block_words=words, seed=seed)  # type: ignore[arg-type]
        for role, each in given.items()
        for where in each or ()
    ]
    if not books:
        raise BadValueError("no book was given. Name at least one with --forget, --retain or --aligned.")
    return books


def _protocol(name: str | None, fields: list[str] | None) -> Any:
    import ast

    from hf_taskvec.evaluation.texts import protocols

    changes = {}
    for each in fields or ():
        key, equals, text = each.partition("=")
        if not equals:
            raise BadValueError(f"--set {each}: write it as KEY=VALUE, e.g. samples=50.")
        try:
            changes[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            changes[key] = text
    return protocols.get(name, **changes)


def _load(model: str, dtype: str, token: str | None) -> tuple[Any, Any]:
    from hf_taskvec.algebra.rounding import parse_dtype
    from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer

    loaded = load_for_evaluation(model, dtype=parse_dtype(dtype), token=token)
    return loaded, load_tokenizer(model, token=token)


def _evaluation_plan(model: str, vector: tuple[str, int] | None, output: Path, token: str | None) -> Result:
    nbytes = weights_size(model, token)
    reads = {model: nbytes} | ({vector[0]: vector[1]} if vector else {})
    copies = 4 if vector else 2  # in fp32, twice the usual 16 bits; a merged edit keeps the original beside it
    notes = ["the report's size grows with the number of passages; a few MB is usual"]
    return Plan(dict(reads), {output.name: None}, copies * (nbytes or 0), notes).result(output)


def _tell(report: "UnlearningReport", output: Path, as_json: bool) -> None:
    from hf_taskvec.evaluation.asking.asking import processes

    if not processes().is_main_process:
        return
    remember(output)
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
    lines = [table("Rouge-L", ["book", *(f"λ={scale:g}" for scale in report.scales)], rows), ""]
    if choice is not None:
        lines.append(choice.reason)
    lines.append(f"{output}: report.json, report.md and plots, with intervals and all other measures")
    Result(values, lines).show(as_json)
