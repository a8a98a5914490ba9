"""The folder that a command writes: checked before any long work, recorded and told of afterwards."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec import filenames
from hf_taskvec.cli.command_record import record_command
from hf_taskvec.cli.results import CommandResult
from hf_taskvec.sizes import file_size

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.cli.requantised import RequantisedTotals
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport


def check_output(output: Path, marker: str, overwrite: bool) -> None:
    """The library's own check, before any long work."""
    from hf_taskvec.files.output_folder import check_replaceable

    check_replaceable(output, marker, overwrite)


def save_and_report(
    vector: "TaskVector",
    output: Path,
    as_json: bool,
    *,
    dtype: str | None,
    overwrite: bool,
    reference: bool = False,
) -> None:
    """Save a vector, store the command beside it, and tell what was written."""
    from hf_taskvec.files.save_vector import rounding_errors

    vector.save(output, dtype=dtype, reference=reference, overwrite=overwrite)
    errors = {} if dtype is None else rounding_errors(vector, dtype)
    record_command(output)
    nbytes = folder_size(output)
    values = {
        "output": str(output),
        "expression": vector.expression,
        "parameters": len(vector),
        "bytes": nbytes,
        "rounding_errors": errors,
    }
    lines = [f"{output}: {vector.expression}", f"{len(vector)} parameters, {file_size(nbytes)}"]
    if errors:
        name, error = max(errors.items(), key=lambda item: item[1])
        lines.append(f"rounded: the largest relative error is {error:.2g}, of {name}")
    CommandResult(values, lines).show(as_json)


def finish_with_report(
    output: Path,
    report: "UnlearningReport | None",
    values: dict[str, Any],
    as_json: bool,
    requantised: "RequantisedTotals | None" = None,
    more: Sequence[str] = (),
) -> None:
    """Put the report and the command beside a model or an adapter, and tell what was written."""
    if report is not None:
        report.save(output / filenames.REPORT_FOLDER, plots=False)  # the card draws what it shows
    record_command(output)
    nbytes = folder_size(output)
    lines = [f"{output}: {values['expression']}, {file_size(nbytes)}"]
    if requantised is not None:
        values = {**values, "requantised": requantised.to_dict()}
        lines.append(str(requantised))
    lines += more
    CommandResult({"output": str(output), **values, "bytes": nbytes}, lines).show(as_json)


def folder_size(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
