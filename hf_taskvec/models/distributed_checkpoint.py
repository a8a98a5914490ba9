"""Folders that `torch.distributed.checkpoint` wrote: each tensor in parts, in the files of many processes.

Rows are read from the files as they are asked for, and no tensor is put together in memory unless it is asked for
whole. There are two forms: torch's own (`.metadata` and `.distcp` files), and safetensors with the parts' places in
their headers, as transformers' `save_distributed_checkpoint` writes them.
"""

import io
import json
import mmap
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from typing_extensions import override

from hf_taskvec.algebra.scratch import Slot, buffer
from hf_taskvec.algebra.sources import Readable, RowReader
from hf_taskvec.errors import CorruptFileError, MissingFileError, TaskVectorError, UnsupportedError
from hf_taskvec.filenames import DISTRIBUTED_INDEX
from hf_taskvec.models.locations import Location
from hf_taskvec.models.restricted_pickle import PickledRecord, read_pickled_index
from hf_taskvec.models.tensor_files import SAFETENSORS_DTYPES, StoredTensor, TensorFile

_SHARDS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
# Where training programs put the model beside the optimizer's state, and what they put around its names.
_NOT_OF_THE_MODEL = re.compile(r"(optim\w*|lr_scheduler|scheduler|dataloader|train_state|rng\w*)(\.|$)")
_AROUND = ("model.", "module.", "app.", "state.", "state_dict.", "_orig_mod.")


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    #: of what torch saved, in the file; or the tensor's name there
    place: tuple[int, int] | str


@dataclass(frozen=True)
class TensorParts:
    """A tensor in parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    parts: tuple[StoredPart, ...]


def distributed_index(folder: Path) -> Path | None:
    """The file by which a folder is known as a distributed checkpoint; None if it is none."""
    if (folder / DISTRIBUTED_INDEX).is_file():
        return folder / DISTRIBUTED_INDEX
    shards = sorted(path for path in folder.glob("shard-*.safetensors") if _SHARDS.fullmatch(path.name))
    return shards[0] if shards else None


def open_distributed(folder: Path, location: Location | None = None) -> dict[str, StoredTensor]:
    """The model's tensors of a distributed checkpoint, under the names that the model itself has.

    Args:
        folder (`Path`):
            Where the files are.
        location (`Location`, *optional*):
            Where the files can be found again, if that is not the folder.

    Raises:
        `CorruptFileError`: If the index is damaged or unsafe, or the parts do not make whole tensors.
        `MissingFileError`: If a file that the index names is missing.
        `UnsupportedError`: If parts are compressed.
    """
    index = distributed_index(folder)
    assert index is not None
    found = _of_index(index) if index.name == DISTRIBUTED_INDEX else _of_shards(folder)
    found = {name: each for name, each in found.items() if not _NOT_OF_THE_MODEL.match(name)}
    if not found:
        raise MissingFileError(f"{folder.name} holds no tensors of a model, only other state of a training run.")
    for name, each in found.items():
        _check_whole(name, each, folder)
    file = DistributedFiles(index, found, location)
    tensors = {name: StoredTensor(file, name) for name in found}
    return _without_common(tensors)


def _without_common(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Names without what stands before all of them."""
    around = next((each for each in _AROUND if all(name.startswith(each) for name in tensors)), None)
    if around is None:
        return tensors
    return _without_common({name.removeprefix(around): each for name, each in tensors.items()})


def _of_index(index: Path) -> dict[str, TensorParts]:
    metadata = read_pickled_index(index)
    try:
        return _checked_index(metadata)
    except TaskVectorError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"{index.name} in {index.parent.name} is damaged ({error!r}). Save it again.") from None


def _checked_index(metadata: PickledRecord) -> dict[str, TensorParts]:
    places: dict[tuple[str, tuple[int, ...] | None], PickledRecord] = {}
    for key, info in metadata["storage_data"].items():
        places[key["fqn"], None if key.fields.get("offset") is None else _numbers(key["offset"])] = info
    found = {}
    for name, each in metadata["state_dict_metadata"].items():
        if each.kind != "TensorStorageMetadata":
            continue
        parts = []
        for chunk in each["chunks"]:
            offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
            info = places[name, offsets]
            if info.fields.get("transform_descriptors"):
                raise UnsupportedError(f"{name} is stored compressed or otherwise changed. Save it plainly.")
            path, start, length = info["relative_path"], *_numbers((info["offset"], info["length"]))
            if not isinstance(path, str) or Path(path).name != path or path in ("", ".", ".."):
                raise CorruptFileError(f"a part of {name} is outside of its folder: {path!r}. Do not trust this model.")
            parts.append(StoredPart(offsets, sizes, path, (start, length)))
        dtype = each["properties"]["dtype"]
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise CorruptFileError(f"{name}: the index of the checkpoint tells no name or no dtype. Save it again.")
        found[name] = TensorParts(_numbers(each["size"]), dtype, tuple(parts))
    return found


def _of_shards(folder: Path) -> dict[str, TensorParts]:
    found: dict[str, list[tuple[StoredPart, Any]]] = {}
    for path in sorted(each for each in folder.iterdir() if _SHARDS.fullmatch(each.name)):
        try:
            with safe_open(path, framework="pt") as file:
                told = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    info = file.get_slice(name)
                    shape = tuple(info.get_shape())
                    offsets = _numbers(told[name]["saved_offsets"]) if name in told else (0,) * len(shape)
                    found.setdefault(name, []).append((StoredPart(offsets, shape, path.name, name), info.get_dtype()))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptFileError(f"{path.name} in {folder.name} is damaged ({error}). Save it again.") from None
    wholes = {}
    for name, each in found.items():
        unique = {part.offsets: part for part, _ in each}  # replicas hold the same
        if len({dtype for _, dtype in each}) > 1 or len({len(offsets) for offsets in unique}) > 1:
            raise CorruptFileError(f"{folder.name}: the parts of {name} do not belong together. Save it again.")
        ends = zip(*([o + s for o, s in zip(p.offsets, p.sizes, strict=True)] for p in unique.values()), strict=True)
        shape = tuple(max(end) for end in ends)
        wholes[name] = TensorParts(shape, SAFETENSORS_DTYPES.get(each[0][1], each[0][1]), tuple(unique.values()))
    return wholes


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in found):
        raise CorruptFileError("the index of a distributed checkpoint has a size that is no number. Save it again.")
    return found


def _check_whole(name: str, tensor: TensorParts, folder: Path) -> None:
    """Refuse parts that leave something out, overlap, or reach beyond the tensor."""
    shape, parts = tensor.shape, tensor.parts
    inside = all(
        len(part.offsets) == len(part.sizes) == len(shape)
        and all(o + s <= size for o, s, size in zip(part.offsets, part.sizes, shape, strict=True))
        for part in parts
    )
    whole = inside and sum(prod(part.sizes) for part in parts) == prod(shape)
    if whole and len(parts) > 1:
        filled = sorted((part for part in parts if prod(part.sizes)), key=lambda part: part.offsets)
        whole = not any(_overlap(one, other) for number, one in enumerate(filled) for other in _near(filled, number))
    if not whole:
        raise CorruptFileError(
            f"{folder.name}: the parts of {name} do not make a whole tensor of shape {list(shape)}. Was the run killed "
            "while it saved? Take an earlier checkpoint."
        )


def _near(parts: Sequence[StoredPart], number: int) -> Sequence[StoredPart]:
    """The parts after one, in the order of their first rows, that begin before it ends."""
    if not parts[number].offsets:
        return parts[number + 1 :]
    end, last = parts[number].offsets[0] + parts[number].sizes[0], number + 1
    while last < len(parts) and parts[last].offsets[0] < end:
        last += 1
    return parts[number + 1 : last]


def _overlap(one: StoredPart, other: StoredPart) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + t and b < a + s for a, s, b, t in sides)


class DistributedFiles(TensorFile):
    """All files of a distributed checkpoint, as one file of tensors.

    Args:
        path (`Path`):
            By which the checkpoint is known.
        tensors (`Mapping[str, TensorParts]`):
            Those of the model.
        location (`Location`, *optional*):
            Where it can be found again.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorParts], location: Location | None = None) -> None:
        self.path, self.parts = path, tensors
        self.location = location or Location(str(path.parent.resolve()))
        files = sorted({part.file for each in tensors.values() for part in each.parts} | {path.name})
        missing = [file for file in files if not (path.parent / file).is_file()]
        if missing:
            raise MissingFileError(f"{path.parent.name} lacks {missing[0]}, which its index names. Copy it whole.")
        self._stats = {file: _state(path.parent / file) for file in files}
        self.stamp = f"{path.stat().st_size}.{max(each[-1] for each in self._stats.values())}"
        self._identity = self._stats[path.name]
        self._lock = threading.Lock()
        self._maps: dict[str, mmap.mmap] = {}
        self.names = tuple(tensors)

    @override
    def header(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        return self.parts[name].shape, self.parts[name].dtype

    @override
    def _check_unchanged(self) -> None:
        for file, before in self._stats.items():
            try:
                now = _state(self.path.parent / file)
            except OSError:
                continue
            if now[:2] == before[:2] and now != before:
                raise self._changed(file)

    @override
    def tensor(self, name: str) -> torch.Tensor:
        found = self.readable(name)
        return found if isinstance(found, torch.Tensor) else found.rows(0, found.shape[0]).clone()

    @override
    def readable(self, name: str) -> Readable:
        self._check_unchanged()
        reader = _RowsOfParts(self, name)
        return reader if reader.shape else reader.scalar()

    def map_of(self, file: str) -> mmap.mmap:
        """A file, mapped."""
        with self._lock:
            if file not in self._maps:
                with (self.path.parent / file).open("rb") as opened:
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._maps[file]


def _state(path: Path) -> tuple[int, int, int, int]:
    stat = path.stat()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True)
class _RowsOfParts(RowReader):
    """A tensor whose rows are put together from its parts."""

    files: DistributedFiles
    name: str

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.files.parts[self.name].shape

    @property
    @override
    def dtype(self) -> torch.dtype:
        found = self.files.parts[self.name].dtype
        if isinstance(found, str):
            raise UnsupportedError(f"{self.name} is stored as {found}.")
        return found

    @override
    def rows(self, start: int, stop: int, number: int = 0) -> torch.Tensor:
        out = buffer(Slot.ROWS, (stop - start, *self.shape[1:]), self.dtype, self.device, number)
        for part, stored in zip(self.files.parts[self.name].parts, self._stored, strict=True):
            first, last = max(start, part.offsets[0]), min(stop, part.offsets[0] + part.sizes[0])
            if first >= last or not prod(part.sizes):
                continue
            target = out[first - start : last - start]
            for dimension, (offset, size) in enumerate(zip(part.offsets[1:], part.sizes[1:], strict=True), 1):
                target = target.narrow(dimension, offset, size)
            target.copy_(stored[first - part.offsets[0] : last - part.offsets[0]])
        return out

    def scalar(self) -> torch.Tensor:
        """The tensor, if it has no dimensions."""
        return self._stored[0].clone()

    @cached_property
    def _stored(self) -> "list[torch.Tensor]":
        return [self._opened(part) for part in self.files.parts[self.name].parts]

    def _opened(self, part: StoredPart) -> torch.Tensor:
        """A part as a view of its mapped file, which nobody may write to."""
        if isinstance(part.place, str):
            with safe_open(self.files.path.parent / part.file, framework="pt") as file, torch.device("cpu"):
                found: torch.Tensor = file.get_tensor(part.place)
                return found
        whole, (start, length) = self.files.map_of(part.file), part.place
        if start + length > len(whole):
            raise CorruptFileError(f"{part.file} is shorter than the index says: {self.name} is not all there.")
        offset, sizes, strides = self._placed(whole, start, length, part)
        count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if prod(sizes) else 0
        if offset < 0 or offset + count * self.dtype.itemsize > length:
            raise CorruptFileError(f"{part.file}: {self.name} is not all there. Save the checkpoint again.")
        if not count:
            return torch.empty(sizes, dtype=self.dtype)
        flat = torch.frombuffer(memoryview(whole), dtype=self.dtype, count=count, offset=start + offset)
        return flat.as_strided(sizes, strides)

    def _placed(
        self, whole: mmap.mmap, start: int, length: int, part: StoredPart
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Where the elements of a part begin in what torch saved of it, its sizes and its strides.

        torch's own loader tells, without reading the elements and without running code.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        try:
            with FakeTensorMode():
                found = torch.load(
                    io.BufferedReader(_Window(whole, start, length)), weights_only=True, map_location="cpu"
                )
            if tuple(found.shape) != part.sizes or found.dtype != self.dtype:
                raise CorruptFileError(f"it is {found.dtype} of shape {list(found.shape)}")
            begin = found.untyped_storage()._checkpoint_offset + found.storage_offset() * self.dtype.itemsize
            return int(begin), tuple(found.shape), tuple(found.stride())
        except Exception as error:  # torch.load raises whatever the damaged bytes lead it to
            raise CorruptFileError(
                f"{part.file}: the part of {self.name} at {list(part.offsets)} is damaged or no plain tensor "
                f"({type(error).__name__}: {str(error)[:80]}). Save the checkpoint again."
            ) from None


class _Window(io.RawIOBase):
    """A part of a mapped file, as a file."""

    def __init__(self, whole: mmap.mmap, start: int, length: int) -> None:
        super().__init__()
        self._whole, self._start, self._length, self._at = whole, start, length, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def readinto(self, target: Any) -> int:
        count = max(0, min(len(target), self._length - self._at))
        target[:count] = self._whole[self._start + self._at : self._start + self._at + count]
        self._at += count
        return count
