"""`taskvec combine`: calculating with vectors."""

from typing import Annotated

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
    load_vector,
    named_paths,
)
from hf_taskvec.cli.dry_run import STREAMING_MEMORY, DryRun, combined_size, weights_size
from hf_taskvec.cli.outputs import check_output, save_and_report
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean


def combine_command(
    expression: Annotated[
        str, typer.Argument(metavar='"EXPRESSION"', help='E.g. "-0.6*hp1 + 0.2*hp2" or "compress(a - b, rank=8)".')
    ],
    vectors: Annotated[list[str], typer.Argument(metavar="[NAME=]VECTOR", help="What the names stand for.")],
    output: OutputOption,
    dtype: StoredDtypeOption = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    r"""Calculate with vectors, and save the result.

    taskvec combine "-0.6*hp1 + 0.2*hp2" hp1=vectors/hp1 hp2=me/hp2-vector -o forget

    Numbers, names, + - * /, brackets, compress(v, rank=8), filter(v, include="*.mlp.*"),
    scale(v, by={...}), and merging rules by name:
    combine(\[a, b], "ties", weights=\[1, -0.5], density=0.2). Python's hf_taskvec.rules() lists them.
    """
    from hf_taskvec.publishing.notation import evaluate_expression, names_in

    paths = named_paths(vectors)
    for name in names_in(expression):
        if name not in paths:
            raise MissingNameError(
                f"the expression has {name!r}, which no argument names.{did_you_mean(name, paths)} Add {name}=PATH."
            )
    if unused := [name for name in paths if name not in names_in(expression)]:
        raise BadValueError(f"the expression does not use {unused[0]!r}. Leave that argument out, or use it.")
    check_output(output, filenames.VECTOR_RECORD, overwrite)
    if dry_run:
        sizes = {path: weights_size(path, token) for path in paths.values()}
        written = combined_size(expression, paths, dtype, token)
        return DryRun(sizes, {output.name: written}, STREAMING_MEMORY).result(output).show(json)
    loaded = {name: load_vector(path, name, token) for name, path in paths.items()}
    result = evaluate_expression(expression.strip(), loaded)
    save_and_report(result, output, json, dtype=dtype, overwrite=overwrite)
    return None
