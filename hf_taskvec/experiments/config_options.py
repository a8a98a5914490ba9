"""Dataclass configs from the command line: a YAML file's values under the flags, and real help for each field."""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hf_taskvec.errors import BadValueError, MissingFileError, MissingNameError, did_you_mean
from hf_taskvec.yaml_files import parse_yaml

Config = TypeVar("Config")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def option(default: Any, help: str) -> Any:
    """A field of a config with its `--help` text."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def parse_config(
    kind: type[Config],
    arguments: Sequence[str] | None,
    *,
    description: str,
    configs: Path,
    default: str | None = None,
    unless: Sequence[str] = (),
) -> Config:
    """A config from flags, over a YAML file, over the dataclass's defaults.

    Args:
        kind (`type`):
            A dataclass whose fields were made by `option`, one of them `config`.
        arguments (`Sequence` of `str`, *optional*):
            The command line; the process's own by default.
        description (`str`):
            For `--help`.
        configs (`Path`):
            The folder of ready YAML files, which may be named without `.yaml`.
        default (`str`, *optional*):
            The ready file that is used when none is named ...
        unless (`Sequence` of `str`, *optional*):
            ... and none of these fields is given as a flag.

    Returns:
        `kind`: The config.

    Raises:
        `MissingFileError`: If there is no such YAML file.
        `MissingNameError`: If the file has a setting that the config has not.
        `BadValueError`: If a value is not of its field's type, or makes no sense.
    """
    import argparse

    from transformers import HfArgumentParser

    with_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = HfArgumentParser(kind, description=description, formatter_class=with_defaults)  # type: ignore[arg-type]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter if "\n" in description else parser.formatter_class
    given = vars(parser.parse_args(arguments))
    plain = {name: value for name, value in given.items() if value != parser.get_default(name)}
    named = given["config"] or (default if not plain.keys() & set(unless) else None)
    if named:
        parser.set_defaults(**read_config(kind, named, configs), config=Path(named).stem)
    return parser.parse_args_into_dataclasses(arguments)[0]


def read_config(kind: type[Any], name: str, configs: Path) -> dict[str, Any]:
    """The values of a YAML file, its keys and types checked against the config's fields."""
    ready = {path.stem: path for path in sorted(configs.glob("*.yaml"))}
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else ready.get(name)
    if path is None or not path.is_file():
        raise MissingFileError(
            f"there is no config {name!r}.{did_you_mean(name, ready)} The ready ones are {', '.join(ready)}; "
            "a file of your own is named with its .yaml."
        )
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadValueError(f"{path.name} is not valid YAML: {error}") from None
    values = parse_yaml(text, path.name) or {}
    if not isinstance(values, dict):
        raise BadValueError(f"{path.name} must hold `key: value` lines.")
    hints = get_type_hints(kind)
    found = {}
    for raw, value in values.items():
        key = str(raw).replace("-", "_")
        if key not in hints:
            raise MissingNameError(f"{path.name}: there is no setting {key!r}.{did_you_mean(key, hints)}")
        try:
            found[key] = _typed(value, hints[key])
        except BadValueError as error:
            raise BadValueError(f"{path.name}: {key}={value!r} must be {error}.") from None
    return found


def _typed(value: Any, kind: Any) -> Any:
    """A value of YAML as the field's own type; an error says what it must be.

    >>> _typed([0, "1e-1"], list[float])
    [0.0, 0.1]
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:  # of a type and None
        return None if value is None else _typed(value, inner[0])
    if origin is Literal:
        if value not in inner:
            raise BadValueError(f"one of {', '.join(inner)}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise BadValueError("a list, as in [a, b]; of one, [a]")
        return [_typed(each, inner[0]) for each in value]
    if kind in (int, float) and isinstance(value, str):  # YAML takes 1e-4 for a text; it means a number all the same
        with suppress(ValueError):
            value = kind(value)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise BadValueError(_WORDS[kind])
    return kind(value)
