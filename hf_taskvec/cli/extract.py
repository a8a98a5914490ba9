"""`taskvec extract`: what a fine-tune changed in its base."""

from typing import Annotated, Literal, cast

import typer

from hf_taskvec import filenames
from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    StoredDtypeOption,
    TokenOption,
)
from hf_taskvec.cli.dry_run import STREAMING_MEMORY, DryRun, extracted_size, weights_size
from hf_taskvec.cli.outputs import check_output, save_and_report
from hf_taskvec.errors import BadValueError


def extract_command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="BASE TUNED | ADAPTER", help="The base, then the fine-tune (full, or an adapter): τ = tuned − base."
        ),
    ],
    output: OutputOption,
    name: Annotated[str | None, typer.Option(help="What expressions call the vector.")] = None,
    vocabulary: Annotated[
        str | None, typer.Option(help="If the vocabularies differ: truncate, extend, or union (by token).")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="If the heads differ: exclude or match.")] = None,
    initial: Annotated[
        str | None, typer.Option(help="Of PiSSA, OLoRA, …: the adapter as it was before training.")
    ] = None,
    dtype: StoredDtypeOption = None,
    reference: Annotated[bool, typer.Option("--reference", help="Store no tensors, only where they are.")] = False,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Make a task vector: what a fine-tune changed in its base, τ = tuned − base.

    taskvec extract microsoft/phi-1_5 me/phi-1_5-hp1 -o hp1
    """
    from hf_taskvec.extraction.from_any import open_vector
    from hf_taskvec.models.folder_contents import kind_of

    if len(models) > 2:
        raise BadValueError(f"extract takes a base and a fine-tune, or an adapter, not {len(models)} models.")
    check_output(output, filenames.VECTOR_RECORD, overwrite)
    if dry_run:
        sizes = {where: weights_size(where, token) for where in models}
        written, notes = extracted_size(models, dtype, reference, {"vocabulary": vocabulary, "heads": heads}, token)
        return DryRun(sizes, {output.name: written}, STREAMING_MEMORY, notes).result(output).show(json)
    base = models[0] if len(models) == 2 else None
    kind, shown = kind_of(models[-1], base, token)
    if kind == "vector":
        raise BadValueError(f"{shown} is a task vector already.")
    checked_there = cast("Literal['truncate', 'extend', 'union'] | None", vocabulary)
    and_there = cast("Literal['exclude', 'match'] | None", heads)
    vector = open_vector(
        *(models[-1], base), name=name, vocabulary=checked_there, heads=and_there, initial=initial, token=token
    )
    save_and_report(vector, output, json, dtype=dtype, reference=reference, overwrite=overwrite)
    return None
