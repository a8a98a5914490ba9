"""What was found out about a config, kept on disk: its layout alone would cost each process the import of transformers.

An entry stands for that import and for nothing else. It is read and written only by a process that has not imported
transformers before, so that no class that somebody registered or changed can get into it, or be passed over for it.
Its name is a digest of everything that the layout follows from: the config, the sources of transformers and our own,
and what else is installed. Whatever is not as this module wrote it, is found out anew.
"""

import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_taskvec.atomic import replacing
from hf_taskvec.errors import CorruptFileError
from hf_taskvec.filenames import LAYOUT_CACHE
from hf_taskvec.json_files import Schema, json_digest, parse_json

#: switches it off, as HF_HUB_DISABLE_TELEMETRY and the like do for other things
SWITCH = "HF_TASKVEC_DISABLE_CACHE"
_FORMAT = 2
_MOST_ENTRIES = 64
_MOST_BYTES = 1 << 25
# An entry, or what a killed process was about to write to one.
_OUR_NAMES = re.compile(r"\.?[0-9a-f]{64}\.json")

_TEXT = {"type": "string", "maxLength": 1000}
_TEXTS = {"type": "array", "items": _TEXT}
_TEXT_OF_NAME = {"type": "object", "additionalProperties": _TEXT}
_NUMBER = {"type": "integer", "minimum": 0}
_NUMBERS = {"type": "array", "items": _NUMBER}
_SHAPES = {"type": "object", "additionalProperties": _NUMBERS}
_PART = {"type": "array", "items": [_TEXT, _NUMBERS, _NUMBERS, *[_NUMBER] * 3], "minItems": 6, "maxItems": 6}
_PARTS = {"type": "object", "additionalProperties": {"type": "array", "items": _PART}}
_LAYOUT = {
    "architecture": _TEXT,
    "body": {**_TEXT, "type": ["string", "null"]},
    **dict.fromkeys(("shapes", "constants", "restructured", "bare"), _SHAPES),
    **dict.fromkeys(("tied", "renamed"), _TEXT_OF_NAME),
    **dict.fromkeys(("optional", "head", "conv1d", "embeddings", "offset", "vocabulary"), _TEXTS),
    **dict.fromkeys(("restructured_stored", "bare_transposed", "ignored"), _TEXTS),
    "parts": _PARTS,
    "prefix": _TEXT,
}
_ENTRY = Schema(
    {
        "type": "object",
        "required": ["key", "digest", "layout"],
        "properties": {
            "key": _TEXT,
            "digest": _TEXT,
            "layout": {
                "type": "object",
                "required": list(_LAYOUT),
                "properties": _LAYOUT,
                "additionalProperties": False,
            },
        },
    }
)


def may_be_kept(config: Mapping[str, Any]) -> bool:
    """Whether a config's layout may be read from the cache, and written to it.

    Not if its class is code beside the model, or if it names a file or a folder, whose content no key tells.
    """
    if "transformers" in sys.modules or _is_switched_off():
        return False
    return not any(key == "auto_map" or "/" in text or "\\" in text for key, text in _texts(config))


def entry_path(config: Mapping[str, Any], most: int) -> Path | None:
    """Where a layout is kept; `None` if transformers has no source files that could be told from others.

    Args:
        config (`Mapping[str, Any]`):
            What the model is built from.
        most (`int`):
            How many parameters it may have.
    """
    from huggingface_hub.constants import HF_ASSETS_CACHE

    found = find_spec("transformers")
    try:
        theirs = [*_stamps(str(Path(found.origin).parent))] if found and found.origin else []
        ours = [*_stamps(str(Path(__file__).parents[1]))]
    except OSError:  # they are being replaced
        return None
    if not theirs or not ours:
        return None
    user = os.geteuid() if os.name == "posix" else None  # users of one folder do not replace each other's
    key = json_digest(_FORMAT, user, config, most, sys.version, _installed(), theirs, ours)
    return Path(HF_ASSETS_CACHE, *LAYOUT_CACHE, f"{key}.json")


def read_entry(path: Path) -> dict[str, Any] | None:
    """The layout in a file of the cache, as JSON has it; `None` if there is none, or it is not as it was written."""
    try:
        entry = parse_json(_own_text(path), path.name)
        _ENTRY.check(entry, path.name)
    except (OSError, UnicodeDecodeError, CorruptFileError):
        return None
    layout: dict[str, Any] = entry["layout"]
    return layout if (entry["key"], entry["digest"]) == (path.stem, json_digest(layout)) else None


def write_entry(path: Path, layout: Mapping[str, Any]) -> None:
    """Keep a layout, and of all that are kept the newest. Where nothing can be written, nothing is kept."""
    entry = {"key": path.stem, "digest": json_digest(layout), "layout": layout}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, shared=True) as partial:
            partial.touch(0o600, exist_ok=False)  # for this user alone, whatever the umask
            partial.write_text(json.dumps(entry), "utf-8")
        # Of other names nothing is removed, wherever a link may have led.
        ours = [each for each in path.parent.iterdir() if _OUR_NAMES.match(each.name)]
        ours.sort(key=lambda each: each.lstat().st_mtime_ns, reverse=True)
        for old in ours[_MOST_ENTRIES:]:
            old.unlink()
    except OSError:
        return


def _is_switched_off() -> bool:
    from huggingface_hub.constants import ENV_VARS_TRUE_VALUES

    return os.environ.get(SWITCH, "").upper() in ENV_VARS_TRUE_VALUES


def _own_text(path: Path) -> str:
    """The text of a file that this user alone can have written: the folder may be one that several users share."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))

    with open(path, encoding="utf-8", opener=opened) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise CorruptFileError(f"{path.name} is not a file of a few MB.")
        if os.name == "posix" and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            raise CorruptFileError(f"{path.name} may be somebody else's.")
        return file.read()


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The texts in a config and in what is nested in it, each with the name that it is under; each name as well."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name), ""
            yield from _texts(each, str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, key)
    elif isinstance(value, str):
        yield key, value


def _stamps(folder: str) -> Iterator[tuple[str, int, int]]:
    """Each Python file below a folder, with its size and when it was changed: some thousand in a few hundredths."""
    for each in sorted(os.scandir(folder), key=lambda found: found.name):
        if each.is_dir(follow_symlinks=False):
            yield from _stamps(each.path)
        elif each.name.endswith(".py"):
            found = each.stat()
            yield each.path, found.st_size, found.st_mtime_ns


def _installed() -> list[str]:
    """What is installed, by names with versions: transformers asks which of many packages are there."""
    found = []
    for folder in sys.path:
        try:
            found += [
                each.name for each in os.scandir(folder or ".") if each.name.endswith((".dist-info", ".egg-info"))
            ]
        except OSError:  # a zip file, or a folder that is not there
            continue
    return sorted(found)
