"""JSON files that hold one object, as configs, indices and records do; and the schemas of those that are ours."""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_taskvec.errors import CorruptFileError, MissingFileError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an error that names the file if it is missing or holds something else."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path.name} is missing in {path.parent.name}.") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path.name} is not valid JSON ({error}).") from None
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
