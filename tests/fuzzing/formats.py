"""How a file is taken apart into a document that can be changed, and put together again."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from abc import ABC, abstractmethod
from typing import Any

import torch
import yaml
from fuzzing.mutations import Doubled, Raw, to_json


class Format(ABC):
    """A kind of file."""

    #: damage to the bytes falls within so many of the first ones; None for anywhere
    head: int | None = None
    #: values that readers of this kind of file have reasons to fear
    extra: tuple[Any, ...] = ()

    @abstractmethod
    def parse(self, content: bytes) -> Any:
        """The document of a valid file."""

    @abstractmethod
    def build(self, document: Any, valid: bytes) -> bytes:
        """The file of a document; what is not part of the document is taken from the valid file."""


class Json(Format):
    """One JSON document."""

    def parse(self, content: bytes) -> Any:
        return json.loads(content)

    def build(self, document: Any, valid: bytes) -> bytes:
        return to_json(document).encode("utf-8", "surrogatepass")


class JsonLines(Format):
    """A JSON document on each line."""

    def parse(self, content: bytes) -> Any:
        return [json.loads(line) for line in content.decode().splitlines()]

    def build(self, document: Any, valid: bytes) -> bytes:
        lines = document if isinstance(document, list) else [document]
        return "".join(to_json(line) + "\n" for line in lines).encode()


def _laughs() -> Raw:
    """Aliases that make a list of 8⁹ words of a few hundred bytes."""
    lists = ["&a0 [x, x, x, x, x, x, x, x]"]
    lists += [f"&a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 9)]
    return Raw(f"[{', '.join(lists)}]")


_YAML = (
    _laughs(),
    *map(Raw, ("&me [*me]", "&me {a: *me}", "2026-01-01", "2026-13-45", "!!python/object/apply:os.getcwd []", ".nan")),
    *map(Raw, (".inf", "0x_", "1:30:00", "? a", "!!binary x", "!!set {a, b}", "~", "{<<: [{a: 1}]}")),
)


def plain_yaml(text: str) -> Any:
    """What YAML holds; libyaml has no bound of its own, and would end the process in deep nesting."""
    if max(map(text.count, "[{-?:")) > 5_000:
        raise yaml.YAMLError("too much")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class Yaml(Format):
    """A YAML document; JSON is YAML, so what was changed is written as JSON."""

    extra = _YAML

    def parse(self, content: bytes) -> Any:
        return yaml.safe_load(content)

    def build(self, document: Any, valid: bytes) -> bytes:
        return to_json(document).encode()


class FrontMatter(Format):
    """YAML on top of a Markdown file."""

    extra = _YAML

    def parse(self, content: bytes) -> Any:
        return yaml.safe_load(content.decode().split("---\n")[1])

    def build(self, document: Any, valid: bytes) -> bytes:
        body = valid.split(b"---\n", 2)[2]
        return b"---\n" + to_json(document).encode() + b"\n---\n" + body


class SafetensorsHeader(Format):
    """The header of a safetensors file: names, dtypes, shapes, offsets and metadata.

    Args:
        nested (`str`, *optional*):
            The key of the metadata whose text is JSON, taken apart as well.
        twice (`bool`, *optional*):
            That the JSON is a list, the second item of which is the text of another JSON document.
    """

    extra = (
        "F32",
        "F16",
        "BF16",
        "F8_E4M3",
        "I64",
        "BOOL",
        "F4",
        [2**40, 2**40],
        [0],
        [0, 2**62],
        [2**32, 2**32],
        [-1],
    )

    def __init__(self, nested: str | None = None, twice: bool = False) -> None:
        self.nested, self.twice = nested, twice

    def parse(self, content: bytes) -> Any:
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        if self.nested:
            found = json.loads(header["__metadata__"][self.nested])
            header["__metadata__"][self.nested] = [found[0], json.loads(found[1])] if self.twice else found
        return header

    def build(self, document: Any, valid: bytes) -> bytes:
        if self.nested and isinstance(document, dict):
            metadata = document.get("__metadata__")
            if isinstance(metadata, dict) and self.nested in metadata:
                inner = metadata[self.nested]
                if self.twice and isinstance(inner, list) and len(inner) > 1:
                    inner = [inner[0], to_json(inner[1]), *inner[2:]]
                document = {**document, "__metadata__": {**metadata, self.nested: to_json(inner)}}
        length = struct.unpack("<Q", valid[:8])[0]
        header = to_json(document).encode()
        return struct.pack("<Q", len(header)) + header + valid[8 + length :]


class TorchFile(Format):
    """A state dict that torch saved: how the file is packed, and the dtype, shape and form of each tensor."""

    extra = (
        *("stored", "deflated", "legacy", "plain", "expanded", "sparse", "meta", "parameter", "transposed"),
        *("float16", "float64", "int8", "complex64", "bool", [8192, 8192], [2**40], [0], [2**20, 2**20], []),
    )

    def parse(self, content: bytes) -> Any:
        tensors = torch.load(io.BytesIO(content), weights_only=True)
        forms = {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "form": "plain"}
            for name, tensor in tensors.items()
        }
        return {"packed": "stored", "tensors": forms}

    def build(self, document: Any, valid: bytes) -> bytes:
        packed = document.get("packed") if isinstance(document, dict) else "stored"
        content = document.get("tensors", document) if isinstance(document, dict) else document
        tensors = torch.load(io.BytesIO(valid), weights_only=True)
        if isinstance(content, Doubled):
            content = {**content.content, content.key: content.second}
        if isinstance(content, dict):
            content = {key: _as_tensor(node, tensors.get(key), packed) for key, node in content.items()}
        file = io.BytesIO()
        torch.save(_saved(content), file, _use_new_zipfile_serialization=packed != "legacy")
        return _deflated(file.getvalue()) if packed == "deflated" else file.getvalue()


def _saved(node: Any) -> Any:
    """What pickle can hold of a changed document."""
    if isinstance(node, Raw | Doubled):
        return repr(node)
    if isinstance(node, dict):
        return {key: _saved(value) for key, value in node.items()}
    return [_saved(value) for value in node] if isinstance(node, list) else node


def _as_tensor(node: Any, valid: torch.Tensor | None, packed: Any) -> Any:
    if not isinstance(node, dict) or node.keys() != {"dtype", "shape", "form"}:
        return node
    dtype = getattr(torch, str(node["dtype"]), None)
    shape, form = node["shape"], node["form"]
    whole = isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**50 for size in shape)
    if not whole or not isinstance(dtype, torch.dtype) or math.prod(shape) >= 2**60:
        return node
    if form == "expanded" or math.prod(shape) > (2**26 if packed == "deflated" else 2**18):
        return torch.zeros(1, dtype=dtype).expand(shape)  # of one element, whatever the shape
    if valid is not None and valid.numel() == math.prod(shape):
        tensor = valid.to(dtype).reshape(shape)
    else:
        tensor = torch.zeros(shape, dtype=dtype)
    if form == "meta":
        return tensor.to("meta")
    if form == "sparse":
        return tensor.to_sparse()
    if form == "parameter" and tensor.is_floating_point():
        return torch.nn.Parameter(tensor)
    return tensor.T.contiguous().T if form == "transposed" and tensor.dim() == 2 else tensor


def _deflated(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return file.getvalue()


class Bytes(Format):
    """A file of which only the bytes are changed."""

    def __init__(self, head: int | None = None) -> None:
        self.head = head

    def parse(self, content: bytes) -> Any:
        return None

    def build(self, document: Any, valid: bytes) -> bytes:
        raise AssertionError("has no structure")
