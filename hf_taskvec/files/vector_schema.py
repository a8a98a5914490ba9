"""The format of a saved task vector: `taskvec.json`, which a person can read, and safetensors beside it.

The JSON lists every parameter's terms and every tensor with its dtype, shape and sha256, and carries a checksum of
itself, so no damage to either file passes unnoticed. Tensors are mapped, and checked when they are first used.

`taskvec.json`, format 4:
    format, library     versions
    provenance          the expression, its weights, the origins of its labels
    parameters          name -> terms: a weight, and a change of some kind over tensors, each a key of `tensors` or a
                        view: {"transposed": tensor}; {"rows", "range", "of": tensor}; {"sparse": shape, "counts",
                        "offsets", "values"}, three keys of `tensors` (`algebra/sparse_tensors.py`)
    tensors             tensor -> file (for a reference: checkpoint and name), dtype, shape, sha256: its digest (see
                        `algebra/digests.py`; the name is that of format 1)
    checkpoints         for a reference: the folders or Hub ids that the tensors are read from
    discarded           after compression: the share of the squared norm lost, for each parameter
    checksum            sha256 of all of the above

In formats 1 and 2 the digest of a tensor is the SHA-256 of all its bytes at once, in format 3 that of the SHA-256 of
blocks. Format 1 has no sparse tensors.

A checksum tells damage, not intent: whoever writes a file can write its checksum. So what is read is also checked
against `VECTOR`, the same in JSON Schema's words, and so is what is written. What the terms of each kind of change hold
is checked where they are read (`from_record` in `algebra/deltas.py`).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hf_taskvec.algebra.provenance_schema import DIGEST, PROVENANCE
from hf_taskvec.json_files import Schema, line

FORMAT = 4
FORMATS = (1, 2, 3, FORMAT)

_SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_TERM = {
    "type": "object",
    "required": ["weight", "kind"],
    "properties": {"weight": {"type": "number"}, "kind": line(40)},
}
_TENSOR = {
    "type": "object",
    "required": ["dtype", "shape", "sha256"],
    "properties": {
        "file": {"type": "string", "maxLength": 255},
        "checkpoint": {"type": "integer", "minimum": 0},
        "name": line(1000),
        "dtype": line(40),
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 64},
        "sha256": DIGEST,
        "samples": _SHA256,
    },
}
_CHECKPOINT = {
    "type": "object",
    "required": ["where", "revision"],
    "properties": {"where": {"type": "string", "maxLength": 5000}, "revision": {"type": ["string", "null"]}},
}
VECTOR: dict[str, Any] = {
    "type": "object",
    "required": ["format", "library", "provenance", "parameters", "tensors"],
    "properties": {
        "format": {"enum": list(FORMATS)},
        "library": {"type": "string", "pattern": r"^(hf_taskvec )?\d[\w.+-]{0,60}$"},
        "provenance": PROVENANCE,
        "parameters": {
            "type": "object",
            "propertyNames": line(1000),
            "additionalProperties": {"type": "array", "items": _TERM},
        },
        "tensors": {"type": "object", "propertyNames": line(1100), "additionalProperties": _TENSOR},
        "checkpoints": {"type": "array", "items": _CHECKPOINT},
        "discarded": {
            "type": "object",
            "propertyNames": line(1000),
            "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "checksum": _SHA256,
    },
}

vector_schema = Schema(VECTOR)


def checksum(document: Mapping[str, Any]) -> str:
    """The sha256 of all that a `taskvec.json` holds besides its checksum."""
    rest = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
