"""`taskvec adapter`: a vector as a PEFT adapter."""

from typing import Annotated, Any, Literal, cast

import typer

from hf_taskvec import filenames
from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    ReportOption,
    ScaleOption,
    TokenOption,
    VectorArgument,
    chosen_scale,
    load_vector,
)
from hf_taskvec.cli.dry_run import DryRun, adapter_size
from hf_taskvec.cli.outputs import check_output, finish_with_report
from hf_taskvec.errors import UnsupportedError


def adapter_command(
    vector: VectorArgument,
    output: OutputOption,
    scale: ScaleOption = None,
    report: ReportOption = None,
    base: Annotated[str | None, typer.Option(help="The base, for its architecture: a folder or a Hub id.")] = None,
    base_name: Annotated[str | None, typer.Option(help="The base's Hub id, for the adapter's config.")] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave out parameters by a glob pattern, such as '*embed*'; as often as needed."),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Compress to this rank first.", min=1)] = None,
    dense: Annotated[
        str, typer.Option(help="Changes that are not low-rank: refuse, save (whole values) or drop.")
    ] = "refuse",
    serve: Annotated[
        str | None,
        typer.Option(help="For an engine without PEFT: vllm or llama.cpp. Tells the command that serves it."),
    ] = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Export λ·VECTOR as a PEFT adapter."""
    check_output(output, filenames.ADAPTER_RECORD, overwrite)
    found = load_vector(vector, token=token)
    amount, measured = chosen_scale(scale, report)
    if measured is not None and (rank is not None or exclude):
        raise UnsupportedError(
            "a report of the whole vector says nothing of a part or of a compressed one: sweep that, or drop --rank "
            "and --exclude."
        )
    if exclude:
        found = found.filter(exclude=exclude)
    if dry_run:
        factors = [found.shape(n) for n in found if len(found.shape(n)) == 2]
        written = adapter_size(found, rank, dense, measured)
        largest = max((8 * shape[0] * shape[1] for shape in factors), default=0)
        return DryRun({vector: found.nbytes}, {output.name: written}, written + 3 * largest).result(output).show(json)
    if rank is not None:
        found = found.compress(rank=rank)
    checked_there = cast("Literal['refuse', 'save', 'drop']", dense)
    engine = cast("Literal['vllm', 'llama.cpp'] | None", serve)
    found.to_adapter(output, base_name, base=base, dense=checked_there, serve=engine, overwrite=overwrite, scale=amount)
    values: dict[str, Any] = {"scale": amount, "expression": (found * amount).expression}
    lines = []
    if engine is not None:
        from hf_taskvec.application.serving import max_lora_rank, serving_command

        if engine == "vllm":
            values["max_lora_rank"] = max_lora_rank(output)
        lines = [serving_command(output, engine, base_name or base)]
    finish_with_report(output, measured, values, json, more=lines)
    return None
