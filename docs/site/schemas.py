"""A dataclass of plain values, as `typed_values.typed` reads them from a file, as a JSON schema."""

import inspect
import re
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema(kind: type, optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The schema of a dataclass, with what docstrings say of the fields; every other one in it is under `$defs`.

    Args:
        kind (`type`):
            The dataclass.
        optional (`frozenset[str]`, *optional*):
            Fields that a file may lack.
    """
    known: dict[str, Any] = {}
    _object(kind, known)
    found = known.pop(kind.__name__)
    found["required"] = [name for name in found["required"] if name not in optional]
    return {"$schema": "http://json-schema.org/draft-07/schema#", **found, "$defs": known}


def _schema(kind: Any, known: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        parts = [_schema(each, known) for each in inner if each is not types.NoneType]
        return {"anyOf": [*parts, {"type": "null"}]} if types.NoneType in inner else parts[0]
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        return {"type": "array", "items": _schema(inner[0], known)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], known)}
    if is_dataclass(kind):
        assert isinstance(kind, type)
        if kind.__name__ not in known:
            _object(kind, known)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return {"type": _WORDS[kind]}


def _object(kind: type, known: dict[str, Any]) -> None:
    known[kind.__name__] = {}  # first: a dataclass may hold others of itself
    hints, said = get_type_hints(kind), _descriptions(kind)
    properties = {}
    for each in fields(kind):
        properties[each.name] = _schema(hints[each.name], known) | said.get(each.name, {})
    known[kind.__name__] |= {"type": "object", "properties": properties, "required": list(properties)}


def _descriptions(kind: type) -> dict[str, dict[str, str]]:
    """What the `Args:` of a docstring say, by field; one that has a `$ref` beside it is read by people alone."""
    found, names = {}, []
    for line in (inspect.getdoc(kind) or "").partition("Args:")[2].splitlines():
        if match := re.match(r" {4}([\w, ]+) \(.*\):$", line):
            names = match[1].split(", ")
        elif line.startswith(" " * 8):
            for name in names:
                found[name] = f"{found.get(name, '')} {line.strip()}".strip()
        elif line and not line.startswith(" "):
            break
    return {name: {"description": text} for name, text in found.items()}
