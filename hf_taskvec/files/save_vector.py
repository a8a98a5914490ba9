"""Saving a task vector: its tensors, or a reference to the checkpoints that they are in."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_taskvec._version import __version__
from hf_taskvec.algebra.deltas import Delta, Difference
from hf_taskvec.algebra.digests import TensorDigest, tensor_digest
from hf_taskvec.algebra.exact_difference import Format, exact_format, exact_pieces
from hf_taskvec.algebra.rounding import dtype_name, parse_dtype, round_once
from hf_taskvec.algebra.sources import RowsOf, Source, Transposed, rows_of, samples
from hf_taskvec.algebra.sparse_tensors import COUNTS, Sparse
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.algebra.tiles import tiles_of_shape
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
from hf_taskvec.threads import workers


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
        encoder.find_formats(vector)
        parameters = {name: each for name in vector if (each := encoder.terms(name, vector[name].terms))}
        document: dict[str, Any] = {
            "format": FORMAT,
            "library": __version__,
            "provenance": vector.provenance.with_digests(vector.sources).to_json(),
            "parameters": parameters,
        }
        if reference:
            document.update(_reference(encoder.written))
        else:
            document["tensors"] = _write_tensors(encoder.written, part, most, progress)
        if vector.discarded:
            document["discarded"] = dict(vector.discarded)
        document["checksum"] = checksum(document)
        vector_schema.check(document, f"what {Path(output).name} would hold")
        write_text(part / VECTOR_RECORD, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return Path(output)


def largest_saved_size(vector: TaskVector, dtype: torch.dtype | str | None = None, reference: bool = False) -> int:
    """How many bytes `save` writes at most; nothing is read.

    What is not known before is whether the difference of two models needs a low part beside the high one, and how much
    of each is zero.
    """
    encoder = _BoundingEncoder(None if dtype is None else parse_dtype(dtype), reference)
    parameters = {name: encoder.terms(name, vector[name].terms) for name in vector}
    described = len(json.dumps([parameters, vector.provenance.to_json(), dict(vector.discarded)], indent=1).encode())
    specs = [each for written in encoder.written for each in written.tensors.items()]
    listed = sum(tensor_record_size(name) for name, _ in specs)
    stored = 0 if reference else sum(spec.nbytes for _, spec in specs)
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
    for each in encoder.written:
        if not isinstance(each.content, _Rounded):
            continue
        exact = Sum(each.content.delta.shape, [Term(1.0, each.content.delta)])
        name = each.content.name
        error, size = lost.get(name, (0.0, 0.0))
        for start, stop in exact.tiles():
            rows = exact.rows(start, stop)
            size += rows.square().sum().item()
            error += (round_once(rows, each.content.dtype).double() - rows).square_().sum().item()
        lost[name] = (error, size)
    return {name: (error / size) ** 0.5 for name, (error, size) in lost.items() if error}


def _write_tensors(
    written: Sequence["_Written"], folder: Path, most: int, progress: bool | None
) -> dict[str, dict[str, Any]]:
    """Write what there is, each `_Written` by one thread; what the record lists of every tensor."""
    specs = {name: spec for each in written for name, spec in each.tensors.items()}
    files = {file: contents for file, contents in shard(specs, most, "taskvec").items() if contents}
    total = sum(spec.nbytes for spec in specs.values())
    digests: dict[str, str] = {}
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar((), "Saving", progress, total, unit="B", unit_scale=True))
        writers: dict[str, SafetensorsWriter] = {}
        for file, contents in files.items():
            writer = stack.enter_context(SafetensorsWriter(folder / file, contents, {"format": "pt"}))
            writers |= dict.fromkeys(contents, writer)
        run = stack.enter_context(workers())
        for each, found in zip(by_size := _largest_first(written), run(_writing(writers), by_size), strict=True):
            digests |= found
            bar.update(each.nbytes)
    return {
        name: {"file": file, "dtype": dtype_name(spec.dtype), "shape": list(spec.shape), "sha256": digests[name]}
        for file, contents in files.items()
        for name, spec in contents.items()
    }


def _largest_first(written: Iterable["_Written"]) -> list["_Written"]:
    """In the order in which threads are done soonest."""
    return sorted(written, key=lambda each: each.nbytes, reverse=True)


def _writing(writers: Mapping[str, SafetensorsWriter]) -> Callable[["_Written"], dict[str, str]]:
    """A function that writes some tensors and gives the digest of each."""

    def write(written: "_Written") -> dict[str, str]:
        names = list(written.tensors)
        digests, done = [TensorDigest() for _ in names], [0] * len(names)
        for number, elements in written.content.pieces():
            digests[number].update(elements)
            writers[names[number]].write_elements(names[number], elements, done[number])
            done[number] += elements.numel()
        return {name: digest.text() for name, digest in zip(names, digests, strict=True)}

    return write


def _reference(written: Iterable["_Written"]) -> dict[str, Any]:
    """What a reference records instead of tensors: where each one is, and what it must be."""
    checkpoints: dict[Any, int] = {}
    listed = {}
    for each in written:
        assert isinstance(each.content, _Plain)
        (name,), source = each.tensors, each.content.source
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
            "dtype": dtype_name(source.dtype),
            "shape": list(source.shape),
            "sha256": tensor_digest(tensor),
            "samples": hashlib.sha256(samples(tensor)).hexdigest(),
        }
    homes = [{"where": home.where, "revision": home.revision} for home in checkpoints]
    return {"tensors": listed, "checkpoints": homes}


@dataclass
class _Encoder:
    """Turns terms into JSON, and collects the tensors that must be written: the `DeltaWriter` of saved vectors."""

    dtype: torch.dtype | None = None
    reference: bool = False
    written: list["_Written"] = field(default_factory=list)
    _known: dict[Any, str] = field(default_factory=dict)
    _formats: dict[Difference, Format] = field(default_factory=dict)

    def find_formats(self, vector: TaskVector) -> None:
        """Look at every difference, on several threads, before any is described."""
        bounds = _BoundingEncoder(self.dtype, self.reference)
        for name in vector:
            bounds.terms(name, vector[name].terms)
        every = (each.content for each in _largest_first(bounds.written))
        contents = list({each.delta: each for each in every if isinstance(each, _ExactParts)}.values())
        with workers() as run:
            for content, form in zip(contents, run(_exact_format, contents), strict=True):
                self._formats[content.delta] = form

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

    def exact(self, key: str, name: str, delta: Difference) -> list[Any]:
        form, records = self._formats[delta], list[Any]()
        tensors: dict[str, TensorSpec] = {}
        for part in range(form.parts):
            stored = [TensorSpec(dtype, shape) for dtype, shape in form.tensors(part)]
            names = _tensor_names(f"{key}.part{part}", len(stored))
            tensors |= dict(zip(names, stored, strict=True))
            records.append(names[0] if len(names) == 1 else self._sparse(names, form.shape))
        if tensors:
            self.written.append(_Written(tensors, _ExactParts(name, delta, form)))
        return records

    def _sparse(self, names: Sequence[str], shape: tuple[int, ...]) -> dict[str, Any]:
        return {"sparse": list(shape), **dict(zip(_SPARSE, names, strict=True))}

    def rounded(self, key: str, name: str, delta: Delta) -> list[str]:
        dtype = self.dtype or torch.float32
        self.written.append(_Written({key: TensorSpec(dtype, delta.shape)}, _Rounded(name, delta, dtype)))
        return [key]

    def source(self, key: str, source: Source) -> Any:
        if isinstance(source, Transposed):
            return {"transposed": self.source(key, source.source)}
        if isinstance(source, Sparse):
            stored = (source.counts, source.offsets, source.values)
            names = zip(_tensor_names(key, len(stored)), stored, strict=True)
            return self._sparse([self.source(name, each) for name, each in names], source.shape)
        if isinstance(source, RowsOf) and self.reference:
            index = source.index
            rows = [index.start, index.stop] if isinstance(index, range) else list(index)
            return {"rows": rows, "range": isinstance(index, range), "of": self.source(key, source.source)}
        if source not in self._known:
            if self.reference:
                key = f"{key}.{len(self.written)}"
            self._known[source] = key
            self.written.append(_Written({key: TensorSpec(source.dtype, source.shape)}, _Plain(source)))
        return self._known[source]


#: the tensors of a sparse one
_SPARSE = ("counts", "offsets", "values")


def _tensor_names(key: str, count: int) -> list[str]:
    return [key] if count == 1 else [f"{key}.{each}" for each in _SPARSE]


class _BoundingEncoder(_Encoder):
    """Takes every difference for one that needs two parts of the wider dtype, and so reads none."""

    def exact(self, key: str, name: str, delta: Difference) -> list[Any]:
        dtype = torch.promote_types(delta.tuned.dtype, delta.base.dtype)
        # A sparse part is smaller, but there are three tensors to describe.
        nothing = TensorSpec(COUNTS, (0,))
        names = [_tensor_names(f"{key}.part{part}", len(_SPARSE)) for part in range(2)]
        tensors = {each: nothing for part in names for each in part}
        tensors |= {part[-1]: TensorSpec(dtype, delta.shape) for part in names}
        self.written.append(_Written(tensors, _ExactParts(name, delta, Format(dtype, 2))))
        return [self._sparse(part, delta.shape) for part in names]


@dataclass(frozen=True)
class _Plain:
    """A stored tensor, copied."""

    source: Source

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        opened = self.source.readable()
        for start, stop in tiles_of_shape(self.source.shape):
            yield 0, rows_of(opened, start, stop)


@dataclass(frozen=True)
class _ExactParts:
    """The exact parts of a difference."""

    name: str
    delta: Difference
    form: Format

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        first, following = list[int](), 0
        for part in range(self.form.parts):
            if self.form.is_sparse(part):
                yield following, torch.tensor(self.form.counts[part], dtype=COUNTS, device="cpu")
                following += 1
            first.append(following)
            following = first[-1] + (2 if self.form.is_sparse(part) else 1)
        for piece in exact_pieces(self.delta.tuned.readable(), self.delta.base.readable(), self.form):
            for number, elements in zip(first, piece, strict=True):
                yield from enumerate(elements, number)


def _exact_format(content: _ExactParts) -> Format:
    return exact_format(content.delta.tuned.readable(), content.delta.base.readable(), content.name)


@dataclass(frozen=True)
class _Rounded:
    """A dense change rounded to a dtype that may lose something."""

    name: str
    delta: Delta
    dtype: torch.dtype

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        whole = Sum(self.delta.shape, [Term(1.0, self.delta)])
        for start, stop in whole.tiles():
            yield 0, whole.rounded(start, stop, self.dtype, self.name)


@dataclass(frozen=True)
class _Written:
    """Tensors that are written together.

    `content.pieces` gives the elements of each in turn, with the tensor's number; to be used at once.
    """

    tensors: Mapping[str, TensorSpec]
    content: _Plain | _ExactParts | _Rounded

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())
