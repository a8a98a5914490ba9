"""The index of a distributed checkpoint, which torch writes as a pickle, read without running anything.

A pickle is a program: it names functions and calls them. Here every name that torch's index has stands for something
inert, a record of fields or a tuple, and any other name is refused. So nothing of torch or of anybody else is called.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from hf_taskvec.errors import CorruptFileError


class PickledRecord:
    """An object of a pickle: its class's name, and its fields as they were stored."""

    kind = ""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if self.kind == "TensorProperties" and isinstance(state, tuple) and state:
            state = {"dtype": state[0]}
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"a {self.kind} without fields")
        self.fields = state

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def _record(name: str) -> type[PickledRecord]:
    return type(name, (PickledRecord,), {"kind": name})


def _tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _nothing(*_: Any) -> None:
    return None


_METADATA = "torch.distributed.checkpoint.metadata"
_DTYPES = ("bfloat16", "float16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
_OTHER_DTYPES = ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "complex64", "complex128")

#: module and name in the pickle -> what stands for it
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (_METADATA, name): _record(name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _record("_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _record("_StoragePrefix"),
    (_METADATA, "_MEM_FORMAT_ENCODING"): _nothing,
    ("torch", "Size"): _tuple,
    ("torch.serialization", "_get_layout"): _nothing,
    **{("pathlib", name): _nothing for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")},
    **{("torch", name): getattr(torch, name) for name in _DTYPES + _OTHER_DTYPES},
}


class _Restricted(pickle._Unpickler):
    """Python's own reader that is written in Python: in the one in C a number in the file can take any memory."""

    def find_class(self, module: str, name: str) -> Any:
        found: Callable[..., Any] | torch.dtype | None = _ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside")

    def get_extension(self, code: int) -> NoReturn:
        raise pickle.UnpicklingError("it uses an extension")


def read_pickled_index(path: Path) -> PickledRecord:
    """The `Metadata` of a distributed checkpoint.

    Args:
        path (`Path`):
            Its file `.metadata`.

    Raises:
        `CorruptFileError`: If it is damaged, or names anything but what such an index has.
    """
    try:
        with path.open("rb") as file:
            found = _Restricted(file).load()
    except OSError:
        raise
    except Exception as error:  # whatever the damaged bytes lead to
        raise CorruptFileError(
            f"{path.name} in {path.parent.name} is damaged, or no index of torch.distributed.checkpoint ({error}). "
            "Nothing of it was run. If it is from a source that you trust, convert it with torch's own "
            "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch` and save the model as safetensors."
        ) from None
    if not isinstance(found, PickledRecord) or found.kind != "Metadata":
        raise CorruptFileError(f"{path.name} in {path.parent.name} is no index of torch.distributed.checkpoint.")
    return found
