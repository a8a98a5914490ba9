"""`taskvec apply`: a whole model with a vector in it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from hf_taskvec import filenames
from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    ModelArgument,
    OverwriteOption,
    ReportOption,
    ScaleOption,
    TokenOption,
    VectorArgument,
    chosen_scale,
    load_vector,
)
from hf_taskvec.cli.dry_run import STREAMING_MEMORY, DryRun, applied_size, pushing_notes, weights_size
from hf_taskvec.cli.outputs import check_output, finish_with_report
from hf_taskvec.cli.requantised import requantised_totals
from hf_taskvec.cli.results import CommandResult
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.application.to_checkpoint import MergeOptions


def _difference(base: str, tuned: str, token: str | None) -> "TaskVector":
    """A full fine-tune less its base, of which nothing is downloaded that is on the Hub."""
    from hf_taskvec.algebra.task_vector import TaskVector

    return TaskVector.from_finetuned(base, tuned, stream=True, token=token)


def apply_command(
    vector: VectorArgument,
    model: ModelArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="REPO_ID", help="Push it shard by shard instead of writing a folder."),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="VECTOR is a full fine-tune of this, read as needed.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make the repository private.")] = False,
    scale: ScaleOption = None,
    report: ReportOption = None,
    dtype: Annotated[str | None, typer.Option(help="Of the result; by default the model's own.")] = None,
    requantise: Annotated[
        str | None,
        typer.Option(help="same or bf16: how to store a model of fewer bits."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="MODEL's own, for a vector of --vocabulary union.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="E.g. 5GB; by default the model's own files.")] = None,
    strict_base: Annotated[
        bool, typer.Option("--strict-base", help="Refuse a model whose bytes the vector was not made from.")
    ] = False,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Write the model MODEL + λ·VECTOR, streamed.

    taskvec apply hp1 me/books-model --report report -o forgot

    taskvec apply me/tuned me/model --base me/base --scale -1 --push me/merged

    No model is ever in memory. With --report the report goes into the output, for its card.
    With --push neither memory nor disk holds a model: a shard is uploaded and makes room for the next.
    A model stored in fewer bits (FP8, GPTQ, …) needs --requantise: "same" stores it so again, and
    taskvec_apply.json tells what that leaves of each weight's edit; "bf16" stores it without.
    """
    if (output is None) == (push is None):
        raise BadValueError("give either --output FOLDER or --push REPO_ID.")
    if output is not None:
        check_output(output, filenames.MODEL_RECORD, overwrite)
    found = load_vector(vector, token=token) if base is None else _difference(base, vector, token)
    amount, measured = chosen_scale(scale, report)
    if dry_run:
        reads = {model: weights_size(model, token), vector: found.nbytes}
        written = applied_size(found, model, dtype, max_shard_size, measured, token, requantise, tokenizer)
        notes = [f"λ = {amount:g}"]
        if push is not None:
            notes += pushing_notes(model, sum(size or 0 for size in reads.values()), written, token)
        name = str(push) if output is None else output.name
        return DryRun(reads, {name: written}, STREAMING_MEMORY, notes).result(output).show(json)
    options: MergeOptions = {
        "scale": amount,
        "dtype": dtype,
        "requantise": cast("Literal['same', 'bf16'] | None", requantise),  # the library checks it
        "tokenizer": tokenizer,
        "max_shard_size": max_shard_size,
        "strict_base": strict_base,
        "token": token,
    }
    if output is None:
        pushed = found.apply(model, push_to=str(push), report=measured, private=private or None, **options)
        told = pushed.url if pushed.changed else "unchanged, no commit made"
        return CommandResult({**vars(pushed), "scale": amount}, [f"{push}: {told}"]).show(json)
    found.apply(model, output, overwrite=overwrite, **options)
    values = {"scale": amount, "expression": (found * amount).expression}
    finish_with_report(output, measured, values, json, requantised_totals(output))
    return None
