"""A folder that this library wrote, and what it is: a merged model, an adapter or a task vector."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_taskvec import filenames
from hf_taskvec.algebra.provenance import ModelRecord, Provenance
from hf_taskvec.algebra.provenance_schema import MODEL, PROVENANCE
from hf_taskvec.errors import CorruptFileError, MissingFileError, UnsupportedError
from hf_taskvec.files.vector_schema import vector_schema
from hf_taskvec.hub_names import HUB_ID, is_folder
from hf_taskvec.json_files import Schema, line, read_json
from hf_taskvec.models.folder_contents import RECORDS, ContentKind, record_in


def _schema(**more: Any) -> Schema:
    """Of the records that `apply` and `to_adapter` write. A card shows what they hold, the options as code."""
    fields: dict[str, Any] = {
        "library": {"type": "string", "pattern": r"^(hf_taskvec )?\d[\w.+-]{0,60}$"},
        "vector": PROVENANCE,
        "scale": {"type": "number"},
        "fingerprint": {"type": ["string", "null"], "pattern": "^[0-9a-f]{1,128}$"},
        "changed_parameters": {"type": "integer", "minimum": 0, "maximum": 1_000_000_000},
        "options": {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z_]{1,40}$"},
            "additionalProperties": line(200),
        },
        **more,
    }
    return Schema({"type": "object", "required": list(fields), "properties": fields})


_SCHEMAS: dict[ContentKind, Schema] = {"vector": vector_schema, "adapter": _schema(), "model": _schema(base=MODEL)}


@dataclass(frozen=True)
class Artifact:
    """What a folder holds that this library wrote, as the folder's own record tells it.

    Args:
        folder (`Path`):
            The folder.
        kind (`"model"`, `"adapter"` or `"vector"`):
            What it holds.
        provenance (`Provenance`):
            The vector's expression, and what it is made of.
        base (`ModelRecord`, *optional*):
            The model that the weights belong to: what was edited, or what an adapter or a vector is made for.
        scale (`float`):
            λ; 1 for a vector.
        fingerprint (`str`, *optional*):
            Of the vector before `scale`, as a sweep's report names its edit.
        changed (`int`):
            How many parameters are changed.
        library (`str`):
            The version of this library that wrote the folder.
        options (`Mapping[str, str]`, *optional*):
            The other arguments that made the output what it is.
        local_references (`tuple[str, ...]`, *optional*):
            The folders of this machine that a vector saved as a reference reads, by their names.
    """

    folder: Path
    kind: ContentKind
    provenance: Provenance
    base: ModelRecord | None
    scale: float
    fingerprint: str | None
    changed: int
    library: str
    options: Mapping[str, str] = field(default_factory=dict)
    local_references: tuple[str, ...] = ()

    @property
    def records(self) -> Iterator[ModelRecord]:
        """Every model that went into it, each once, the base first."""
        sides = [model for origin in self.provenance.origins for model in (origin.base, origin.tuned) if model]
        yield from dict.fromkeys([*([self.base] if self.base else []), *sides])


def open_artifact(folder: str | Path) -> Artifact:
    """What a folder holds that `apply`, `to_adapter` or `save` wrote.

    Args:
        folder (`str` or `Path`):
            The folder.

    Returns:
        `Artifact`: The model, adapter or vector, as its record tells it. No weights are read.

    Raises:
        `MissingFileError`: If there is no folder, or no record in it that this library wrote.
        `CorruptFileError`: If the record is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise MissingFileError(f"there is no folder {folder.name!r} at the given path.")
    name = record_in(folder)
    if name is None:
        raise MissingFileError(
            f"{folder.name} has none of {', '.join(RECORDS)}, so it is no model, adapter or task vector that this "
            "library wrote. Write one with apply(), to_adapter() or save()."
        )
    record = read_json(folder / name)
    try:
        _SCHEMAS[RECORDS[name]].check(record, name)
        return _read(folder, RECORDS[name], record)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise CorruptFileError(f"{name} in {folder.name} is damaged ({error}). Write the folder again.") from None


def _read(folder: Path, kind: ContentKind, record: dict[str, Any]) -> Artifact:
    library = str(record["library"]).removeprefix("hf_taskvec ")
    provenance = Provenance.from_json(record["provenance" if kind == "vector" else "vector"])
    if kind == "vector":
        changed, checkpoints = len(record["parameters"]), record.get("checkpoints", ())
        local = tuple(Path(each["where"]).name for each in checkpoints if each["revision"] is None)
        own = _own_base(provenance)
        return Artifact(folder, kind, provenance, own, 1.0, None, changed, library, local_references=local)
    base = ModelRecord.from_json(record["base"]) if kind == "model" else _own_base(provenance)
    if kind == "adapter":
        named = read_json(folder / filenames.ADAPTER_CONFIG).get("base_model_name_or_path")
        if named:
            is_id = HUB_ID.fullmatch(named) and not is_folder(named)
            name = named if is_id else Path(named).name
            base = base if base is not None and base.name == name else ModelRecord(name)
    changed = int(record["changed_parameters"])
    scale, fingerprint, options = float(record["scale"]), record["fingerprint"], dict(record["options"])
    if not math.isfinite(scale):
        raise CorruptFileError(f"the scale is {scale}, which is no number")
    return Artifact(folder, kind, provenance, base, scale, fingerprint, changed, library, options)


def _own_base(provenance: Provenance) -> ModelRecord | None:
    """The one base that a vector comes from; none, if there are several."""
    bases = {origin.base for origin in provenance.origins if origin.base}
    return bases.pop() if len(bases) == 1 else None
