"""Loading a task vector from its own files, or from the checkpoints that it refers to.

Tensors are mapped, and checked when they are first used.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hf_taskvec.algebra.stacked_low_rank  # noqa: F401 (a kind of change that a file may hold)
from hf_taskvec.algebra.deltas import read_delta
from hf_taskvec.algebra.provenance import Provenance
from hf_taskvec.algebra.rounding import dtype_name, parse_dtype
from hf_taskvec.algebra.sources import RowsOf, Source, Transposed, samples
from hf_taskvec.algebra.sparse_tensors import Sparse
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, ChangedSourceError, CorruptFileError, MissingFileError
from hf_taskvec.filenames import ADAPTER_WEIGHTS, VECTOR_RECORD
from hf_taskvec.files.vector_schema import FORMAT, FORMATS, checksum, vector_schema
from hf_taskvec.files.verified_tensor import VerifiedTensor, changed_tensor
from hf_taskvec.json_files import read_json
from hf_taskvec.models.folder_contents import model_weights
from hf_taskvec.models.locations import Location, locate
from hf_taskvec.models.tensor_files import StoredTensor, TensorFile, open_files
from hf_taskvec.typed_values import typed

# A tensor that is stored as it is may be read transposed, or some of its rows, or both.
_MOST_VIEWS = 2


def load(
    folder: str | Path, *, revision: str | None = None, token: str | bool | None = None, verify: bool = True
) -> TaskVector:
    """A saved task vector; its arguments are those of `TaskVector.load`."""
    if not isinstance(folder, str | Path):
        raise BadValueError(f"a task vector is loaded from a folder or a Hub id, not from {folder!r}.")
    path, name, _ = locate(folder, revision, token, ["taskvec*"])
    if not (path / VECTOR_RECORD).exists():
        raise MissingFileError(f"{name} has no {VECTOR_RECORD}: it is not a saved task vector.")
    document = read_json(path / VECTOR_RECORD)
    found = document.get("format")
    if found is True or found not in FORMATS:  # True == 1
        raise CorruptFileError(
            f"{name} has task vector format {found!r}; this hf_taskvec reads formats up to {FORMAT}. Upgrade "
            "hf_taskvec."
        )
    try:
        if verify and document.get("checksum") != checksum(document):
            raise CorruptFileError(
                f"{VECTOR_RECORD} of {name} does not match its checksum: it was damaged or edited. Download or save "
                "the vector again, or pass verify=False if you edited it on purpose."
            )
        vector_schema.check(document, f"{VECTOR_RECORD} of {name}")
        return _decode(document, path, token, verify)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, CorruptFileError | ChangedSourceError | MissingFileError | BadValueError):
            raise
        raise CorruptFileError(f"{VECTOR_RECORD} of {name} is not a valid task vector ({error}).") from None


def _decode(document: dict[str, Any], folder: Path, token: str | bool | None, verify: bool) -> TaskVector:
    is_reference = "checkpoints" in document
    sources: dict[str, Source] = {}
    open_tensors = _open_reference(document, token) if is_reference else _open_own(document, folder)
    for key, entry in document["tensors"].items():
        stored = open_tensors[key]
        file = stored.file.path.name
        if stored.shape != tuple(entry["shape"]) or dtype_name(stored.dtype) != entry["dtype"]:
            raise changed_tensor(stored.name, file, is_reference)
        if is_reference and verify and hashlib.sha256(samples(stored.read())).hexdigest() != entry["samples"]:
            raise changed_tensor(stored.name, file, is_reference)
        sources[key] = VerifiedTensor(stored, str(entry["sha256"]), is_reference) if verify else stored
    terms = {
        name: [Term(float(term["weight"]), read_delta(term, partial(_source, sources=sources))) for term in each]
        for name, each in document["parameters"].items()
    }
    discarded = typed(dict[str, float], document.get("discarded", {}), "discarded")
    return TaskVector(terms, Provenance.from_json(document["provenance"]), discarded)


def _open_own(document: dict[str, Any], folder: Path) -> dict[str, StoredTensor]:
    files: dict[str, TensorFile] = {}
    present = {path.name for path in folder.iterdir()}
    opened = {}
    for key, entry in document["tensors"].items():
        file = entry["file"]
        if not isinstance(file, str) or Path(file).name != file:
            raise CorruptFileError(
                f"{VECTOR_RECORD} names a file outside its folder: {file!r}. Do not trust this vector."
            )
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
        checkpoints.append(open_files(folder, (*model_weights(folder), *ADAPTER_WEIGHTS), again))
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


def _source(entry: Any, sources: Mapping[str, Source], depth: int = 0) -> Source:
    if isinstance(entry, str):
        parse_dtype(sources[entry].dtype)  # positions are no weights
        return sources[entry]
    if "sparse" in entry:
        counts, offsets, values = (sources[entry[each]] for each in ("counts", "offsets", "values"))
        return Sparse(typed(tuple[int, ...], entry["sparse"], "sparse"), counts, offsets, values, entry["offsets"])
    if depth == _MOST_VIEWS:
        raise CorruptFileError(f"{VECTOR_RECORD} has a view of a view of a view of a tensor. Do not trust this vector.")
    if "transposed" in entry:
        return Transposed(_source(entry["transposed"], sources, depth + 1))
    rows = entry["rows"]
    index = range(*rows) if entry["range"] else tuple(rows)
    return RowsOf(_source(entry["of"], sources, depth + 1), index)
