"""Small lies about a document: values of another type or size, missing and additional keys, values in wrong places.

A document is what JSON or YAML holds: dicts, lists, texts and numbers. An `Edit` is a change at one path of it, so that
a failure can be told as path and change, and made again. `Raw` stands for text that no document has: NaN, a number of
five thousand digits, a hundred thousand brackets.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Raw:
    """Text that is written as it is where a value is expected."""

    text: str

    def __repr__(self) -> str:
        return f"{self.text[:20]}… ({len(self.text)} characters)" if len(self.text) > 20 else self.text


@dataclass
class Doubled:
    """An object in which a key stands twice."""

    content: dict[str, Any]
    key: str
    second: Any


def to_json(node: Any) -> str:
    """A document as JSON, with what only a text can hold."""
    if isinstance(node, Raw):
        return node.text
    if isinstance(node, Doubled):
        inner = [*node.content.items(), (node.key, node.second)]
        return "{" + ", ".join(f"{json.dumps(key)}: {to_json(value)}" for key, value in inner) + "}"
    if isinstance(node, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {to_json(value)}" for key, value in node.items()) + "}"
    if isinstance(node, list | tuple):
        return "[" + ", ".join(map(to_json, node)) + "]"
    return json.dumps(node)


NUMBERS = [0, 1, 2, 3, 7, -1, 0.5, -0.5, 1e308, -1e308, 5e-324, 10**9, 10**18, -(10**18), 2**63, 2**64, 10**30]
NO_NUMBERS = [Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-0.0"), Raw("1" + "0" * 5000)]
TEXTS = ["", "x", "0", "1", "0.5", "true", "nan", "None", "a b", "é λ 字", "x" * 300, "x" * 100_000]
HOSTILE_TEXTS = [
    *(
        "..",
        ".",
        "/",
        "../outside.json",
        "../../outside.json",
        "/etc/hostname",
        "a/b",
        "a\\b",
        "~",
        "~root",
        "-o",
        "me/model",
    ),
    *(
        "a\0b",
        "\x1b[31mred",
        "a\nb",
        "a\r\nb",
        "\u202e",
        "\ud800",
        "\udfff\ud800",
        "\ufeff",
        "<b>x</b>",
        "[x](y)",
        "`x`",
    ),
    *("{{ x }}", "${HOME}", "%s", "__class__", "!!python/name:os.system", "*a", "&a x", "float32", "F64", "torch.int8"),
]
EMPTY = [None, [], {}, [[]], [None], {"": None}, [{}]]
LARGE = [
    list(range(3000)),
    {str(number): number for number in range(3000)},
    Raw("[" * 300 + "]" * 300),
    Raw("[" * 100_000 + "]" * 100_000),
    Raw('{"a":' * 50_000 + "1" + "}" * 50_000),
    Raw("[" + "0," * 30_000 + "0]"),
]


@dataclass(frozen=True)
class Edit:
    """One change: what stands at a path becomes something else."""

    path: Path
    what: str
    value: Any = None

    def __str__(self) -> str:
        value = "" if self.what in ("removed", "reversed") else f" {_short(self.value)}"
        return f"{'/'.join(map(str, self.path)) or '(all)'}: {self.what}{value}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def edited(document: Any, edits: Sequence[Edit]) -> Any:
    """The document with some changes, one after the other; a change of what is no longer there does nothing."""
    document = copy.deepcopy(document)
    for edit in edits:
        if not edit.path:
            document = copy.deepcopy(edit.value)
            continue
        parent, key = document, edit.path[-1]
        try:
            for step in edit.path[:-1]:
                parent = parent[step]
            _apply(parent, key, edit)
        except (LookupError, TypeError, AttributeError):
            continue
        if edit.what == "doubled" and isinstance(parent, dict):
            document = _with(document, edit.path[:-1], Doubled(parent, key, copy.deepcopy(edit.value)))
    return document


def _apply(parent: Any, key: Any, edit: Edit) -> None:
    if edit.what == "removed":
        del parent[key]
    elif edit.what == "renamed to":
        if isinstance(parent, dict):
            parent[edit.value] = parent.pop(key)
    elif edit.what == "beside it":
        parent.append(copy.deepcopy(edit.value)) if isinstance(parent, list) else parent.update({key: edit.value})
    elif edit.what != "doubled":
        parent[key]
        parent[key] = copy.deepcopy(edit.value)


def _with(document: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    return document


def draw(document: Any, random: random.Random, extra: Sequence[Any] = ()) -> list[Edit]:
    """One to three changes; `extra` are values that a kind of file has reasons to fear."""
    edits: list[Edit] = []
    for _ in range(random.choice([1, 1, 1, 1, 2, 3])):
        edits += _one(document, random, extra)
    return edits


def _one(document: Any, random: random.Random, extra: Sequence[Any]) -> list[Edit]:
    if random.random() < 0.01:
        return [Edit((), "becomes", _value(document, random, extra))]
    path = _place(document, random)
    if not path:
        return [Edit((), "becomes", _value(document, random, extra))]
    old, parent = at(document, path), at(document, path[:-1])
    kind = random.choice(["value"] * 5 + ["near"] * 6 + ["removed", "renamed", "more", "doubled", "swapped", "moved"])
    if kind == "removed":
        return [Edit(path, "removed")]
    if kind == "renamed" and isinstance(parent, dict):
        names = [f"{path[-1]}x", str(path[-1]).upper(), "", str(path[-1])[:-1], *map(str, parent)]
        return [Edit(path, "renamed to", random.choice(names))]
    if kind == "more":
        key = random.choice(["extra", "", "__class__", "self", *_keys(document)]) if isinstance(parent, dict) else "+"
        return [Edit((*path[:-1], key), "beside it", _value(document, random, extra))]
    if kind == "doubled" and isinstance(parent, dict):
        return [Edit(path, "doubled", random.choice([old, _near(old, random), _value(document, random, extra)]))]
    if kind == "swapped":
        other = _place(document, random)
        inside = path[: len(other)] == other or other[: len(path)] == path
        if other and not inside:
            return [Edit(path, "swapped, becomes", at(document, other)), Edit(other, "swapped, becomes", old)]
    if kind == "moved":
        return [Edit(path, "becomes", at(document, _place(document, random)))]
    return [Edit(path, "becomes", _near(old, random) if kind == "near" else _value(document, random, extra))]


def at(document: Any, path: Path) -> Any:
    for step in path:
        document = document[step]
    return document


def _place(document: Any, random: random.Random) -> Path:
    """Somewhere in the document; what stands high is chosen as often as one of a thousand numbers in a list."""
    path: Path = ()
    while isinstance(document, dict | list) and document:
        key = random.choice(list(document)) if isinstance(document, dict) else random.randrange(len(document))
        path, document = (*path, key), document[key]
        if random.random() < 0.15:
            break
    return path


def _keys(document: Any) -> list[str]:
    if isinstance(document, dict):
        return [*map(str, document), *(key for value in document.values() for key in _keys(value))]
    return [key for value in document for key in _keys(value)] if isinstance(document, list) else []


def _value(document: Any, random: random.Random, extra: Sequence[Any]) -> Any:
    groups: list[Sequence[Any]] = [NUMBERS, NO_NUMBERS, TEXTS, HOSTILE_TEXTS, [True, False], EMPTY]
    if random.random() < 0.05:
        groups = [LARGE]
    elif extra and random.random() < 0.2:
        groups = [extra]
    return random.choice(random.choice(groups))


def _near(old: Any, random: random.Random) -> Any:
    """Something that could almost stand there."""
    if isinstance(old, bool):
        return random.choice([not old, int(old), str(old).lower(), None, [old]])
    if isinstance(old, int | float):
        changed = [old + 1, old - 1, -old, old * 2, old * 10**6, str(old), bool(old), [old], None, Raw("NaN")]
        whole = [float(old), old + 0.5] if isinstance(old, int) else []
        if isinstance(old, float) and math.isfinite(old):
            whole = [int(old), old * (1 + 2**-40)]
        return random.choice([*changed, *whole])
    if isinstance(old, str):
        texts = [f"{old} ", f"../{old}", f"/{old}", old[:-1], old.upper(), old[::-1], f"{old}\0", f"{old}\x1b[0m"]
        texts += [f"{old}\ud800", f"{old}\n{old}", old * 500, f"{old}0"]
        return random.choice([*texts, [old], {old: old}, None, list(old[:50])])
    if isinstance(old, list):
        chosen = [[], old[:-1], old[1:], [*old, *old[-1:]], old[::-1], old * 2, [old], [*old, None], None]
        return random.choice([*chosen, dict(enumerate(old)), old[:1], (old * 300)[:300] if len(old) < 30 else old])
    if isinstance(old, dict):
        items = list(old.items())
        other = [{}, dict(items[:-1]), dict(items[1:]), dict(items[::-1]), {f"{key}x": value for key, value in items}]
        return random.choice([*other, [old], [list(each) for each in items], None, list(old), {"": old}])
    return random.choice(["", 0, [], {}, False, "None"])


def damaged(content: bytes, random: random.Random, only: int | None = None) -> tuple[bytes, str]:
    """The bytes with some damage, within the first `only` of them if given, and what it is."""
    data, end = bytearray(content), min(only or len(content), len(content))
    if not end:
        return bytes([random.randrange(256)]), "a byte where there was none"
    kind = random.choice(["flip"] * 4 + ["many", "cut", "insert", "delete", "zeros", "swap", "double", "append"])
    position, length = random.randrange(end), random.randint(1, 8)
    if kind == "flip":
        data[position] ^= 1 << random.randrange(8)
    elif kind == "many":
        for _ in range(length):
            data[random.randrange(end)] = random.randrange(256)
    elif kind == "cut":
        del data[position:]
    elif kind == "insert":
        data[position:position] = random.randbytes(length)
    elif kind == "delete":
        del data[position : position + length]
    elif kind == "zeros":
        length = random.choice([length, 64, len(data)])
        data[position : position + length] = bytes(min(length, len(data) - position))
    elif kind == "swap":
        other = random.randrange(end)
        data[position], data[other] = data[other], data[position]
    elif kind == "double":
        data[position:position] = data[position : position + 8 * length]
    else:
        data += random.choice([bytes(length), random.randbytes(length), content, b"\n", bytes(4096)])
    return bytes(data), f"{kind} at byte {position} of {len(content)} ({length})"
