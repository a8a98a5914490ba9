"""JSON files that hold one object, as configs, indices and records do; and the schemas of those that are ours."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_taskvec.errors import CorruptFileError, MissingFileError

_DEEPEST = 100
# A character that is half of one: JSON can write it, UTF-8 cannot.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def json_digest(*parts: Any) -> str:
    """sha256 of some plain values, as JSON writes them."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def parse_json(text: str, what: str) -> Any:
    """What a JSON text holds, where it can mean one thing only.

    Args:
        text (`str`):
            The JSON.
        what (`str`):
            How a message calls it.

    Returns:
        `Any`: Dicts, lists, texts, numbers, booleans and `None`.

    Raises:
        `CorruptFileError`: If it is no JSON, a key stands twice in an object, a text holds half a character, or it is
                nested very deeply.

    Example:
        >>> parse_json('{"scale": 1, "scale": 2}', "report.json")
        Traceback (most recent call last):
        ...
        hf_taskvec.errors.CorruptFileError: report.json is not valid JSON ('scale' stands twice in an object).

    """
    try:
        data = json.loads(text, object_pairs_hook=_unique)
        if _is_deep(data):
            raise CorruptFileError(f"nested more than {_DEEPEST} deep")
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{what} is not valid JSON ({str(error)[:200]}).") from None
    return data


def _is_deep(data: Any) -> bool:
    """Whether something is nested so deeply that what follows it inwards would run out of stack."""
    level = [data]
    for _ in range(_DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [inner for each in inside for inner in each if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CorruptFileError(f"{key[:60]!r} stands twice in an object")
        found[key] = value
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an error that names the file if it is missing or holds something else."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise MissingFileError(f"{path.name} is missing in {path.parent.name}.") from None
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path.name} is not valid JSON ({error}).") from None
    data = parse_json(text, path.name)
    if not isinstance(data, dict):
        raise CorruptFileError(f"{path.name} must hold a JSON object.")
    return data


def line(most: int) -> dict[str, Any]:
    """The schema of a text on one line, of at most so many characters, each of which can be seen."""
    return {"type": "string", "minLength": 1, "maxLength": most, "format": "line"}


class Schema:
    r"""A JSON Schema that documents are checked against.

    Args:
        schema (`Mapping[str, Any]`):
            In JSON Schema's words. The format `"line"` is a text without characters that cannot be seen.

    Example:
        >>> Schema({"type": "object", "properties": {"name": line(9)}}).check({"name": "a\x1b"}, "x.json")
        Traceback (most recent call last):
        ...
        hf_taskvec.errors.CorruptFileError: x.json is damaged or not ours: name must be one line of visible characters.

    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = dict(schema)

    @cached_property
    def _validate(self) -> Callable[[Any], Any]:
        import fastjsonschema

        return fastjsonschema.compile(self._schema, formats={"line": str.isprintable}, use_default=False)

    def check(self, document: Any, what: str) -> None:
        """Refuse a document that does not fit, with the place in it; `what` is how the message calls it."""
        from fastjsonschema import JsonSchemaValueException

        try:
            self._validate(document)
        except JsonSchemaValueException as error:
            reason = str(error.message).removeprefix("data").removeprefix(".")[:300]
            reason = reason.replace("must be line", "must be one line of visible characters")
            raise CorruptFileError(f"{what} is damaged or not ours: {reason}.") from None
