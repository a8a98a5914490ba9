"""Writing safetensors files in place: the layout is fixed first, then rows are written where they belong.

Every byte is written once, from any thread or process, and nothing but the rows at hand is in memory.
"""

import json
import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_taskvec.algebra.sources import numel, tensor_bytes
from hf_taskvec.errors import BadValueError

_CODES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    # Not weights, but an old checkpoint's masks and the like, which are copied as they are.
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return numel(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """A safetensors file with known contents, open for writing rows at their place.

    With `join`, the file was created by another process with the same contents, and this one writes into it too.
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
        self._file: int | None
        if join:
            self._file = os.open(path, os.O_RDWR)
            return
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._write(len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(self._file, self.nbytes)

    def write(self, name: str, rows: torch.Tensor, start: int = 0) -> None:
        """Write rows of a tensor, from row `start` on."""
        spec = self._specs[name]
        assert rows.dtype == spec.dtype and rows.shape[1:] == torch.Size(spec.shape[1:])
        row_bytes = numel(spec.shape[1:]) * spec.dtype.itemsize
        self._write(tensor_bytes(rows), self._offsets[name] + start * row_bytes)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        assert self._file is not None
        view = memoryview(data)
        while len(view):
            done = os.pwrite(self._file, view, offset)
            view, offset = view[done:], offset + done

    def close(self, sync: bool = True) -> None:
        """Finish the file; with `sync` it is on the disk when this returns."""
        if self._file is None:
            return
        if sync:
            os.fsync(self._file)
        os.close(self._file)
        self._file = None


def parse_size(size: int | str) -> int:
    """A number of bytes from `"5GB"` and the like.

    >>> parse_size("5GB")
    5000000000
    """
    if isinstance(size, numbers.Integral):  # numpy's integers as well
        nbytes = int(size)
    else:
        text = size.upper() if isinstance(size, str) else ""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)\s*", text)
        if not match or (match[2] not in _UNITS and match[2] != "B"):
            raise BadValueError(
                f"{size!r} is not a size. Write it as a whole number of bytes or like '5GB' or '500MB'."
            )
        nbytes = int(float(match[1]) * _UNITS.get(match[2], 1))
    if nbytes < 1:
        raise BadValueError(f"{size!r} is not a size: it must be at least one byte.")
    return nbytes


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
