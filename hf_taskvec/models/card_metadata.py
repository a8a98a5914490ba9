"""What a model's own card says about it: the licence and the data sets that whatever is made from it inherits."""

import re
from pathlib import Path
from typing import Any

from hf_taskvec.algebra.provenance import License
from hf_taskvec.errors import CorruptFileError
from hf_taskvec.yaml_files import parse_yaml

_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


def front_matter(text: str) -> dict[str, Any]:
    r"""The metadata on top of a card; empty if there is none that can be read.

    >>> front_matter("---\nlicense: mit\n---\n# A model")
    {'license': 'mit'}
    """
    found = _FRONT_MATTER.match(text)
    try:
        data = parse_yaml(found[1], "the card's metadata") if found else None
    except CorruptFileError:
        return {}
    return data if isinstance(data, dict) else {}


def stated(folder: Path) -> tuple[License | None, tuple[str, ...]]:
    """The licence and the data sets that the README.md of a model folder states."""
    try:
        text = (folder / "README.md").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None, ()
    data = front_matter(text)
    return license_in(data), datasets_in(data)


def license_in(data: dict[str, Any]) -> License | None:
    """The licence in a card's metadata, as it stands there: none is ever made up."""
    ids = _texts(data.get("license"))
    if not ids:
        return None
    name, link = ((_texts(data.get(key)) or (None,))[0] for key in ("license_name", "license_link"))
    return License(ids, name, link)


def datasets_in(data: dict[str, Any]) -> tuple[str, ...]:
    """The data sets in a card's metadata that can be Hub ids."""
    return tuple(each for each in _texts(data.get("datasets")) if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", each))


def _texts(value: Any) -> tuple[str, ...]:
    """The texts among the values, as far as a record may hold them: on one line, without control characters."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, str) and 0 < len(each) <= 300 and each.isprintable())
