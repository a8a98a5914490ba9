"""Writing the tensors of an output checkpoint, by all threads and processes: each byte is computed and written once.

A thread holds a few tiles of one tensor at a time, whatever the size of the model and the number of vectors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from hf_taskvec.algebra.deltas import Dense, Rows
from hf_taskvec.algebra.sources import Source
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.application.finished_files import FinishedFiles
from hf_taskvec.atomic import PARTIAL
from hf_taskvec.distributed import Processes
from hf_taskvec.files.safetensors_writer import SafetensorsWriter, TensorSpec
from hf_taskvec.progress import progress_bar
from hf_taskvec.threads import workers


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the output: what it is made of, and what it becomes."""

    name: str
    source: Source
    terms: tuple[Term, ...]
    spec: TensorSpec


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
) -> None:
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

    """
    total = total_bytes({file: files[file] for file in writers})
    bar = progress_bar([], "Applying", progress, total, unit="B", unit_scale=True)
    with bar, workers(threads) as run:
        for file, writer in writers.items():
            mine = list(files[file].values())[group.process_index :: group.num_processes]
            for nbytes in run(_write_tiles, ((writer, *task) for task in _tasks(mine, device))):
                bar.update(nbytes * group.num_processes)
            writer.close()
            group.wait_for_everyone()
            if group.is_main_process:
                (folder / f"{file}{PARTIAL}").replace(folder / file)
                if take is not None:
                    take(folder / file)
                if len(files) > 1 or take is not None:  # nothing is gained by resuming after the only file
                    finished.add(file)


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
            for start in range(0, len(tiles), 4):
                yield *before, tiles[start : start + 4]
        before = following


def _sum(tensor: OutputTensor, device: torch.device) -> Sum:
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
    if not tiles and not untouched:
        whole.prepare()
    for start, stop in tiles:
        if stored is not None:
            rows = stored[start:stop] if spec.shape else stored
        else:
            rows = whole.rounded(start, stop, spec.dtype, tensor.name).cpu()
        writer.write(tensor.name, rows, start)
        written += rows.nbytes
    return written
