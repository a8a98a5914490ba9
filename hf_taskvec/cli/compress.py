"""`taskvec compress`: a vector at low rank."""

from typing import Annotated

import typer

from hf_taskvec import filenames
from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    TokenOption,
    VectorArgument,
    load_vector,
)
from hf_taskvec.cli.command_record import record_command
from hf_taskvec.cli.dry_run import DryRun, compressed_size
from hf_taskvec.cli.outputs import check_output, folder_size
from hf_taskvec.cli.results import CommandResult, largest_first
from hf_taskvec.errors import BadValueError
from hf_taskvec.sizes import file_size


def compress_command(
    vector: VectorArgument,
    output: OutputOption,
    rank: Annotated[int | None, typer.Option(help="Keep this rank of each matrix.", min=1)] = None,
    energy: Annotated[float | None, typer.Option(help="Keep this share of the squared norm.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Allow this relative error.")] = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Approximate the matrices of a vector at low rank.

    Give one of --rank, --energy and --tolerance.
    """
    given = [value for value in (rank, energy, tolerance) if value is not None]
    if len(given) != 1:
        raise BadValueError("give one of --rank, --energy and --tolerance.")
    check_output(output, filenames.VECTOR_RECORD, overwrite)
    found = load_vector(vector, token=token)
    if dry_run:
        shapes = [found.shape(name) for name in found]
        matrices = [shape for shape in shapes if len(shape) == 2]
        largest = max((8 * shape[0] * shape[1] for shape in matrices), default=0)
        return (
            DryRun({vector: found.nbytes}, {output.name: compressed_size(found, rank)}, 3 * largest)
            .result(output)
            .show(json)
        )
    small = found.compress(rank=rank, energy=energy, tolerance=tolerance)
    small.save(output, overwrite=overwrite)
    record_command(output)
    nbytes = folder_size(output)
    ranks = [small.rank(name) for name in small if len(small.shape(name)) == 2]
    worst = largest_first(small.discarded, 1)
    values = {
        "output": str(output),
        "expression": small.expression,
        "bytes": nbytes,
        "ranks": [min(ranks), max(ranks)] if ranks else [],
        "discarded": dict(small.discarded),
    }
    lines = [f"{output}: {small.expression}", f"{file_size(nbytes)}, before {file_size(found.nbytes)}"]
    if ranks:
        lines.append(f"ranks {min(ranks)} to {max(ranks)}")
    if worst:
        lines.append(f"discarded at most {worst[0][1]:.2%} of a matrix's squared norm, of {worst[0][0]}")
    CommandResult(values, lines).show(json)
    return None
