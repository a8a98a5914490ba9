"""Saving a task vector: its tensors, or a reference to the checkpoints that they are in."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_taskvec._version import __version__
from hf_taskvec.algebra.deltas import Delta, Difference
from hf_taskvec.algebra.exact_difference import Format, exact_format, exact_rows
from hf_taskvec.algebra.rounding import check_finite, dtype_name, parse_dtype, round_once
from hf_taskvec.algebra.sources import RowsOf, Source, Transposed, samples, tensor_bytes
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.algebra.tiles import tile_rows
from hf_taskvec.atomic import write_text
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.filenames import VECTOR_RECORD
from hf_taskvec.files.output_folder import new_folder
from hf_taskvec.files.safetensors_writer import SafetensorsWriter, TensorSpec, shard
from hf_taskvec.files.vector_schema import FORMAT, checksum, vector_schema
from hf_taskvec.files.verified_tensor import VerifiedTensor
from hf_taskvec.models.tensor_files import StoredTensor
from hf_taskvec.progress import progress_bar
from hf_taskvec.sizes import parse_size


def save(
    vector: TaskVector,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    reference: bool = False,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    progress: bool | None = None,
) -> Path:
    """Write a vector's own files; the arguments are those of `TaskVector.save`."""
    if reference and dtype is not None:
        raise BadValueError("a reference stores no tensors, so it takes no dtype.")
    most = parse_size(max_shard_size)
    encoder = _Encoder(dtype, reference)
    with new_folder(output, VECTOR_RECORD, overwrite) as part:
        parameters = {name: each for name in vector if (each := encoder.terms(name, vector[name].terms))}
        document: dict[str, Any] = {
            "format": FORMAT,
            "library": __version__,
            "provenance": vector.provenance.with_digests(vector.sources).to_json(),
            "parameters": parameters,
        }
        if reference:
            document.update(_reference(encoder.tensors))
        else:
            document["tensors"] = _write_tensors(encoder.tensors, part, most, progress)
        if vector.discarded:
            document["discarded"] = dict(vector.discarded)
        document["checksum"] = checksum(document)
        vector_schema.check(document, f"what {Path(output).name} would hold")
        write_text(part / VECTOR_RECORD, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return Path(output)


def largest_saved_size(vector: TaskVector, dtype: torch.dtype | str | None = None, reference: bool = False) -> int:
    """How many bytes `save` writes at most; nothing is read.

    What is not known before is whether the difference of two models needs a low part beside the high one.
    """
    encoder = _BoundingEncoder(None if dtype is None else parse_dtype(dtype), reference)
    parameters = {name: encoder.terms(name, vector[name].terms) for name in vector}
    described = len(json.dumps([parameters, vector.provenance.to_json(), dict(vector.discarded)], indent=1).encode())
    listed = sum(tensor_record_size(name) for name in encoder.tensors)
    stored = 0 if reference else sum(TensorSpec(each.dtype, each.shape).nbytes for each in encoder.tensors.values())
    return RECORD_SIZE + described + listed + stored


#: bytes of a record beside its lists
RECORD_SIZE = 4096


def tensor_record_size(name: str) -> int:
    """The bytes that a tensor takes at most in a record and in the header of its file."""
    return 600 + 4 * len(name.encode())


def rounding_errors(vector: TaskVector, dtype: torch.dtype | str) -> dict[str, float]:
    """What is lost when a vector is saved in a dtype: the relative error of each parameter that it cannot hold exactly.

    Args:
        vector ([`TaskVector`]):
            Low-rank factors of it are stored as they are, so they are never among the losses.
        dtype (`torch.dtype` or `str`):
            As given to `TaskVector.save`.

    Returns:
        `dict[str, float]`: Parameter -> ‖rounded − exact‖ / ‖exact‖; without those that lose nothing.

    Example:
        >>> third = TaskVector.from_tensors({"w": torch.full((2, 2), 1 / 3), "bias": torch.ones(2)})
        >>> {name: f"{error:.1e}" for name, error in rounding_errors(third, "bfloat16").items()}
        {'w': '2.0e-03'}

    """
    encoder = _Encoder(parse_dtype(dtype))
    for name in vector:
        encoder.terms(name, vector[name].terms)
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


def _write_tensors(tensors: Mapping[str, "_Written"], folder: Path, most: int, progress: bool | None) -> dict[str, Any]:
    specs = {name: TensorSpec(each.dtype, each.shape) for name, each in tensors.items()}
    listed = {}
    total = sum(spec.nbytes for spec in specs.values())
    with progress_bar((), "Saving", progress, total, unit="B", unit_scale=True) as bar:
        for file, contents in shard(specs, most, "taskvec").items():
            if not contents:
                continue
            with SafetensorsWriter(folder / file, contents, {"format": "pt"}) as writer:
                for name, spec in contents.items():
                    digest, start = hashlib.sha256(), 0
                    for rows in tensors[name].rows():
                        digest.update(tensor_bytes(rows))
                        writer.write(name, rows, start)
                        bar.update(rows.nbytes)
                        start += rows.shape[0] if rows.ndim else 1
                    listed[name] = {
                        "file": file,
                        "dtype": dtype_name(spec.dtype),
                        "shape": list(spec.shape),
                        "sha256": digest.hexdigest(),
                    }
    return listed


def _reference(tensors: Mapping[str, "_Written"]) -> dict[str, Any]:
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
                f"{name.split(':')[0]} comes from a saved task vector, and a reference can point to models and "
                "adapters only. Save the vector without reference=True, or make the reference from a vector extracted "
                "anew."
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


@dataclass
class _Encoder:
    """Turns terms into JSON, and collects the tensors that must be written: the `DeltaWriter` of saved vectors."""

    dtype: torch.dtype | None = None
    reference: bool = False
    tensors: dict[str, "_Written"] = field(default_factory=dict)
    _known: dict[Any, str] = field(default_factory=dict)

    def terms(self, name: str, terms: tuple[Term, ...]) -> list[dict[str, Any]]:
        result = []
        for number, term in enumerate(terms):
            change = term.delta.to_record(f"{name}:{number}", name, self)
            if change is not None:
                result.append({"weight": term.weight, **change})
        return result

    @property
    def rounds(self) -> bool:
        return self.dtype is not None

    def exact(self, key: str, name: str, delta: Difference) -> list[str]:
        form = exact_format(delta.tuned.read(), delta.base.read(), name)
        content = _ExactParts(delta, form)
        keys = [f"{key}.part{part}" for part in range(form.parts)]
        for part, each in enumerate(keys):
            self.tensors[each] = _Written(form.dtype, delta.shape, content, part)
        return keys

    def rounded(self, key: str, name: str, delta: Delta) -> list[str]:
        self.tensors[key] = _Written(self.dtype or torch.float32, delta.shape, _Rounded(name, delta))
        return [key]

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


class _BoundingEncoder(_Encoder):
    """Takes every difference for one that needs two parts of the wider dtype, and so reads none."""

    def exact(self, key: str, name: str, delta: Difference) -> list[str]:
        dtype = torch.promote_types(delta.tuned.dtype, delta.base.dtype)
        content = _ExactParts(delta, Format(dtype, 2))
        keys = [f"{key}.part{part}" for part in range(2)]
        self.tensors |= {each: _Written(dtype, delta.shape, content, part) for part, each in enumerate(keys)}
        return keys


@dataclass(frozen=True)
class _Plain:
    """A stored tensor, copied."""

    source: Source

    def rows(self, dtype: torch.dtype, part: int) -> Iterator[torch.Tensor]:
        tensor = self.source.read()
        yield from tensor.split(tile_rows(self.source.shape)) if tensor.ndim else [tensor]


@dataclass(frozen=True)
class _ExactParts:
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
    content: _Plain | _ExactParts | _Rounded
    part: int = 0

    def rows(self) -> Iterator[torch.Tensor]:
        return self.content.rows(self.dtype, self.part)
