"""What a record of provenance holds, in `taskvec.json` and in the records of models and adapters.

The file may be anybody's, and most of these texts are shown on a terminal and on a card: each has its form, none has a
character that cannot be seen, none is longer than anything we write.
"""

from typing import Any

from hf_taskvec.json_files import Schema, line

_HEX = {"type": "string", "pattern": "^[0-9a-f]{1,128}$"}
#: of a tensor or of all weights; see `digests.py`
DIGEST = {"type": "string", "pattern": "^(blake3:|blocks:)?[0-9a-f]{64}$"}

#: a model's licence, as its card states it
LICENSE: dict[str, Any] = {
    "type": "object",
    "required": ["ids"],
    "properties": {"ids": {"type": "array", "items": line(300)}, "name": line(300), "link": line(2000)},
    "additionalProperties": False,
}
#: a model that went into a vector
MODEL: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": line(2000),
        "revision": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._/-]{0,254}$"},
        "architecture": {"type": "string", "pattern": r"^[^\W\d]\w{0,199}$"},
        "fingerprint": _HEX,
        "sha256": DIGEST,
        "files": {"type": "object", "propertyNames": line(1000), "additionalProperties": _HEX},
        "added": {
            "type": "object",
            "propertyNames": {
                "type": "string",
                "maxLength": 6000,
                "pattern": r'^"([ !#-\[\]-~]|\\["\\/bfnrt]|\\u[0-9a-f]{4})+"$',
            },
            "additionalProperties": {"type": "string", "pattern": "^[a-z_ ]{0,60}$"},
        },
        "tied": {"type": "object", "propertyNames": line(1000), "additionalProperties": line(1000)},
        "license": LICENSE,
        "datasets": {"type": "array", "items": {"type": "string", "pattern": r"^[\w.-]{1,200}(/[\w.-]{1,200})?$"}},
        "tokenizer": {"type": "string", "pattern": "^([a-z]{1,40}:)?[0-9a-f]{1,128}$"},
    },
    "additionalProperties": False,
}
#: what a label stands for
ORIGIN: dict[str, Any] = {
    "type": "object",
    "required": ["label", "how"],
    "properties": {"label": line(2000), "how": line(100_000), "base": MODEL, "tuned": MODEL},
}
#: the expression; its terms are read, and checked once more by `expressions.py`
PROVENANCE: dict[str, Any] = {
    "type": "object",
    "required": ["weights", "origins"],
    "properties": {
        "weights": {
            "type": "array",
            "items": {"type": "array", "items": [line(100_000), {"type": "number"}], "minItems": 2, "maxItems": 2},
        },
        "origins": {"type": "array", "items": ORIGIN},
        "rules": {
            "type": "object",
            "propertyNames": line(200),
            "additionalProperties": {"type": "string", "pattern": r"^https?://[\w.-]+(/[\w.,;:/?=&%#~+-]*)?$"},
        },
    },
}

model_schema = Schema(MODEL)
provenance_schema = Schema(PROVENANCE)
