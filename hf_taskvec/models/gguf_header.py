"""The tensors of a GGUF file, mapped, after a look at what its header claims to hold.

The gguf package believes every number in a header: a list of 2^60 names would be looked for until memory ends. So each
count is compared first with the bytes that there are.
"""

import struct
import warnings
from pathlib import Path

import torch

from hf_taskvec.errors import CorruptFileError, UnsupportedError

# The sizes of GGUF's plain types by their numbers; 8 is a text, 9 a list.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _LIST = 8, 9
_MORE = "its header claims more than the file has"
# What a tensor takes at least in the header: its name's length, the number of dimensions, its type and offset.
_LEAST_OF_A_TENSOR = 8 + 4 + 4 + 8


def map_gguf(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors of a GGUF file, blocks as bytes; and ggml's numbers of their types.

    Raises:
        `CorruptFileError`: If the file is damaged.
        `UnsupportedError`: If the gguf package is missing.
    """
    try:
        from gguf import GGMLQuantizationType, GGUFReader
    except ImportError:
        raise UnsupportedError(f"{path.name} needs the package gguf: pip install gguf.") from None
    try:
        _check_header(path)
        tensors, kinds = {}, {}
        for each in GGUFReader(path).tensors:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that what is mapped must not be written to
                tensor = torch.from_numpy(each.data)
            is_bf16 = each.tensor_type == GGMLQuantizationType.BF16
            tensors[str(each.name)] = tensor.view(torch.bfloat16) if is_bf16 else tensor
            kinds[str(each.name)] = int(each.tensor_type)
    except Exception as error:  # whatever the damaged bytes lead the reader to
        why = str(error) if isinstance(error, CorruptFileError) else type(error).__name__
        raise CorruptFileError(f"{path.name} is damaged or not a GGUF file ({why}). Download it again.") from None
    return tensors, kinds


class _Header:
    """The header's bytes, read one value after another; no more than the file has."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.left = path.stat().st_size

    def number(self, form: str) -> int:
        content = self._file.read(self.skip(struct.calcsize(form), move=False))
        found: int = struct.unpack(form, content)[0]
        return found

    def skip(self, count: int, move: bool = True) -> int:
        if count > self.left:
            raise CorruptFileError(_MORE)
        self.left -= count
        if move:
            self._file.seek(count, 1)
        return count

    def value(self, kind: int, depth: int = 0) -> None:
        if kind == _TEXT:
            self.skip(self.number("<Q"))
        elif kind != _LIST:
            self.skip(_SIZES[kind])
        elif depth:
            raise CorruptFileError("its header has a list of lists")
        else:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _SIZES:
                self.skip(count * _SIZES[inner])
            else:
                self.several(count, 8)
                for _ in range(count):
                    self.value(inner, depth + 1)

    def several(self, count: int, least: int) -> None:
        if count * least > self.left:
            raise CorruptFileError(_MORE)

    def close(self) -> None:
        self._file.close()


def _check_header(path: Path) -> None:
    header = _Header(path)
    try:
        header.skip(8)  # what it is, and the version, which the package checks
        tensors, pairs = header.number("<Q"), header.number("<Q")
        header.several(pairs, 8 + 4)
        for _ in range(pairs):
            header.value(_TEXT)
            header.value(header.number("<I"))
        header.several(tensors, _LEAST_OF_A_TENSOR)
    finally:
        header.close()
