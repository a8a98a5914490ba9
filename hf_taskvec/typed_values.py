"""Plain values, as JSON and YAML give them, as the types that a dataclass declares: nothing is guessed or converted.

A text is no number and `true` is not 1. A whole number may stand for a float, which must be finite. What a file holds
besides is left out, so that later versions may add to it.
"""

import math
import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hf_taskvec.errors import CorruptFileError

_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}


def typed(kind: Any, value: Any, where: str = "") -> Any:
    """A plain value as the declared type.

    Args:
        kind (`type`):
            A dataclass; `int`, `float`, `bool` or `str`; a `Literal`; `tuple[X, ...]`, `dict[str, X]` or `X | None`.
        value (`Any`):
            Dicts, lists (or tuples), texts, numbers, booleans and `None`.
        where (`str`, *optional*):
            The place of the value, for the message.

    Returns:
        `kind`: The value. Each field of a dataclass must be there, also one that has a default.

    Raises:
        `CorruptFileError`: If the value is of another type; the message says where, and what should be there.

    Example:
        >>> typed(tuple[float, ...], [0, 0.5])
        (0.0, 0.5)
        >>> typed(dict[str, int], {"a": True}, "sizes")
        Traceback (most recent call last):
        ...
        hf_taskvec.errors.CorruptFileError: sizes/a must be a whole number, not True.

    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        if value is None and types.NoneType in inner:
            return None
        return typed(next(each for each in inner if each is not types.NoneType), value, where)
    if origin is Literal:
        if not isinstance(value, str) or value not in inner:
            raise _other(where, f"one of {', '.join(inner)}", value)
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _other(where, "a list", value)
        return tuple(typed(inner[0], each, _below(where, number)) for number, each in enumerate(value))
    if origin is dict:
        return {key: typed(inner[1], each, _below(where, key)) for key, each in _object(value, where).items()}
    if is_dataclass(kind):
        return _dataclass(kind, _object(value, where), where)
    return _plain(kind, value, where)


def _dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    found = {}
    for name, hint in _declared(kind).items():
        if name not in value:
            raise CorruptFileError(f"{_below(where, name)} is missing.")
        found[name] = typed(hint, value[name], _below(where, name))
    return kind(**found)


@cache
def _declared(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise _other(where, _WORDS[kind], value) from None
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _other(where, _WORDS[kind], value)
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _other(where, "an object", value)
    return value


def _below(where: str, key: object) -> str:
    return f"{where}/{key}" if where else str(key)


def _other(where: str, what: str, value: object) -> CorruptFileError:
    shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return CorruptFileError(f"{where or 'it'} must be {what}, not {shown if len(shown) <= 60 else f'{shown[:57]}…'}.")
