"""Writing safetensors files in place: the layout is fixed first, then rows are written where they belong.

Every byte is written once, from any thread or process, and nothing but the rows at hand is in memory.
"""

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from hf_taskvec.algebra.sources import numel, tensor_bytes
from hf_taskvec.models.tensor_files import SAFETENSORS_DTYPES

_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return numel(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """A safetensors file with known contents, open for writing rows at their place; a context manager that closes it.

    Args:
        path (`Path`):
            The file, which must not exist yet.
        specs (`Mapping[str, TensorSpec]`):
            All tensors of the file.
        metadata (`Mapping[str, str]`, *optional*):
            What the header says beside them.
        join (`bool`, *optional*, defaults to `False`):
            The file was created by another process with the same contents, and this one writes into it too.
    """

    def __init__(
        self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None, join: bool = False
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        offsets = {}
        # Larger elements first, so that every tensor is aligned to its element size, as safetensors itself orders them.
        for name in sorted(specs, key=lambda n: (-specs[n].dtype.itemsize, n)):
            spec = specs[name]
            offsets[name] = offset
            header[name] = {
                "dtype": _CODES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._offsets = {name: 8 + len(text) + start for name, start in offsets.items()}
        self._specs = dict(specs)
        self.nbytes = 8 + len(text) + offset
        self._seeking = threading.Lock()
        # A link of that name is followed in neither case: a new file is made by us or not at all.
        self._file: FileIO | None = FileIO(path, "r+", opener=_open_itself) if join else FileIO(path, "x+")
        if join:
            return
        try:
            self._write(len(text).to_bytes(8, "little") + text, 0)
            self._file.truncate(self.nbytes)
        except BaseException:
            self.close(sync=False)
            raise

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Whoever holds the exception would hold an open file, too, and a removed file takes room until it is closed.
        self.close(sync=kind is None)

    def write(self, name: str, rows: torch.Tensor, start: int = 0) -> None:
        """Write rows of a tensor, from row `start` on."""
        spec = self._specs[name]
        assert rows.dtype == spec.dtype and rows.shape[1:] == torch.Size(spec.shape[1:])
        self.write_elements(name, rows, start * numel(spec.shape[1:]))

    def write_columns(self, name: str, columns: torch.Tensor, start: int = 0) -> None:
        """Write columns of a matrix, all its rows of them, from column `start` on."""
        width = self._specs[name].shape[1]
        for number, row in enumerate(columns):
            self.write_elements(name, row, number * width + start)

    def write_elements(self, name: str, elements: torch.Tensor, start: int) -> None:
        """Write elements of a tensor, in the order in which they are stored, from element `start` on."""
        spec = self._specs[name]
        assert elements.dtype == spec.dtype and start + elements.numel() <= numel(spec.shape)
        self._write(tensor_bytes(elements), self._offsets[name] + start * spec.dtype.itemsize)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while len(view):
            done = self._write_at(view, offset)
            view, offset = view[done:], offset + done

    def _write_at(self, view: memoryview, offset: int) -> int:
        """Write what the operating system takes at once, and return how many bytes that is."""
        assert self._file is not None
        if hasattr(os, "pwrite"):
            return os.pwrite(self._file.fileno(), view, offset)
        # Windows has no write to a place. Every process has a position in the file of its own, its threads share it.
        with self._seeking:
            self._file.seek(offset)
            return self._file.write(view)

    def close(self, sync: bool = True) -> None:
        """Finish the file; with `sync` it is on the disk when this returns."""
        if self._file is None:
            return
        try:
            if sync:
                os.fsync(self._file)
        finally:
            self._file.close()
            self._file = None


def _open_itself(path: str, flags: int) -> int:
    """Open a file and never what a link leads to, where the operating system can tell."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))


def shard(specs: Mapping[str, TensorSpec], most: int, stem: str) -> dict[str, dict[str, TensorSpec]]:
    """File name -> its tensors: in the given order, each file at most `most` bytes unless one tensor is larger."""
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.nbytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{k:05}-of-{len(shards):05}.safetensors": each for k, each in enumerate(shards, 1)}
