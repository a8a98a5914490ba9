"""Writing the tensors of an output checkpoint, by all threads and processes: each byte is computed and written once.

A thread holds a few tiles of one tensor at a time, whatever the size of the model and the number of vectors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from hf_taskvec.algebra.deltas import Dense, Rows
from hf_taskvec.algebra.sources import RowsOf, Source, rows_of, runs_without
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.application.finished_files import FinishedFiles
from hf_taskvec.atomic import PARTIAL
from hf_taskvec.distributed import Processes
from hf_taskvec.files.safetensors_writer import SafetensorsWriter, TensorSpec
from hf_taskvec.progress import progress_bar
from hf_taskvec.quantised.packed_weight import ScaledWeight
from hf_taskvec.quantised.requantising import EditTally, Requantised, requantise
from hf_taskvec.threads import workers


@dataclass(frozen=True)
class PackedOutput:
    """An edited weight that is stored in fewer bits again.

    Args:
        weight (`ScaledWeight`):
            The weight as the base stores it.
        names (`Mapping[str, str]`):
            Those of its tensors that are in one file of the output: role -> name.
    """

    weight: ScaledWeight
    names: Mapping[str, str]


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the output: what it is made of, and what it becomes; or one of several that a weight becomes."""

    name: str
    source: Source
    terms: tuple[Term, ...]
    spec: TensorSpec
    packed: PackedOutput | None = None
    #: rows of the source that stand for nothing, and count as zero
    cleared: tuple[int, ...] = ()

    @property
    def is_written_with_another(self) -> bool:
        """Whether another tensor of the file stands for it and itself."""
        return self.packed is not None and self.name != next(iter(self.packed.names.values()))


#: file -> its tensors by their names in the file, in the order in which they are stored
OutputFiles = Mapping[str, Mapping[str, OutputTensor]]


def total_bytes(files: OutputFiles) -> int:
    """The size of all tensors."""
    return sum(tensor.spec.nbytes for each in files.values() for tensor in each.values())


@contextmanager
def open_writers(
    folder: Path, files: OutputFiles, finished: FinishedFiles, join: bool = False
) -> Iterator[dict[str, SafetensorsWriter]]:
    """A writer for each file that is not finished; with `join`, of a file that another process created.

    All are closed when the block ends. If it fails, what they wrote is of no use to a later run and goes, so that it
    does not keep a full disk full.
    """
    writers = {}
    with ExitStack() as stack:
        for file in (each for each in files if each not in finished):
            specs = {name: tensor.spec for name, tensor in files[file].items()}
            path = folder / f"{file}{PARTIAL}"
            if not join:
                stack.push(partial(_remove_after_failure, path))
            writers[file] = stack.enter_context(SafetensorsWriter(path, specs, {"format": "pt"}, join))
        yield writers


def _remove_after_failure(path: Path, kind: type[BaseException] | None, *_: object) -> None:
    if kind is not None:
        with suppress(OSError):  # Windows removes no file that another process has open
            path.unlink(missing_ok=True)


def write_files(
    folder: Path,
    files: OutputFiles,
    writers: Mapping[str, SafetensorsWriter],
    finished: FinishedFiles,
    group: Processes,
    device: torch.device,
    threads: int | None,
    progress: bool | None,
    take: Callable[[Path], None] | None = None,
) -> dict[str, Requantised]:
    """Write this process's share of every file, and rename each file when all of it is there.

    Args:
        folder (`Path`):
            Where the output grows.
        files (`OutputFiles`):
            The whole output.
        writers (`Mapping[str, SafetensorsWriter]`):
            Of the files that are not finished.
        finished (`FinishedFiles`):
            Is told of each file that is complete.
        group (`Processes`):
            Those that share the work: each takes every n-th tensor of a file.
        device (`torch.device`):
            Where to compute.
        threads (`int`, *optional*):
            See `workers`.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.
        take (`Callable`, *optional*):
            Is given each file that is complete, by the main process, and may replace it by a small one.

    Returns:
        `dict[str, Requantised]`: What storing it in fewer bits again left of the edit, for each weight.

    """
    total = total_bytes({file: files[file] for file in writers})
    requantised = finished.requantised
    bar = progress_bar([], "Applying", progress, total, unit="B", unit_scale=True)
    with bar, workers(threads) as run:
        for file, writer in writers.items():
            every = [tensor for tensor in files[file].values() if not tensor.is_written_with_another]
            mine = every[group.process_index :: group.num_processes]
            found: dict[str, Requantised] = {}
            for written in run(_write_tiles, ((writer, *task) for task in _tasks(mine, device))):
                bar.update(written.nbytes * group.num_processes)
                found |= written.requantised
            writer.close()
            group.wait_for_everyone()
            packed = any(tensor.packed is not None for tensor in every)
            of_file = {name: each for some in (group.gather(found) if packed else ()) for name, each in some.items()}
            if group.is_main_process:
                (folder / f"{file}{PARTIAL}").replace(folder / file)
                if take is not None:
                    take(folder / file)
                if len(files) > 1 or take is not None:  # nothing is gained by resuming after the only file
                    finished.add(file, of_file)
            requantised |= of_file
    return requantised


_Task = tuple[SafetensorsWriter, OutputTensor, Sum, list[tuple[int, int]]]


def _tasks(
    tensors: Iterable[OutputTensor], device: torch.device
) -> Iterator[tuple[OutputTensor, Sum, list[tuple[int, int]]]]:
    """Runs of neighbouring tiles, each enough work for a thread to take.

    What a tensor is made of may have to be checked as a whole, by one thread. So that others do not wait for it, that
    is a run of no tiles, and comes before the tiles of the tensor before.
    """
    before: tuple[OutputTensor, Sum] | None = None
    for following in chain(((tensor, _sum(tensor, device)) for tensor in tensors), (None,)):
        if following is not None:
            yield *following, []
        if before is not None:
            tiles = list(before[1].tiles())
            step = 4 if before[0].packed is None else max(1, len(tiles))  # blocks of fewer bits may reach over tiles
            for start in range(0, len(tiles), step):
                yield *before, tiles[start : start + step]
        before = following


def _sum(tensor: OutputTensor, device: torch.device) -> Sum:
    if tensor.packed is not None:
        return Sum(tensor.packed.weight.shape, tensor.terms, tensor.packed.weight, device=device)
    rows, source = tensor.spec.shape[:1], tensor.source
    if rows == source.shape[:1] and not tensor.cleared:
        return Sum(tensor.spec.shape, tensor.terms, source, device=device)
    # A larger vocabulary: the base has no rows there, or none of tokens, and the vector's are changes from zero.
    kept = runs_without(source.shape[0], tensor.cleared)
    base = [Term(1.0, Rows(run, Dense((RowsOf(source, run),)), rows[0])) for run in kept]
    return Sum(tensor.spec.shape, (*base, *tensor.terms), device=device)


@dataclass(frozen=True)
class _Written:
    """What a task has written."""

    nbytes: int
    requantised: Mapping[str, Requantised] = field(default_factory=dict)


def _write_tiles(task: _Task) -> _Written:
    writer, tensor, whole, tiles = task
    if tensor.packed is not None:
        return _write_packed(writer, tensor.packed, whole) if tiles else _Written(0)
    spec = tensor.spec
    untouched = not tensor.terms and not tensor.cleared and tensor.source.dtype == spec.dtype
    stored = tensor.source.readable() if untouched else None
    written = 0
    if not tiles and not untouched:
        whole.prepare()
    for start, stop in tiles:
        if stored is not None:
            rows = rows_of(stored, start, stop)
        else:
            rows = whole.rounded(start, stop, spec.dtype, tensor.name).cpu()
        writer.write(tensor.name, rows, start)
        written += rows.nbytes
    return _Written(written)


def _write_packed(writer: SafetensorsWriter, packed: PackedOutput, whole: Sum) -> _Written:
    """Write those tensors of a weight that are in the writer's file. Each file's are worked out for themselves."""
    tally = EditTally(packed.weight) if "codes" in packed.names else None
    written = 0
    for piece in requantise(packed.weight, whole, tally):
        if piece.role in packed.names:
            write = writer.write_columns if piece.is_columns else writer.write
            write(packed.names[piece.role], piece.elements, piece.start)
            written += piece.elements.nbytes
    return _Written(written, {} if tally is None else {packed.weight.name: tally.result()})
