"""A task vector's own files: `taskvec.json`, which a person can read, and safetensors beside it.

The JSON lists every parameter's terms and every tensor with its dtype, shape and sha256, and carries a checksum of
itself; so no damage to either file passes unnoticed. Tensors are mapped, and checked when they are first used.

`taskvec.json`, format 1:
    format, library     versions
    provenance          the expression, its weights, the origins of its labels
    parameters          name -> terms: a weight, and a change of some kind over tensors
    tensors             tensor -> file (for a reference: checkpoint and name), dtype, shape, sha256
    checkpoints         for a reference: the folders or Hub ids that the tensors are read from
    discarded           after compression: the share of the squared norm lost, for each parameter
    checksum            sha256 of all of the above
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_taskvec._version import __version__
from hf_taskvec.algebra.computed_deltas import Computed
from hf_taskvec.algebra.deltas import Delta, Dense, Difference, DoRA, LowRank, Rows, tile_rows
from hf_taskvec.algebra.exact_difference import Format, exact_format, exact_rows
from hf_taskvec.algebra.provenance import Provenance
from hf_taskvec.algebra.rounding import check_finite, dtype_name, parse_dtype, round_once
from hf_taskvec.algebra.sources import RowsOf, Source, Transposed, samples, tensor_bytes
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import (
    BadValueError,
    ChangedSourceError,
    CorruptFileError,
    MissingFileError,
    UnsupportedError,
)
from hf_taskvec.filenames import ADAPTER_WEIGHTS, MODEL_WEIGHTS
from hf_taskvec.files.output_folder import new_folder
from hf_taskvec.files.safetensors_writer import SafetensorsWriter, TensorSpec, shard
from hf_taskvec.json_files import read_json
from hf_taskvec.models.locations import Location, locate
from hf_taskvec.models.tensor_files import StoredTensor, TensorFile, open_files
from hf_taskvec.sizes import parse_size

FORMAT = 1
JSON_NAME = "taskvec.json"


# Writing.


@dataclass
class _Encoder:
    """Turns terms into JSON, and collects the tensors that must be written."""

    dtype: torch.dtype | None = None
    reference: bool = False
    tensors: dict[str, "_Written"] = field(default_factory=dict)
    _known: dict[Any, str] = field(default_factory=dict)

    def terms(self, name: str, terms: tuple[Term, ...]) -> list[dict[str, Any]]:
        result = []
        for number, term in enumerate(terms):
            change = self.delta(f"{name}:{number}", name, term.delta)
            if change is not None:
                result.append({"weight": term.weight, **change})
        return result

    def delta(self, key: str, name: str, delta: Delta) -> dict[str, Any] | None:
        match delta:
            case Difference() if not self.reference:
                return self._difference(key, name, delta)
            case Difference():
                pair = {"base": self.source(key, delta.base), "tuned": self.source(key, delta.tuned)}
                return {"kind": "difference", **pair}
            case Computed() if self.reference:
                raise UnsupportedError(
                    f"{name} is computed by a merging rule, so no file can be referred to. Save the vector without "
                    "reference=True."
                )
            case Computed() | Dense() if self.dtype is not None:
                return self._rounded(key, name, delta, self.dtype)
            case Computed():  # whose numbers are fp32
                return self._rounded(key, name, delta, torch.float32)
            case Dense():
                parts = [self.source(f"{key}.part{n}", part) for n, part in enumerate(delta.tensors)]
                return {"kind": "dense", "parts": parts}
            case LowRank():
                left, right = self.source(f"{key}.left", delta.left), self.source(f"{key}.right", delta.right)
                return {"kind": "low-rank", "scaling": delta.scaling, "left": left, "right": right}
            case Rows():
                index = delta.index
                rows = {"start": index.start, "stop": index.stop} if isinstance(index, range) else list(index)
                inner = self.delta(key, name, delta.inner)
                return inner and {"kind": "rows", "rows": rows, "of": delta.n_rows, "change": inner}
            case DoRA():
                return {
                    "kind": "dora",
                    "axis": delta.axis,
                    "base": self.source(f"{key}.base", delta.base),
                    "magnitude": self.source(f"{key}.magnitude", delta.magnitude),
                    "low_rank": self.delta(key, name, delta.low_rank),
                }
        raise AssertionError(f"{name}: no way to store a {type(delta).__name__}")

    def _difference(self, key: str, name: str, delta: Difference) -> dict[str, Any] | None:
        if self.dtype is not None:
            return self._rounded(key, name, delta, self.dtype)
        form = exact_format(delta.tuned.read(), delta.base.read(), name)
        shared = _Shared(delta, form)
        for part in range(form.parts):
            self.tensors[f"{key}.part{part}"] = _Written(form.dtype, delta.shape, shared, part)
        parts = [f"{key}.part{part}" for part in range(form.parts)]
        return {"kind": "dense", "parts": parts} if parts else None

    def _rounded(self, key: str, name: str, delta: Delta, dtype: torch.dtype) -> dict[str, Any]:
        self.tensors[key] = _Written(dtype, delta.shape, _Rounded(name, delta))
        return {"kind": "dense", "parts": [key]}

    def source(self, key: str, source: Source) -> Any:
        if isinstance(source, Transposed):
            return {"transposed": self.source(key, source.source)}
        if isinstance(source, RowsOf) and self.reference:
            index = source.index
            rows = [index.start, index.stop] if isinstance(index, range) else list(index)
            return {"rows": rows, "range": isinstance(index, range), "of": self.source(key, source.source)}
        if source not in self._known:
            if self.reference:
                key = f"{key}.{len(self.tensors)}"
            self._known[source] = key
            self.tensors[key] = _Written(source.dtype, source.shape, _Plain(source))
        return self._known[source]


@dataclass(frozen=True)
class _Plain:
    """A stored tensor, copied."""

    source: Source

    def rows(self, dtype: torch.dtype, part: int) -> Iterator[torch.Tensor]:
        tensor = self.source.read()
        yield from tensor.split(tile_rows(self.source.shape)) if tensor.ndim else [tensor]


@dataclass(frozen=True)
class _Shared:
    """The exact parts of a difference."""

    delta: Difference
    form: Format

    def rows(self, dtype: torch.dtype, part: int) -> Iterator[torch.Tensor]:
        for parts in exact_rows(self.delta.tuned.read(), self.delta.base.read(), self.form):
            yield parts[part]


@dataclass(frozen=True)
class _Rounded:
    """A dense change rounded to a dtype that may lose something."""

    name: str
    delta: Delta

    def rows(self, dtype: torch.dtype, part: int) -> Iterator[torch.Tensor]:
        whole = Sum(self.delta.shape, [Term(1.0, self.delta)])
        for start, stop in whole.tiles():
            rows = whole.rows(start, stop)
            check_finite(rows, dtype, self.name)
            yield round_once(rows, dtype)


@dataclass(frozen=True)
class _Written:
    """A tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: _Plain | _Shared | _Rounded
    part: int = 0

    def rows(self) -> Iterator[torch.Tensor]:
        return self.content.rows(self.dtype, self.part)


def save(
    vector: TaskVector,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    reference: bool = False,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> dict[str, float]:
    """See `TaskVector.save`."""
    if reference and dtype is not None:
        raise BadValueError("a reference stores no tensors, so it takes no dtype.")
    most = parse_size(max_shard_size)
    encoder = _Encoder(dtype, reference)
    with new_folder(folder, JSON_NAME, overwrite) as part:
        parameters = {name: each for name in vector if (each := encoder.terms(name, vector[name]))}
        document: dict[str, Any] = {
            "format": FORMAT,
            "library": __version__,
            "provenance": vector.provenance.to_json(),
            "parameters": parameters,
        }
        if reference:
            document.update(_reference(encoder.tensors))
        else:
            document["tensors"] = _write_tensors(encoder.tensors, part, most)
        if vector.discarded:
            document["discarded"] = dict(vector.discarded)
        document["checksum"] = _checksum(document)
        (part / JSON_NAME).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return _errors(encoder) if dtype is not None else {}


def _write_tensors(tensors: Mapping[str, _Written], folder: Path, most: int) -> dict[str, Any]:
    specs = {name: TensorSpec(each.dtype, each.shape) for name, each in tensors.items()}
    listed = {}
    for file, contents in shard(specs, most, "taskvec").items():
        if not contents:
            continue
        writer = SafetensorsWriter(folder / file, contents, {"format": "pt"})
        for name, spec in contents.items():
            digest, start = hashlib.sha256(), 0
            for rows in tensors[name].rows():
                digest.update(tensor_bytes(rows))
                writer.write(name, rows, start)
                start += rows.shape[0] if rows.ndim else 1
            listed[name] = {
                "file": file,
                "dtype": dtype_name(spec.dtype),
                "shape": list(spec.shape),
                "sha256": digest.hexdigest(),
            }
        writer.close()
    return listed


def _reference(tensors: Mapping[str, _Written]) -> dict[str, Any]:
    """What a reference records instead of tensors: where each one is, and what it must be."""
    checkpoints: dict[Any, int] = {}
    listed = {}
    for name, each in tensors.items():
        assert isinstance(each.content, _Plain)
        source = each.content.source
        stored = source.stored if isinstance(source, VerifiedTensor) else source
        if not isinstance(stored, StoredTensor):
            raise UnsupportedError(
                f"{name.split(':')[0]} comes from a live model or a computation, so no file can be referred to. "
                "Save the vector without reference=True."
            )
        if stored.file.path.name.startswith("taskvec"):
            raise UnsupportedError(
                f"{name.split(':')[0]} comes from a saved task vector, and a reference can point to models and adapters "
                "only. Save the vector without reference=True, or make the reference from a vector extracted anew."
            )
        tensor = stored.read()
        listed[name] = {
            "checkpoint": checkpoints.setdefault(stored.file.location, len(checkpoints)),
            "name": stored.name,
            "dtype": dtype_name(each.dtype),
            "shape": list(each.shape),
            "sha256": hashlib.sha256(tensor_bytes(tensor)).hexdigest(),
            "samples": hashlib.sha256(samples(tensor)).hexdigest(),
        }
    homes = [{"where": home.where, "revision": home.revision} for home in checkpoints]
    return {"tensors": listed, "checkpoints": homes}


def _errors(encoder: _Encoder) -> dict[str, float]:
    """The relative error of each parameter whose dense change was rounded."""
    lost: dict[str, tuple[float, float]] = {}
    for each in encoder.tensors.values():
        if not isinstance(each.content, _Rounded):
            continue
        exact = Sum(each.shape, [Term(1.0, each.content.delta)])
        name = each.content.name
        error, size = lost.get(name, (0.0, 0.0))
        for start, stop in exact.tiles():
            rows = exact.rows(start, stop)
            size += rows.square().sum().item()
            error += (round_once(rows, each.dtype).double() - rows).square_().sum().item()
        lost[name] = (error, size)
    return {name: (error / size) ** 0.5 for name, (error, size) in lost.items() if error}


# Reading.


@dataclass(frozen=True)
class VerifiedTensor(Source):
    """A stored tensor that is checked against its recorded sha256 when it is first read."""

    stored: StoredTensor
    sha256: str
    is_reference: bool = False
    _checked: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def identity(self) -> str:
        return self.sha256

    def read(self) -> torch.Tensor:
        tensor = self.stored.read()
        if not self._checked:
            if hashlib.sha256(tensor_bytes(tensor)).hexdigest() != self.sha256:
                raise _changed(self.stored.name, self.stored.file.path.name, self.is_reference)
            self._checked.add(self.sha256)
        return tensor


def _changed(name: str, file: str, is_reference: bool) -> ChangedSourceError | CorruptFileError:
    if is_reference:
        return ChangedSourceError(
            f"{name} in {file} is not what it was when this task vector was saved as a reference: the model changed "
            "since. Use the revision that the vector was made from, or extract it again."
        )
    return CorruptFileError(
        f"{name} in {file} does not match its checksum: the file is damaged. Download or save the vector again."
    )


def load(
    folder: str | Path, *, revision: str | None = None, token: str | bool | None = None, verify: bool = True
) -> TaskVector:
    """See `TaskVector.load`."""
    if not isinstance(folder, str | Path):
        raise BadValueError(f"a task vector is loaded from a folder or a Hub id, not from {folder!r}.")
    path, name, _ = locate(folder, revision, token, ["taskvec*"])
    if not (path / JSON_NAME).exists():
        raise MissingFileError(f"{name} has no {JSON_NAME}: it is not a saved task vector.")
    document = read_json(path / JSON_NAME)
    found = document.get("format")
    if found is True or found != FORMAT:  # True == 1
        raise CorruptFileError(
            f"{name} has task vector format {found!r}; this hf_taskvec reads format {FORMAT}. Upgrade hf_taskvec."
        )
    try:
        if verify and document.get("checksum") != _checksum(document):
            raise CorruptFileError(
                f"{JSON_NAME} of {name} does not match its checksum: it was damaged or edited. Download or save the "
                "vector again, or pass verify=False if you edited it on purpose."
            )
        return _decode(document, path, token, verify)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, CorruptFileError | ChangedSourceError | MissingFileError | BadValueError):
            raise
        raise CorruptFileError(f"{JSON_NAME} of {name} is not a valid task vector ({error}).") from None


def _decode(document: dict[str, Any], folder: Path, token: str | bool | None, verify: bool) -> TaskVector:
    is_reference = "checkpoints" in document
    sources: dict[str, Source] = {}
    open_tensors = _open_reference(document, token) if is_reference else _open_own(document, folder)
    for key, entry in document["tensors"].items():
        stored = open_tensors[key]
        file = stored.file.path.name
        if stored.shape != tuple(entry["shape"]) or stored.dtype != parse_dtype(entry["dtype"]):
            raise _changed(stored.name, file, is_reference)
        if is_reference and verify and hashlib.sha256(samples(stored.read())).hexdigest() != entry["samples"]:
            raise _changed(stored.name, file, is_reference)
        sources[key] = VerifiedTensor(stored, str(entry["sha256"]), is_reference) if verify else stored
    terms = {
        name: [Term(float(term["weight"]), _delta(term, sources)) for term in each]
        for name, each in document["parameters"].items()
    }
    return TaskVector(terms, Provenance.from_json(document["provenance"]), document.get("discarded"))


def _open_own(document: dict[str, Any], folder: Path) -> dict[str, StoredTensor]:
    files: dict[str, TensorFile] = {}
    present = {path.name for path in folder.iterdir()}
    opened = {}
    for key, entry in document["tensors"].items():
        file = entry["file"]
        if not isinstance(file, str) or Path(file).name != file:
            raise CorruptFileError(f"{JSON_NAME} names a file outside its folder: {file!r}. Do not trust this vector.")
        if file not in files:
            if file not in present:
                raise MissingFileError(f"{file} is missing in {folder.name}. Download or save the vector again.")
            files[file] = TensorFile(folder / file)
        if key not in files[file].names:
            raise CorruptFileError(
                f"{file} has no tensor {key}: the file is damaged. Download or save the vector again."
            )
        opened[key] = StoredTensor(files[file], key)
    return opened


def _open_reference(document: dict[str, Any], token: str | bool | None) -> dict[str, StoredTensor]:
    checkpoints = []
    for home in document["checkpoints"]:
        where, revision = home["where"], home["revision"]
        folder, _, _ = locate(where, revision, token, ["*.json", "*.safetensors", "*.bin"])
        again = (
            Location(where, revision) if revision else None
        )  # not the cache, should this be saved as a reference again
        checkpoints.append(open_files(folder, (*MODEL_WEIGHTS, *ADAPTER_WEIGHTS), again))
    opened = {}
    for key, entry in document["tensors"].items():
        tensors = checkpoints[entry["checkpoint"]]
        if entry["name"] not in tensors:
            where = Path(document["checkpoints"][entry["checkpoint"]]["where"]).name
            raise ChangedSourceError(
                f"{where} no longer has {entry['name']}: it changed since this reference was saved."
            )
        opened[key] = tensors[entry["name"]]
    return opened


def _delta(entry: dict[str, Any], sources: Mapping[str, Source]) -> Delta:
    match entry["kind"]:
        case "dense":
            return Dense(tuple(_source(part, sources) for part in entry["parts"]))
        case "difference":
            return Difference(_source(entry["base"], sources), _source(entry["tuned"], sources))
        case "low-rank":
            left, right = _source(entry["left"], sources), _source(entry["right"], sources)
            return LowRank(left, right, float(entry["scaling"]))
        case "rows":
            rows = entry["rows"]
            index = range(rows["start"], rows["stop"]) if isinstance(rows, dict) else tuple(rows)
            return Rows(index, _delta(entry["change"], sources), int(entry["of"]))
        case "dora":
            low_rank = _delta(entry["low_rank"], sources)
            if not isinstance(low_rank, LowRank):
                raise CorruptFileError(f"{JSON_NAME} has a DoRA change without low-rank factors.")
            base, magnitude = _source(entry["base"], sources), _source(entry["magnitude"], sources)
            return DoRA(base, low_rank, magnitude, int(entry["axis"]))
    raise CorruptFileError(f"{JSON_NAME} has a change of unknown kind {entry['kind']!r}. Upgrade hf_taskvec.")


def _source(entry: Any, sources: Mapping[str, Source]) -> Source:
    if isinstance(entry, str):
        return sources[entry]
    if "transposed" in entry:
        return Transposed(_source(entry["transposed"], sources))
    rows = entry["rows"]
    return RowsOf(_source(entry["of"], sources), range(*rows) if entry["range"] else tuple(rows))


def _checksum(document: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
