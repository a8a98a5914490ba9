"""Random damage to files: flipped bytes, cuts, insertions, and JSON that says something else."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_VALUES = [None, True, 0, -1, 1, 10**30, 0.5, -1e308, "", "x", "..", "\ud800", "float32", [], {}, [1], [[]], {"a": 1}]


class Corruptor:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    @contextmanager
    def corrupted(self, path: Path, only: int | None = None) -> Iterator[None]:
        """The file with some damage (within its first `only` bytes, if given), repaired at the end."""
        content = path.read_bytes()
        damaged = self._json(content) if path.suffix == ".json" and self.random.random() < 0.5 else None
        replace(path, damaged or self._bytes(content, only))
        try:
            yield
        finally:
            replace(path, content)

    def _bytes(self, content: bytes, only: int | None) -> bytes:
        data, end = bytearray(content), only or len(content)
        kind = self.random.choice(["flip", "flip", "flip", "many", "cut", "insert", "delete", "zeros", "swap"])
        at = self.random.randrange(end)
        length = self.random.randint(1, 8)
        if kind == "flip":
            data[at] ^= 1 << self.random.randrange(8)
        elif kind == "many":
            for _ in range(length):
                data[self.random.randrange(end)] = self.random.randrange(256)
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = self.random.randbytes(length)
        elif kind == "delete":
            del data[at : at + length]
        elif kind == "zeros":
            data[at : min(at + length, end)] = b"0" * (min(at + length, end) - at)
        else:
            other = self.random.randrange(end)
            data[at], data[other] = data[other], data[at]
        return bytes(data)

    def _json(self, content: bytes) -> bytes:
        document = json.loads(content)
        self._edit(document)
        return json.dumps(document, indent=1).encode()

    def _edit(self, document: Any) -> None:
        """Change one value somewhere in the tree, remove it, or give it another name."""
        while True:
            keys = list(document) if isinstance(document, dict) else list(range(len(document)))
            if not keys:
                return
            key = self.random.choice(keys)
            inner = document[key]
            if isinstance(inner, dict | list) and inner and self.random.random() < 0.8:
                document = inner
                continue
            kind = self.random.choice(["value", "value", "remove", "rename", "copy"])
            if kind == "value":
                document[key] = self.random.choice(_VALUES)
            elif kind == "remove":
                del document[key]
            elif kind == "copy":
                document[key] = document[self.random.choice(keys)]
            elif isinstance(document, dict):
                document[str(key) + "x"] = document.pop(key)
            return


def replace(path: Path, content: bytes) -> None:
    """Write a new file in the place of the old one, which may still be mapped."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
