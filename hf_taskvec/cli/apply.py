"""`taskvec apply`: a whole model with a vector in it."""

from typing import Annotated

import typer

from hf_taskvec import filenames
from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    OverwriteOption,
    ReportOption,
    ScaleOption,
    TokenOption,
    VectorArgument,
    chosen_scale,
    load_vector,
)
from hf_taskvec.cli.dry_run import STREAMING_MEMORY, DryRun, applied_size, weights_size
from hf_taskvec.cli.outputs import check_output, finish_with_report


def apply_command(
    vector: VectorArgument,
    model: ModelArgument,
    output: OutputOption,
    scale: ScaleOption = None,
    report: ReportOption = None,
    dtype: Annotated[str | None, typer.Option(help="Of the result; by default the model's own.")] = None,
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

    No model is ever in memory. With --report the report goes into the output, for its card.
    """
    check_output(output, filenames.MODEL_RECORD, overwrite)
    found = load_vector(vector, token=token)
    amount, measured = chosen_scale(scale, report)
    if dry_run:
        reads = {model: weights_size(model, token), vector: found.nbytes}
        written = applied_size(found, model, dtype, max_shard_size, measured, token)
        would = DryRun(reads, {output.name: written}, STREAMING_MEMORY, [f"λ = {amount:g}"])
        return would.result(output).show(json)
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
    finish_with_report(output, measured, {"scale": amount, "expression": (found * amount).expression}, json)
    return None
