"""YAML that people write: settings, and the metadata on top of cards. A few bytes of it cannot cost much."""

from collections.abc import Hashable
from typing import Any

import yaml

from hf_taskvec.errors import CorruptFileError

_DEEPEST = 50
_LONGEST = 100_000
_OPENING = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_CLOSING = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Makes plain values only, and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key stands twice", node.start_mark)
        return found


def parse_yaml(text: str, what: str) -> Any:
    """What a YAML text holds.

    Aliases are refused, with which a few hundred bytes stand for a list of millions, or for one that holds itself.

    Args:
        text (`str`):
            The YAML.
        what (`str`):
            How a message calls it.

    Returns:
        `Any`: Dicts, lists, texts, numbers, dates, booleans and `None`.

    Raises:
        `CorruptFileError`: If it is no YAML, or none that people write: with aliases, very long or deeply nested.

    Example:
        >>> parse_yaml("scales: [0, -0.5]", "ours.yaml")
        {'scales': [0, -0.5]}

    """
    if len(text) > _LONGEST:
        raise CorruptFileError(f"{what} is longer than {_LONGEST} characters.")
    depth = 0
    try:
        for event in yaml.parse(text, _Loader):
            depth += isinstance(event, _OPENING) - isinstance(event, _CLOSING)
            if depth > _DEEPEST:
                raise CorruptFileError(f"{what} is nested more than {_DEEPEST} deep.")
            if isinstance(event, yaml.AliasEvent):
                raise CorruptFileError(f"{what} has the alias *{event.anchor}. Write the value itself there.")
        return yaml.load(text, _Loader)
    except CorruptFileError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:  # dates and numbers that are none
        raise CorruptFileError(f"{what} is not valid YAML: {error}") from None
