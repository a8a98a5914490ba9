"""`taskvec merge`: a model by a YAML of mergekit."""

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from hf_taskvec import filenames
from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    TokenOption,
)
from hf_taskvec.cli.dry_run import STREAMING_MEMORY, DryRun, weights_size
from hf_taskvec.cli.outputs import check_output, finish_with_report


def merge_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML as mergekit takes it.")],
    output: OutputOption,
    scale: Annotated[float, typer.Option("--scale", help="λ: how far to go from the base model to the merge.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="For DARE and DELLA, which drop at random.")] = 0,
    vocabulary: Annotated[
        str | None, typer.Option(help="truncate or extend, where embeddings have other numbers of rows.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the result; by default the YAML's, else the base's own.")
    ] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="E.g. 5GB; by default the base's own files.")] = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Write the model that a YAML of mergekit describes, streamed.

    taskvec merge ties.yaml -o merged

    Without mergekit. What it cannot do is refused by name; docs/mergekit.md says what differs.
    """
    from hf_taskvec.integrations import open_merge, read_mergekit_config

    read = read_mergekit_config(config)
    check_output(output, filenames.MODEL_RECORD, overwrite)
    rows = cast('Literal["truncate", "extend"] | None', vocabulary)  # the library checks it
    merge = open_merge(read, seed=seed, vocabulary=rows, token=token)
    if dry_run:
        parts = dict.fromkeys(part for model in read.models for part in model.split("+"))
        sizes = {part: weights_size(part, token) for part in parts}
        written = merge.largest_size(dtype=dtype, max_shard_size=max_shard_size)
        return DryRun(sizes, {output.name: written}, STREAMING_MEMORY).result(output).show(json)
    merge.apply(output, scale=scale, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)
    values = {"method": read.method, "scale": scale, "expression": merge.vector.expression}
    finish_with_report(output, None, values, json)
    return None
