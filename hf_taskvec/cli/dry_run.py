"""What a command would read and write: the answer to `--dry-run`."""

import ast
import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.cli.results import CommandResult
from hf_taskvec.errors import MissingFileError
from hf_taskvec.hub_client import hub_api
from hf_taskvec.hub_names import split_revision, split_subfolder
from hf_taskvec.sizes import file_size

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

#: bytes that a streamed pass holds, at most about: measured, for models of any size
STREAMING_MEMORY = 100_000_000
# Bytes of the records of what only the Hub has seen, and of the command's.
_RECORDS, _COMMAND = 1_000_000, 10_000


@dataclass
class DryRun:
    """What a command would do. A size of `None` is not known before.

    Args:
        reads (`dict[str, int | None]`):
            The bytes of what is read.
        writes (`dict[str, int | None]`):
            The bytes of what is written: no more than that.
        memory (`int`):
            The memory that it takes, in bytes, besides Python and torch themselves.
        notes (`list[str]`):
            Anything else that is worth knowing.
    """

    reads: dict[str, int | None] = field(default_factory=dict)
    writes: dict[str, int | None] = field(default_factory=dict)
    memory: int = 0
    notes: list[str] = field(default_factory=list)

    def result(self, output: Path | None) -> CommandResult:
        """The answer, with the free space of the disk that `output` would be on."""
        free = shutil.disk_usage(next(p for p in output.absolute().parents if p.exists())).free if output else None
        values: dict[str, Any] = {"dry_run": True, "reads": self.reads, "writes": self.writes, "memory": self.memory}
        lines = ["Dry run: nothing is written."]
        lines += [f"  read   {name}: {_size(nbytes)}" for name, nbytes in self.reads.items()]
        lines += [f"  write  {name}: {_size(nbytes, 'at most ')}" for name, nbytes in self.writes.items()]
        lines.append(f"  memory about {file_size(self.memory)}, besides Python and torch themselves (about 0.5 GB)")
        if free is not None:
            values["disk_free"] = free
            lines.append(f"  disk   {file_size(free)} free")
        if self.notes:
            values["notes"] = self.notes
            lines += [f"  note   {note}" for note in self.notes]
        return CommandResult(values, lines)


def _size(nbytes: int | None, how: str = "") -> str:
    return "size not known before" if nbytes is None else how + file_size(nbytes)


def weights_size(where: str, token: str | bool | None = None) -> int | None:
    """The bytes of the weights of a folder or a Hub repository; nothing is downloaded."""
    return sum(size for name, size in _files(where, token) if name.endswith((".safetensors", ".bin")))


def copied_size(model: str, token: str | None = None) -> int:
    """What an edited copy of a model takes at most, whatever the edit: all of its files, and the records."""
    return sum(size for _, size in _files(model, token)) + _RECORDS


def _files(where: str, token: str | bool | None) -> list[tuple[str, int]]:
    folder = Path(where)
    if folder.is_dir():
        return [(path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file()]
    from huggingface_hub.errors import HFValidationError, HTTPError

    named, revision = split_revision(where)
    name, inside = split_subfolder(named)
    try:
        info = hub_api(token).model_info(name, revision=revision, files_metadata=True)
    except (HTTPError, HFValidationError, ConnectionError) as error:
        raise MissingFileError(
            f"{where!r} is neither a folder here nor a repository that the Hub gave ({type(error).__name__})."
        ) from None
    start = "" if inside is None else f"{inside}/"
    return [
        (each.rfilename.removeprefix(start), each.size or 0)
        for each in info.siblings or ()
        if each.rfilename.startswith(start)
    ]


# What is written. Of folders of this machine the headers of the files tell it; of the Hub's, the sizes of the files.


def extracted_size(
    models: list[str], dtype: str | None, reference: bool, choices: dict[str, Any], token: str | None
) -> tuple[int | None, list[str]]:
    """What `extract` writes at most, and what there is to say about that."""
    from hf_taskvec.extraction.from_any import open_vector
    from hf_taskvec.files.save_vector import largest_saved_size

    if len(models) == 2 and are_folders(models):
        vector = open_vector(models[1], models[0], **choices)
        return largest_saved_size(vector, dtype, reference) + _COMMAND, []
    sizes = [weights_size(where, token) or 0 for where in models]
    notes = []
    if len(models) == 1:
        notes = ["an adapter that changes more than low-rank factors takes parts of its base as well"]
    if reference:
        return _RECORDS, notes
    if dtype is not None:
        return int(_widening(dtype) * max(sizes)) + _RECORDS, notes
    # Two parts of the wider dtype; of float16 and bfloat16 that is float32.
    return 2 * sum(sizes) + _RECORDS, notes


def applied_size(
    vector: "TaskVector",
    model: str,
    dtype: str | None,
    max_shard_size: str | None,
    report: "UnlearningReport | None",
    token: str | None,
    requantise: str | None = None,
    tokenizer: str | None = None,
) -> int:
    """What `apply` writes at most."""
    from hf_taskvec.application.to_checkpoint import largest_applied_size

    beside = report_size(report) + _COMMAND
    if are_folders([model]):
        choices: Any = {"dtype": dtype, "max_shard_size": max_shard_size, "requantise": requantise}
        choices["tokenizer"] = tokenizer
        return largest_applied_size(vector, model, **choices) + beside
    return int(_widening(dtype) * (sum(size for _, size in _files(model, token)) + vector.nbytes)) + _RECORDS + beside


# Bytes a second, as a server far from the Hub has them, by which a time is told.
_NETWORK = 50_000_000


def pushing_notes(model: str, read: int, written: int, token: str | None) -> list[str]:
    """What a push that goes shard by shard takes: disk, and time by the network alone."""
    shards = [size for name, size in _files(model, token) if name.endswith((".safetensors", ".bin"))]
    minutes = (read + written) / _NETWORK / 60
    return [
        f"disk: one shard at a time, about {file_size(max(shards, default=0))}, and a few tensors",
        f"time: about {minutes:.1f} minutes at {file_size(_NETWORK)} a second, both ways",
    ]


def combined_size(expression: str, paths: dict[str, str], dtype: str | None, token: str | None) -> int | None:
    """What `combine` writes at most."""
    from hf_taskvec.cli.arguments import load_vector
    from hf_taskvec.files.save_vector import largest_saved_size
    from hf_taskvec.publishing.notation import evaluate_expression

    tree = ast.walk(ast.parse(expression.strip(), mode="eval"))
    called = [each.func.id for each in tree if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
    computed = [each for each in called if each not in ("filter", "scale")]
    if are_folders(paths.values()):
        vectors = {name: load_vector(path, name) for name, path in paths.items()}
        if not computed:
            return largest_saved_size(evaluate_expression(expression.strip(), vectors), dtype) + _COMMAND
        # For each parameter a function gives at most factors of full rank, in fp32, or a dense change in any dtype.
        shapes = {each: vector.shape(each) for vector in vectors.values() for each in vector}
        made = sum(8 * math.prod(shape) + 2000 + 10 * len(each) for each, shape in shapes.items())
        return sum(largest_saved_size(each, dtype) for each in vectors.values()) + len(computed) * made + _COMMAND
    if computed:
        return None
    return int(_widening(dtype) * sum(size for path in paths.values() for _, size in _files(path, token))) + _RECORDS


def compressed_size(vector: "TaskVector", rank: int | None) -> int:
    """What `compress` writes at most: a matrix is kept, or becomes two fp32 factors."""
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.files.save_vector import largest_saved_size, tensor_record_size

    matrices = {name: shape for name in vector if len(shape := vector.shape(name)) == 2}
    kept = [name for name in vector if name not in matrices or (rank is not None and rank >= vector.rank(name))]
    total = largest_saved_size(TaskVector({name: vector[name].terms for name in kept}, vector.provenance)) + _COMMAND
    for name, shape in matrices.items():
        if name in kept and not vector[name].is_low_rank:
            continue
        total += 4 * min(vector.rank(name), rank or vector.rank(name)) * sum(shape) + 3 * tensor_record_size(name)
    return total


def adapter_size(vector: "TaskVector", rank: int | None, dense: str, report: "UnlearningReport | None") -> int:
    """What `adapter` writes at most: two fp32 factors for each matrix, and with `--dense save` whole values."""
    from hf_taskvec.files.save_vector import tensor_record_size

    total = report_size(report) + 2 * len(json.dumps(vector.provenance.to_json())) + _COMMAND
    for name in vector:
        shape = vector.shape(name)
        total += 3 * tensor_record_size(name)
        if len(shape) == 2 and (rank is not None or vector[name].is_low_rank):
            total += 4 * min(vector.rank(name), rank or vector.rank(name)) * sum(shape)
        elif dense == "save":  # of a module all of it, so a norm's or a layer's bias as well
            total += 8 * (math.prod(shape) + (shape[0] if shape else 1))
    return total


def report_size(report: "UnlearningReport | None") -> int:
    """What is written of a report beside a model or an adapter."""
    if report is None:
        return 0
    return sum(len(text.encode()) for text in (report.to_json(), report.to_markdown(), report.to_html()))


def are_folders(places: Iterable[str]) -> bool:
    """Whether all of them are folders of this machine, and none is on the Hub."""
    return all(Path(place).is_dir() for place in places)


def _widening(dtype: str | None) -> float:
    """How much larger numbers may become in a dtype: what is stored has 16 bits or more."""
    from hf_taskvec.algebra.rounding import parse_dtype

    return 1.0 if dtype is None else max(1.0, parse_dtype(dtype).itemsize / 2)
