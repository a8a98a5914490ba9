"""Reading model files: Hub ids, folders, shards. Everything is mapped; nothing is read until used.

safetensors are opened with the safetensors library, which checks the header against the file; `.bin` files with torch's
`weights_only` loader, which executes no code. What an index says is checked before it is believed.
"""

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_taskvec.algebra.provenance import ModelRecord
from hf_taskvec.algebra.rounding import FLOATS
from hf_taskvec.algebra.sources import Source, fingerprint, samples
from hf_taskvec.errors import ChangedSourceError, CorruptFileError, MismatchError, MissingFileError, UnsupportedError
from hf_taskvec.models.card_metadata import stated
from hf_taskvec.models.layout import Layout, layout_of_config
from hf_taskvec.models.tokenizer_digest import vocabulary_digest

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Files that tell what a folder without a model's weights holds.
_NO_MODELS = {
    "adapter_config.json": "a PEFT adapter, not a full model: use TaskVector.from_adapter()",
    "taskvec.json": "a saved task vector, not a model: use TaskVector.load()",
}
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class Home:
    """Where a file can be found again: a Hub id with its commit, or a folder."""

    where: str
    revision: str | None = None


class TensorFile:
    """One file of tensors, mapped. Equal to another if both are the same unchanged file."""

    def __init__(self, path: Path, home: Home | None = None) -> None:
        self.path = path
        self.home = home or Home(str(path.parent.resolve()))
        stat = path.stat()
        #: changes when the file is written to, and stays when it is moved
        self.stamp = f"{stat.st_size}.{stat.st_mtime_ns}"
        self._identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        self._tensors: dict[str, torch.Tensor] | None = None
        try:
            if path.suffix == ".safetensors":
                self._file = safe_open(path, framework="pt")
                self.names = tuple(self._file.keys())
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
        return tuple(info.get_shape()), _DTYPES.get(info.get_dtype(), info.get_dtype())

    def _check_unchanged(self) -> None:
        """Refuse a file that was written over in place: what is mapped of it has changed under our hands.

        A file that was replaced or removed does no harm: the old one stays mapped.
        """
        try:
            stat = self.path.stat()
        except OSError:
            return
        now = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if now[:2] == self._identity[:2] and now != self._identity:
            raise ChangedSourceError(
                f"{self.path.name} in {self.path.parent.name} was written over since the task vector was made from it. "
                "Extract the vector again; to keep a vector, save it."
            )

    def tensor(self, name: str) -> torch.Tensor:
        self._check_unchanged()
        return self._tensors[name] if self._tensors is not None else self._file.get_tensor(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorFile) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)


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
        return self._header[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._header[1]

    def read(self) -> torch.Tensor:
        return self.file.tensor(self.name)

    @cached_property
    def identity(self) -> str:
        sampled = hashlib.sha256(samples(self.read())).hexdigest()
        return f"{sampled}|{self.file.stamp}|{self.name}"


@dataclass(frozen=True)
class Checkpoint:
    """A model's weights under their canonical names, with what is known about the model."""

    name: str
    tensors: Mapping[str, Source]
    layout: Layout = field(default_factory=Layout)
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    revision: str | None = None
    files: tuple[tuple[str, str], ...] = ()
    #: canonical name -> name in the file, where they differ
    stored_as: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """The same for each copy of the weights, whatever their sharding, on disk, on the Hub or live."""
        return fingerprint(self.tensors)

    def record(self) -> ModelRecord:
        stated_license, datasets = stated(self.folder) if self.folder else (None, ())
        return ModelRecord(
            self.name,
            self.revision,
            self.layout.architecture,
            self.fingerprint,
            self.files,
            stated_license,
            datasets,
            vocabulary_digest(self.folder) if self.folder else None,
        )

    @property
    def where(self) -> str:
        return f"{self.name}@{self.revision[:12]}" if self.revision else self.name


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format of before torch 1.6 cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
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
        if tensor.layout != torch.strided or tensor.is_meta:
            raise UnsupportedError(f"{path.name}: {name} is not a plain dense tensor. Save it as one.")
    return dict(loaded)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path.name} is missing in {path.parent.name}.") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path.name} is not valid JSON ({error}).") from None
    if not isinstance(data, dict):
        raise CorruptFileError(f"{path.name} must hold a JSON object.")
    return data


def open_files(folder: Path, names: tuple[str, ...], home: Home | None = None) -> dict[str, StoredTensor]:
    """All tensors of the first of the named files (or indices of shards) that the folder has."""
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise MissingFileError(f"{folder.name} has none of {', '.join(names)}. Is it a model folder?")
    if found.name.endswith(".index.json"):
        return _open_shards(found, home)
    file = TensorFile(found, home)
    return {name: StoredTensor(file, name) for name in file.names}


def _open_shards(index: Path, home: Home | None) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not weight_map or not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CorruptFileError(f"{index.name} has no weight_map from names to files.")
    tensors = {}
    present = {path.name for path in index.parent.iterdir()}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise CorruptFileError(
                f"{index.name} names a shard outside its folder: {shard!r}. Do not trust this model."
            )
        if shard not in present:
            raise MissingFileError(f"{index.name} names {shard}, which is missing. Download the model again.")
        file = TensorFile(index.parent / shard, home)
        listed = {name for name, where in weight_map.items() if where == shard}
        for name in sorted(listed ^ set(file.names)):
            place = f"only in {shard}" if name not in listed else f"not in {shard}"
            raise CorruptFileError(
                f"{index.name} and its shards disagree: {name} is {place}. Download the model again."
            )
        tensors.update({name: StoredTensor(file, name) for name in file.names})
    return tensors


def split_revision(where: str, revision: str | None) -> tuple[str, str | None]:
    """`"me/model@v2"` as id and revision.

    >>> split_revision("me/model@v2", None)
    ('me/model', 'v2')
    """
    if revision is None and "@" in where:
        where, revision = where.rsplit("@", 1)
    return where, revision


def locate(
    where: str | Path, revision: str | None, token: str | bool | None, patterns: list[str]
) -> tuple[Path, str, str | None]:
    """The local folder of a folder or a Hub id (downloaded if need be), its name, and its commit."""
    folder = Path(where)
    if folder.is_dir():
        return folder, folder.resolve().name, None
    if isinstance(where, Path) or where.count("/") > 1 or where.startswith((".", "/", "~")):
        raise MissingFileError(f"there is no folder {folder.name!r} at the given path.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    where, revision = split_revision(where, revision)
    try:
        found = snapshot_download(where, revision=revision, token=token, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise MissingFileError(
            f"{where!r} is neither a folder here nor a repository that the Hub gave ({type(error).__name__}: {reason})."
        ) from None
    return Path(found), where, Path(found).name


def open_checkpoint(
    where: str | Path, revision: str | None = None, token: str | bool | None = None, companions: list[str] | None = None
) -> Checkpoint:
    """The weights of a model in a folder or on the Hub, under their canonical names.

    `companions` are patterns of further files to fetch from the Hub (tokenizer and the like).
    """
    beside = ["*.json", *(companions or [])]
    folder, name, commit = locate(where, revision, token, [*beside, "*.safetensors"])
    if not any((folder / file).exists() for file in WEIGHTS) and commit is not None:
        folder, name, commit = locate(where, revision, token, [*beside, "pytorch_model*.bin"])
    if not any((folder / file).exists() for file in WEIGHTS):
        for file, what in _NO_MODELS.items():
            if (folder / file).exists():
                raise MismatchError(f"{name} is {what}.")
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    stored = open_files(folder, WEIGHTS, Home(name, commit) if commit else None)
    if config.get("quantization_config"):  # its scales and the like have names that no architecture knows
        for raw, source in stored.items():
            if source.dtype not in FLOATS:
                raise _quantised(name, raw, source)
    layout = layout_of_config(config)
    placed = layout.place(stored, name)
    tensors = canonical_tensors(placed, stored, layout, name)
    return Checkpoint(
        name=name,
        tensors=tensors,
        layout=layout,
        config=config,
        folder=folder,
        revision=commit,
        files=_hub_digests(folder, stored),
        stored_as={c: raw for c, raw in placed.items() if c != raw},
    )


def canonical_tensors(
    placed: Mapping[str, str], stored: Mapping[str, Source], layout: Layout, where: str
) -> dict[str, Source]:
    """The tensors under canonical names: floating-point only, tied weights once."""
    tensors: dict[str, Source] = {}
    for canonical, raw in placed.items():
        source = stored[raw]
        if source.dtype not in FLOATS:
            raise _quantised(where, raw, source)
        tensors[canonical] = source
    for alias, owner in layout.tied.items():
        copy = tensors.pop(alias, None)
        if copy is None:
            continue
        if owner not in tensors:
            tensors[owner] = copy
        elif copy != tensors[owner] and not torch.equal(copy.read(), tensors[owner].read()):
            raise MismatchError(
                f"{where}: {alias} differs from {owner}, but the config ties them. If the model was untied on purpose, "
                "set tie_word_embeddings=False in its config."
            )
    return tensors


def _quantised(where: str, name: str, source: Source) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: {name} is stored as {source.dtype}. Integer and quantised weights cannot be subtracted; "
        "use the model in bf16, fp16 or fp32."
    )


def _hub_digests(folder: Path, stored: Mapping[str, StoredTensor]) -> tuple[tuple[str, str], ...]:
    """The sha256 of each weight file, where the Hub's cache knows it: its links are named by content."""
    found = {}
    for path in {source.file.path for source in stored.values()}:
        target = path.readlink().name if path.is_symlink() else ""
        if len(target) == 64:
            found[path.name] = target
    return tuple(sorted(found.items()))
