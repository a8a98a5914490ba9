"""A task vector -> checkpoint, streamed: one pass over the base's tensors, each byte written once.

Memory holds a few tiles for each thread, whatever the size of the model and the number of vectors. The output appears
under its name when it is complete; an interrupted run is resumed, keeping the files whose content checks out.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from typing_extensions import TypedDict

from hf_taskvec._version import __version__
from hf_taskvec.algebra.rounding import dtype_name, parse_dtype
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.checkpoint_writing import (
    OutputFiles,
    open_writers,
    total_bytes,
    write_files,
)
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.application.finished_files import FinishedFiles
from hf_taskvec.application.output_plan import RequantiseChoice, check_choice, output_config, plan_output
from hf_taskvec.application.token_rows import PlacedRows, place_rows
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, OutputError
from hf_taskvec.filenames import CONFIG, MODEL_RECORD, WEIGHTS, WEIGHTS_INDEX
from hf_taskvec.files.output_folder import bytes_on_disk, check_replaceable, new_folder, unfinished
from hf_taskvec.files.safetensors_writer import SafetensorsWriter
from hf_taskvec.models.checkpoint import Checkpoint, open_checkpoint
from hf_taskvec.models.companions import COMPANIONS, companions, tokenizer_files
from hf_taskvec.sizes import file_size

# Bytes that a record has at most of a weight that is stored in fewer bits again, beside its name.
_OF_A_WEIGHT = 300

# The same of a token in a tokenizer's files.
_OF_A_TOKEN = 300

# The folder in which the output grows, what is finished there, and the writers of the rest.
_Begun = tuple[Path, FinishedFiles, dict[str, SafetensorsWriter]]


class MergeOptions(TypedDict, total=False):
    """What `TaskVector.apply` can be told, wherever the model goes."""

    scale: float
    dtype: torch.dtype | str | None
    requantise: RequantiseChoice | None
    tokenizer: Any
    max_shard_size: int | str | None
    device: str | torch.device
    threads: int | None
    strict_base: bool
    revision: str | None
    token: str | bool | None
    progress: bool | None


class ApplyOptions(MergeOptions, total=False):
    """What `TaskVector.apply` can be told where it writes a folder."""

    overwrite: bool


def apply(
    vector: TaskVector,
    base: str | Path | Checkpoint,
    output: str | Path,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | str | None = None,
    requantise: RequantiseChoice | None = None,
    tokenizer: Any = None,
    max_shard_size: int | str | None = None,
    device: str | torch.device = "cpu",
    threads: int | None = None,
    overwrite: bool = False,
    strict_base: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
    stream: bool = False,
    take: Callable[[Path], None] | None = None,
) -> Path:
    """See `TaskVector.apply`.

    The base may be open already. With `stream` a base on the Hub is not downloaded; `take` is given each file of
    weights when it is complete, and may replace it by a small one.
    """
    if isinstance(base, torch.nn.Module):
        raise BadValueError("apply() writes a checkpoint. To change a live model use applied_to() or edit().")
    scaled = vector * scale  # refuses NaN and infinities
    out_dtype = None if dtype is None else parse_dtype(dtype)
    on = _device(device)
    if threads is not None and threads < 1:
        raise BadValueError(f"threads={threads}: at least one thread is needed.")
    final = Path(output).resolve()
    if not isinstance(base, Checkpoint):
        base = open_checkpoint(base, revision, token, [*COMPANIONS], stream)
    checkpoint = base
    assert checkpoint.folder is not None
    if final == checkpoint.folder.resolve():
        raise OutputError("the output folder is the base's own folder. Choose another.")
    beside = companions(checkpoint.folder)
    placed = place_rows(scaled, checkpoint, tokenizer, token)
    # At λ = 0 nothing is left to be written, but the vector must fit all the same.
    whole = placed if scaled else place_rows(vector, checkpoint, tokenizer, token)
    check_fits(whole.vector, checkpoint, strict_base, may_grow=True)
    choice = check_choice(requantise, checkpoint, out_dtype)
    files = plan_output(placed, checkpoint, out_dtype, max_shard_size, choice)
    config = output_config(checkpoint, files, out_dtype, choice)
    job = _job_key(vector, scale, files, placed.ids)
    group = processes()
    is_main = group.is_main_process
    with ExitStack() as stack:

        def begin() -> _Begun:
            check_replaceable(output, MODEL_RECORD, overwrite)
            _check_space(final, files, take is not None)
            part = stack.enter_context(new_folder(output, MODEL_RECORD, overwrite, resume=True))
            finished = FinishedFiles.of_interrupted_run(part, job, files)
            return part, finished, stack.enter_context(open_writers(part, files, finished))

        def join() -> _Begun:
            part = unfinished(final)
            finished = FinishedFiles.of_main_process(part, job)
            return part, finished, stack.enter_context(open_writers(part, files, finished, join=True))

        # The main process decides what is left to do and creates the files; the others then open the same files.
        begun = group.together(begin, main_only=True)
        part, finished, writers = begun or join()
        requantised = write_files(part, files, writers, finished, group, on, threads, progress, take)
        group.wait_for_everyone()
        if is_main:
            record = _record(vector, scale, checkpoint, out_dtype, choice)
            if requantised:
                record["requantised"] = {name: each.to_dict() for name, each in sorted(requantised.items())}
            _finish(part, files, checkpoint, beside, config, record, placed)
            finished.remove_note()
    group.wait_for_everyone()
    return final


def largest_applied_size(
    vector: TaskVector,
    base: str | Path | Checkpoint,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    requantise: RequantiseChoice | None = None,
    tokenizer: Any = None,
) -> int:
    """How many bytes `apply` writes at most; of the base no more than its headers are read."""
    checkpoint = base if isinstance(base, Checkpoint) else open_checkpoint(base)
    assert checkpoint.folder is not None
    placed = place_rows(vector, checkpoint, tokenizer, None)
    check_fits(placed.vector, checkpoint, may_grow=True)
    out_dtype = None if dtype is None else parse_dtype(dtype)
    choice = check_choice(requantise, checkpoint, out_dtype)
    files = plan_output(placed, checkpoint, out_dtype, max_shard_size, choice)
    beside = sum(path.stat().st_size for path in companions(checkpoint.folder))
    # A changed config is written with other spaces; the index and the files' headers have a line for each tensor.
    listed = sum(300 + 3 * len(name) + len(file) for file, each in files.items() for name in each)
    listed += 2 * sum(_OF_A_TOKEN + 6 * len(each) for each in placed.ids)
    record = 2 * len(json.dumps(_record(vector, 1.0, checkpoint, None, None)).encode())
    if choice == "same":
        record += sum(_OF_A_WEIGHT + 2 * len(name.encode()) for name in checkpoint.unpacked.packed)
    return total_bytes(files) + beside + (checkpoint.folder / CONFIG).stat().st_size + listed + record + 4096


def _job_key(vector: TaskVector, scale: float, files: OutputFiles, ids: Mapping[str, int]) -> str:
    """What an interrupted run must agree in to be resumed: the vector, the base, and the output's layout."""
    layout = [
        [file, name, dtype_name(tensor.spec.dtype), tensor.source.identity]
        for file, each in files.items()
        for name, tensor in each.items()
    ]
    key = [__version__, vector.fingerprint, float(scale), layout, *([sorted(ids.items())] if ids else [])]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def _device(device: str | torch.device) -> torch.device:
    """The device, after making sure that there is one of that name here, on which something can be computed."""
    reason = "it has no memory"
    try:
        found = torch.empty(0, device=device).device
        if found.type != "meta":
            return found
    # CUDA's absence is an AssertionError, that of a backend which is a package of its own an ImportError.
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
    raise BadValueError(
        f"device={str(device)!r} is not a device that torch knows and finds here ({reason}). Use device='cpu'."
    )


def _check_space(final: Path, files: OutputFiles, one_by_one: bool) -> None:
    needed = max(total_bytes({file: each}) for file, each in files.items()) if one_by_one else total_bytes(files)
    place = next(folder for folder in final.absolute().parents if folder.exists())
    part = unfinished(final)
    held = bytes_on_disk(part) if part.is_dir() else 0
    free = shutil.disk_usage(place).free + held
    if free < needed:
        raise OutputError(
            f"{final.name} needs {file_size(needed)}, and only {file_size(free)} are free there. "
            "Make room or choose another folder."
        )


# What lies beside the weights.


def _finish(
    part: Path,
    files: OutputFiles,
    checkpoint: Checkpoint,
    beside: Iterable[Path],
    config: Mapping[str, Any],
    record: Mapping[str, Any],
    placed: PlacedRows,
) -> None:
    """Everything beside the weights: config, tokenizer, index, and the record of what was done."""
    assert checkpoint.folder is not None
    replaced = tokenizer_files(checkpoint.folder) if placed.tokenizer is not None else ()
    for path in (each for each in beside if each not in replaced):
        target = part / path.relative_to(checkpoint.folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    placed.save_tokenizer(part)
    if config != checkpoint.config or checkpoint.is_stacked:
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if list(files) != [WEIGHTS]:
        index = {
            "metadata": {"total_size": total_bytes(files)},
            "weight_map": {name: f for f, each in files.items() for name in each},
        }
        (part / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
    (part / MODEL_RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _record(
    vector: TaskVector,
    scale: float,
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    requantise: RequantiseChoice | None,
) -> dict[str, Any]:
    """What the output is, for its card: no path of this machine."""
    options = {"dtype": dtype_name(dtype)} if dtype else {}
    return {
        "library": f"hf_taskvec {__version__}",
        "base": checkpoint.record().to_json(),
        "vector": (vector * scale).provenance.to_json(),
        "scale": float(scale),
        "fingerprint": vector.fingerprint,
        "changed_parameters": len(vector),
        "options": options | ({"requantise": requantise} if requantise else {}),
    }
