"""A task vector streamed into a checkpoint: one pass over the base's tensors, each byte written once.

Memory holds a few tiles for each thread, whatever the size of the model and the number of vectors. The output appears
under its name when it is complete; an interrupted run is resumed, keeping the files whose content checks out.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from tqdm.auto import tqdm

from hf_taskvec._version import __version__
from hf_taskvec.algebra.deltas import Dense, Rows
from hf_taskvec.algebra.rounding import dtype_name, parse_dtype
from hf_taskvec.algebra.sources import Source
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.errors import BadValueError, OutputError
from hf_taskvec.files.output_folder import bytes_on_disk, check_replaceable, new_folder, unfinished
from hf_taskvec.files.safetensors_writer import SafetensorsWriter, TensorSpec, shard
from hf_taskvec.models.checkpoint import Checkpoint, open_checkpoint
from hf_taskvec.models.companions import COMPANIONS, companions
from hf_taskvec.sizes import parse_size
from hf_taskvec.threads import workers

RECORD = "taskvec_apply.json"
_PROGRESS = ".progress.json"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the output: what it is made of, and what it becomes."""

    name: str
    source: Source
    terms: tuple[Term, ...]
    spec: TensorSpec


def apply(
    vector: TaskVector,
    base: str | Path,
    save_to: str | Path,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    device: str | torch.device = "cpu",
    threads: int | None = None,
    overwrite: bool = False,
    strict_base: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Path:
    """See `TaskVector.apply`."""
    if isinstance(base, torch.nn.Module):
        raise BadValueError("apply() writes a checkpoint. To change a live model use applied_to() or edit().")
    scaled = vector * scale  # refuses NaN and infinities
    out_dtype = None if dtype is None else parse_dtype(dtype)
    on = _device(device)
    if threads is not None and threads < 1:
        raise BadValueError(f"threads={threads}: at least one thread is needed.")
    final = Path(save_to).resolve()
    checkpoint = open_checkpoint(base, revision, token, [*COMPANIONS])
    assert checkpoint.folder is not None
    if final.resolve() == checkpoint.folder.resolve():
        raise OutputError("the output folder is the base's own folder. Choose another.")
    check_fits(vector, checkpoint, strict_base, may_grow=True)
    files = _plan(scaled, checkpoint, out_dtype, max_shard_size)
    job = _job_key(vector, scale, files)
    ranks = _Ranks()
    if ranks.is_main:
        check_replaceable(final, RECORD, overwrite)
        _check_space(final, files)
    with new_folder(final, RECORD, overwrite, resume=True) if ranks.is_main else nullcontext(unfinished(final)) as part:
        done = _resume(part, files, job) if ranks.is_main else {}
        writers = _create(part, files, done) if ranks.is_main else {}
        ranks.wait()
        if not ranks.is_main:
            done = json.loads((part / _PROGRESS).read_text())["files"]
            writers = _create(part, files, done, join=True)
        try:
            _write_all(part, files, writers, done, ranks, on, threads, progress)
        finally:
            for writer in writers.values():
                writer.close(sync=False)
        ranks.wait()
        if ranks.is_main:
            _finish(part, files, checkpoint, out_dtype, _record(vector, scale, checkpoint, out_dtype))
    ranks.wait()
    return final


# What is to be written.


def _plan(
    vector: TaskVector, checkpoint: Checkpoint, dtype: torch.dtype | None, max_shard_size: int | str | None
) -> dict[str, dict[str, _Tensor]]:
    """File -> its tensors, named and ordered as the base stores them; in its files too, unless a size is given."""
    stored, canonical = checkpoint.stored, checkpoint.canonical_of
    tensors: dict[str, _Tensor] = {}
    for raw, source in stored.items():
        name = canonical.get(raw, raw)
        name = checkpoint.layout.tied.get(name, name)
        terms = vector[name] if raw in canonical and name in vector else ()
        to = dtype if dtype is not None and raw in canonical else source.dtype  # buffers stay as they are
        tensors[raw] = _Tensor(raw, source, terms, TensorSpec(to, terms[0].delta.shape if terms else source.shape))
    by_file: dict[str, dict[str, _Tensor]] = {}
    if max_shard_size is None and all(s.file.path.suffix == ".safetensors" for s in stored.values()):
        for raw, source in stored.items():
            by_file.setdefault(source.file.path.name, {})[raw] = tensors[raw]
        return by_file
    most = parse_size("5GB" if max_shard_size is None else max_shard_size)
    layout = shard({raw: each.spec for raw, each in tensors.items()}, most, "model")
    return {file: {raw: tensors[raw] for raw in names} for file, names in layout.items()}


def _job_key(vector: TaskVector, scale: float, files: Mapping[str, Mapping[str, _Tensor]]) -> str:
    """What an interrupted run must agree in to be resumed: the vector, the base, and the output's layout."""
    layout = [
        [file, name, dtype_name(tensor.spec.dtype), tensor.source.identity]
        for file, each in files.items()
        for name, tensor in each.items()
    ]
    return hashlib.sha256(json.dumps([__version__, vector.fingerprint, float(scale), layout]).encode()).hexdigest()


def _device(device: str | torch.device) -> torch.device:
    """The device, after making sure that there is one of that name here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # CUDA's absence is an AssertionError
        reason = (str(error).splitlines() or [""])[0]
        raise BadValueError(
            f"device={str(device)!r} is not a device that torch knows and finds here ({reason}). Use device='cpu'."
        ) from None


def _check_space(final: Path, files: Mapping[str, Mapping[str, _Tensor]]) -> None:
    needed = sum(tensor.spec.nbytes for each in files.values() for tensor in each.values())
    place = next(folder for folder in final.absolute().parents if folder.exists())
    part = unfinished(final)
    held = bytes_on_disk(part) if part.exists() else 0
    free = shutil.disk_usage(place).free + held
    if free < needed:
        raise OutputError(
            f"{final.name} needs {needed / 1e9:.3g} GB, and only {free / 1e9:.3g} GB are free there. Make room or choose "
            "another folder."
        )


# Writing, by threads and processes.


class _Ranks:
    """The processes of an `accelerate launch`, or the one process that there is."""

    def __init__(self) -> None:
        self._state = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState
            from accelerate.utils import parse_flag_from_env

            self._state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
        self.index = self._state.process_index if self._state else 0
        self.count = self._state.num_processes if self._state else 1
        self.is_main = self.index == 0

    def wait(self) -> None:
        if self._state:
            self._state.wait_for_everyone()


def _partial(file: str) -> str:
    return f"{file}.partial"


def _create(
    part: Path, files: Mapping[str, Mapping[str, _Tensor]], done: Iterable[str], join: bool = False
) -> dict[str, SafetensorsWriter]:
    """A writer for each file that is not done; with `join`, of a file that another process created."""
    writers = {}
    for file in (each for each in files if each not in done):
        specs = {name: tensor.spec for name, tensor in files[file].items()}
        writers[file] = SafetensorsWriter(part / _partial(file), specs, {"format": "pt"}, join)
    return writers


def _write_all(
    part: Path,
    files: Mapping[str, Mapping[str, _Tensor]],
    writers: Mapping[str, SafetensorsWriter],
    done: dict[str, str],
    ranks: _Ranks,
    device: torch.device,
    threads: int | None,
    progress: bool | None,
) -> None:
    """Write this process's share of every file, and rename each file when all of it is there."""
    total = sum(tensor.spec.nbytes for file in writers for tensor in files[file].values())
    hidden = True if not ranks.is_main else (None if progress is None else not progress)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Applying", disable=hidden) as bar, workers(threads) as run:
        for file, writer in writers.items():
            mine = [t for number, t in enumerate(files[file].values()) if number % ranks.count == ranks.index]
            for nbytes in run(_write_tiles, ((writer, *task) for task in _tasks(mine, device))):
                bar.update(nbytes * ranks.count)
            writer.close()
            ranks.wait()
            if ranks.is_main:
                (part / _partial(file)).rename(part / file)
                if len(files) > 1:
                    done[file] = _digest(part / file)
                    _note(part, done)


_Task = tuple[SafetensorsWriter, _Tensor, Sum, list[tuple[int, int]]]


def _tasks(tensors: Iterable[_Tensor], device: torch.device) -> Iterator[tuple[_Tensor, Sum, list[tuple[int, int]]]]:
    """Runs of neighbouring tiles, each enough work for a thread to take."""
    for tensor in tensors:
        whole = _sum(tensor, device)
        tiles = list(whole.tiles())
        for start in range(0, len(tiles), 4):
            yield tensor, whole, tiles[start : start + 4]


def _sum(tensor: _Tensor, device: torch.device) -> Sum:
    rows, source = tensor.spec.shape[:1], tensor.source
    if rows == source.shape[:1]:
        return Sum(tensor.spec.shape, tensor.terms, source, device=device)
    # An extended vocabulary: the base has no rows there, and the vector's are changes from zero.
    base = Term(1.0, Rows(range(source.shape[0]), Dense((source,)), rows[0]))
    return Sum(tensor.spec.shape, (base, *tensor.terms), device=device)


def _write_tiles(task: _Task) -> int:
    writer, tensor, whole, tiles = task
    spec = tensor.spec
    untouched = not tensor.terms and tensor.source.dtype == spec.dtype
    stored = tensor.source.read() if untouched else None
    written = 0
    for start, stop in tiles:
        if stored is not None:
            rows = stored[start:stop] if spec.shape else stored
        else:
            rows = whole.rounded(start, stop, spec.dtype, tensor.name).cpu()
        writer.write(tensor.name, rows, start)
        written += rows.nbytes
    return written


# Resuming and finishing.


def _resume(part: Path, files: Mapping[str, Mapping[str, _Tensor]], job: str) -> dict[str, str]:
    """The files that an interrupted run of the same job finished, checked by content; all else is removed."""
    try:
        noted = json.loads((part / _PROGRESS).read_text("utf-8"))
        kept = noted["files"] if noted["job"] == job else {}
    except (OSError, ValueError, KeyError, TypeError):
        kept = {}
    done = {f: d for f, d in kept.items() if f in files and (part / f).is_file() and _digest(part / f) == d}
    for path in part.iterdir():
        if path.name not in done:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    _note(part, done, job)
    return done


def _note(part: Path, done: Mapping[str, str], job: str | None = None) -> None:
    """Record the finished files, so that the record is never half-written."""
    path = part / _PROGRESS
    job = job or json.loads(path.read_text("utf-8"))["job"]
    fresh = part / f"{_PROGRESS}.new"
    fresh.write_text(json.dumps({"job": job, "files": dict(done)}), "utf-8")
    fresh.replace(path)


def _digest(path: Path) -> str:
    """A fast digest of a file's content: against accidents, not against forgers."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def _finish(
    part: Path,
    files: Mapping[str, Mapping[str, _Tensor]],
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    record: Mapping[str, Any],
) -> None:
    """Everything beside the weights: config, tokenizer, index, and the record of what was done."""
    assert checkpoint.folder is not None
    for path in companions(checkpoint.folder):
        target = part / path.relative_to(checkpoint.folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    config = dict(checkpoint.config)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype_name(dtype)
    config.update(_grown_vocabulary(files))
    if checkpoint.config and config != checkpoint.config:  # a base without a config does not get half of one
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if list(files) != ["model.safetensors"]:
        size = sum(tensor.spec.nbytes for each in files.values() for tensor in each.values())
        index = {
            "metadata": {"total_size": size},
            "weight_map": {name: f for f, each in files.items() for name in each},
        }
        (part / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
    (part / RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (part / _PROGRESS).unlink()


def _record(vector: TaskVector, scale: float, checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, Any]:
    """What the output is, for its card: no path of this machine."""
    return {
        "library": f"hf_taskvec {__version__}",
        "base": checkpoint.record().to_json(),
        "vector": (vector * scale).provenance.to_json(),
        "scale": float(scale),
        "fingerprint": vector.fingerprint,
        "changed_parameters": len(vector),
        "options": {"dtype": dtype_name(dtype)} if dtype else {},
    }


def _grown_vocabulary(files: Mapping[str, Mapping[str, _Tensor]]) -> dict[str, int]:
    tensors = [tensor for each in files.values() for tensor in each.values()]
    grown = {t.spec.shape[0] for t in tensors if t.spec.shape[:1] != t.source.shape[:1]}
    return {"vocab_size": grown.pop()} if grown else {}
