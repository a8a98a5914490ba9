"""Files of tensors, mapped: nothing is read until it is used.

safetensors are opened with the safetensors library, which checks the header against the file; `.bin` files with torch's
`weights_only` loader, which executes no code, after making sure that they hold no more than their size. What an index
of shards says is checked before it is believed.
"""

import hashlib
import pickle
import re
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_taskvec.algebra.sources import Readable, Source, samples
from hf_taskvec.errors import ChangedSourceError, CorruptFileError, MissingFileError, UnsupportedError, some
from hf_taskvec.json_files import read_json
from hf_taskvec.models.gguf_header import map_gguf
from hf_taskvec.models.locations import Location

#: What safetensors calls a dtype -> the dtype. Besides those of weights, old checkpoints hold masks and the like, saved
#: vectors the positions of what is not zero, and quantised models codes and scales.
SAFETENSORS_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class TensorFile:
    """One file of tensors, mapped. Equal to another if both are the same unchanged file."""

    def __init__(self, path: Path, location: Location | None = None) -> None:
        self.path = path
        self.location = location or Location(str(path.parent.resolve()))
        stat = path.stat()
        #: changes when the file is written to, and stays when it is moved
        self.stamp = f"{stat.st_size}.{stat.st_mtime_ns}"
        self._identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        self._tensors: dict[str, torch.Tensor] | None = None
        #: of a GGUF file: ggml's number of each tensor's type
        self.kinds: dict[str, int] = {}
        try:
            if path.suffix == ".safetensors":
                self._file = safe_open(path, framework="pt")
                self.names = tuple(self._file.keys())
            elif path.suffix == ".gguf":
                self._tensors, self.kinds = map_gguf(path)
                self.names = tuple(self._tensors)
            else:
                self._tensors = _load_bin(path)
                self.names = tuple(self._tensors)
        except (SafetensorError, OSError) as error:
            raise CorruptFileError(
                f"{path.name} is damaged or not a safetensors file ({error}). Download or save it again."
            ) from None

    def header(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        """The shape and the dtype of a tensor (the dtype's name, where it is not one of ours)."""
        if self._tensors is not None:
            return tuple(self._tensors[name].shape), self._tensors[name].dtype
        info = self._file.get_slice(name)
        return tuple(info.get_shape()), SAFETENSORS_DTYPES.get(info.get_dtype(), info.get_dtype())

    def _check_unchanged(self) -> None:
        """Refuse a file that was written over in place: what is mapped of it has changed with it.

        A file that was replaced or removed does no harm: the old one stays mapped.
        """
        try:
            stat = self.path.stat()
        except OSError:
            return
        now = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if now[:2] == self._identity[:2] and now != self._identity:
            raise self._changed(self.path.name)

    def _changed(self, file: str) -> ChangedSourceError:
        return ChangedSourceError(
            f"{file} in {self.path.parent.name} was written over since the task vector was made from it. "
            "Extract the vector again; to keep a vector, save it."
        )

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the file, mapped; an error if the file was written over meanwhile."""
        self._check_unchanged()
        if self._tensors is not None:
            return self._tensors[name]
        with torch.device("cpu"):  # safetensors asks torch for its default device
            return self._file.get_tensor(name)

    def readable(self, name: str) -> Readable:
        """A tensor of the file, or what gives its rows."""
        return self.tensor(name)

    def sampled(self, name: str) -> bytes:
        """Some bytes of a tensor of the file; see `samples`."""
        return samples(self.tensor(name))

    @property
    def digest(self) -> str | None:
        """The sha256 of the whole file, where the Hub's cache knows it: its links are named by content."""
        target = self.path.readlink().name if self.path.is_symlink() else ""
        return target if len(target) == 64 else None

    def __reduce__(self) -> "tuple[Callable[..., TensorFile], tuple[Path, Location, str]]":
        """Pickled as where it is: whoever unpickles it opens it again, if it is still the same file."""
        path = self.path.absolute()
        if _stamp(path) != self.stamp:
            raise ChangedSourceError(
                f"{path.name} in {path.parent.name} was replaced or removed since it was opened, so a vector that "
                "reads it cannot be pickled. Save the vector to a folder and load it where it is needed."
            )
        return _open_again, (path, self.location, self.stamp)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorFile) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)


def _stamp(path: Path) -> str | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return f"{stat.st_size}.{stat.st_mtime_ns}"


def _open_again(path: Path, location: Location, stamp: str) -> TensorFile:
    """What a pickled `TensorFile` becomes."""
    if _stamp(path) != stamp:
        raise ChangedSourceError(
            f"{path.name} in {path.parent.name} is not here, or not the file that it was when the task vector was "
            "pickled. A pickled vector holds the places of its files, not their content: to move a vector, save it "
            "to a folder and load that."
        )
    return TensorFile(path, location)


@dataclass(frozen=True)
class StoredTensor(Source):
    """A tensor in a mapped file."""

    file: TensorFile
    name: str

    @cached_property
    def _header(self) -> tuple[tuple[int, ...], Any]:
        return self.file.header(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._header[0]

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self._header[1]

    def read(self) -> torch.Tensor:
        """The mapped tensor."""
        return self.file.tensor(self.name)

    def sampled(self) -> bytes:
        """Some bytes of it."""
        return self.file.sampled(self.name)

    def readable(self) -> Readable:
        """The mapped tensor, or what gives its rows if it is stored in parts."""
        return self.file.readable(self.name)

    @cached_property
    def handle(self) -> str:
        """Its file, as that was when it was opened, and its name there."""
        return f"{self.file._identity}|{self.name}"

    @cached_property
    def identity(self) -> str:
        """Samples of its content, with its name and its file's size and time of change."""
        sampled = hashlib.sha256(self.sampled()).hexdigest()
        return f"{sampled}|{self.file.stamp}|{self.name}"


def file_of(source: Source) -> TensorFile:
    """The file that a tensor of a checkpoint is in, whatever view of it that is."""
    stored = source.roots[0]
    assert isinstance(stored, StoredTensor)
    return stored.file


def _check_uncompressed(path: Path) -> None:
    """Refuse a torch file that is larger in memory than on disk. torch stores its zip files' members as they are.

    The format of before torch 1.6 is no zip file, and torch reads no more than it has.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # what torch itself goes by
            return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CorruptFileError(
            f"{path.name} is compressed, and may take any amount of memory when it is read. torch does not write such "
            "files. Ask its author for safetensors."
        )
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise CorruptFileError(
            f"{path.name} claims to hold more than its size. It is damaged, or made to do harm: do not trust it."
        )


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    try:
        _check_uncompressed(path)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format of before torch 1.6 cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except CorruptFileError:
        raise
    except pickle.UnpicklingError:
        raise CorruptFileError(
            f"{path.name} holds more than tensors, and loading it could run code. Ask its author for safetensors, or "
            "convert it on a machine where that does no harm."
        ) from None
    except Exception as error:  # torch.load raises whatever the damaged bytes lead it to
        raise CorruptFileError(
            f"{path.name} is damaged or not a torch file ({type(error).__name__}). Download or save it again."
        ) from None
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise CorruptFileError(f"{path.name} is not a state dict: it must map names to tensors and hold nothing else.")
    for name, tensor in loaded.items():
        strange = tensor.layout != torch.strided or tensor.is_meta
        if strange or tensor.nbytes > tensor.untyped_storage().nbytes():  # rows that are the same memory many times
            raise UnsupportedError(f"{path.name}: {name} is not a plain dense tensor. Save it as one.")
    return dict(loaded)


def open_files(folder: Path, names: tuple[str, ...], location: Location | None = None) -> dict[str, StoredTensor]:
    """All tensors of the first of the named files (or indices of shards) that the folder has.

    Args:
        folder (`Path`):
            Where the files are.
        names (`tuple[str, ...]`):
            Files, the preferred one first.
        location (`Location`, *optional*):
            Where the files can be found again, if that is not the folder.
    """
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise MissingFileError(
            f"{folder.name} has none of {', '.join(names)}. {checkpoints_in(folder) or 'Is it a model folder?'}"
        )
    if re.search(r"\.index(\.[\w-]+)?\.json$", found.name):
        present = {path.name for path in found.parent.iterdir()}
        return open_shards(found, present, lambda shard: TensorFile(found.parent / shard, location))
    file = TensorFile(found, location)
    return {name: StoredTensor(file, name) for name in file.names}


def checkpoints_in(folder: Path) -> str:
    """What to say of the `checkpoint-N` folders that training left in a folder; nothing if there are none."""
    found = [path.name for path in folder.glob("checkpoint-*") if path.is_dir()]
    found.sort(key=lambda name: (len(name), name))
    return f"It holds {some(found)} of a training: give one of them." if found else ""


def open_shards(index: Path, present: Collection[str], opened: Callable[[str], TensorFile]) -> dict[str, StoredTensor]:
    """All tensors of the shards that an index names, after making sure that the two agree.

    Args:
        index (`Path`):
            The index.
        present (`Collection[str]`):
            The files that lie beside it.
        opened (`Callable`):
            Opens one of them.
    """
    weight_map = read_json(index).get("weight_map")
    if not weight_map or not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CorruptFileError(f"{index.name} has no weight_map from names to files.")
    tensors = {}
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        shards.setdefault(shard, set()).add(name)
    for shard in sorted(shards):
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise CorruptFileError(
                f"{index.name} names a shard outside its folder: {shard!r}. Do not trust this model."
            )
        if shard not in present:
            raise MissingFileError(f"{index.name} names {shard}, which is missing. Download the model again.")
    for shard, listed in sorted(shards.items()):
        file = opened(shard)
        for name in sorted(listed ^ set(file.names)):
            place = f"only in {shard}" if name not in listed else f"not in {shard}"
            raise CorruptFileError(
                f"{index.name} and its shards disagree: {name} is {place}. Download the model again."
            )
        tensors.update({name: StoredTensor(file, name) for name in file.names})
    return tensors
