"""Digests of tensors: SHA-256 over the SHA-256 of every 65,536 bytes, so that many blocks are hashed at a time.

One message after the other is all that hashlib can do, and without instructions for it a processor takes longer to hash
a file than to copy it. A digest of blocks is a text with a tag before it. Those of before have none, are of all bytes
at once, and are still compared.
"""

import ctypes
import hashlib
from functools import cache

import torch

from hf_taskvec.algebra.machine_code import WIDTH, can_compile, has_fast_hashlib, hashing_code

# Bytes that are hashed by themselves.
_BLOCK = 1 << 16

# As many as machine code has lanes.
_TOGETHER = WIDTH * _BLOCK

#: what a digest of blocks begins with
TAG = "blocks:"

# A few blocks are hashed one by one: as many at a time take as long as all lanes.
_FEWEST = 4

# Compiling takes a tenth or two of a second. In that time hashlib has hashed this many bytes.
_HASHED_BEFORE = 1 << 26


class TensorDigest:
    """The digest of a tensor whose elements come one after the other.

    Example:
        >>> digest, elements = TensorDigest(), torch.arange(100_000)
        >>> digest.update(elements[:10])
        >>> digest.update(elements[10:])
        >>> digest.text() == tensor_digest(elements)
        True

    """

    def __init__(self) -> None:
        self._blocks, self._size = hashlib.sha256(), 0
        # What came last, kept until there are enough blocks to be hashed together.
        self._kept, self._count = torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    def update(self, elements: torch.Tensor) -> None:
        """The next elements, on the CPU."""
        data = _bytes_of(elements)
        self._size += len(data)
        if self._count:
            data = self._keep(data)
            if self._count < _TOGETHER:
                return
            self._blocks.update(_digests(self._kept))
            self._count = 0
        whole = len(data) // _TOGETHER * _TOGETHER
        for start in range(0, whole, _TOGETHER):
            self._blocks.update(_digests(data[start : start + _TOGETHER]))
        self._keep(data[whole:])

    def _keep(self, data: torch.Tensor) -> torch.Tensor:
        """Keep as much as there is room for, and return the rest."""
        fits = min(len(data), _TOGETHER - self._count)
        if self._count + fits > len(self._kept):
            more = torch.empty(min(_TOGETHER, max(1 << 12, 4 * (self._count + fits))), dtype=torch.uint8, device="cpu")
            more[: self._count] = self._kept[: self._count]
            self._kept = more
        self._kept[self._count : self._count + fits] = data[:fits]
        self._count += fits
        return data[fits:]

    def text(self) -> str:
        """The digest of all elements so far; how many bytes they are is a part of it."""
        found = self._blocks.copy()
        found.update(_digests(self._kept[: self._count]))
        found.update(self._size.to_bytes(8, "little"))
        return TAG + found.hexdigest()


def tensor_digest(tensor: torch.Tensor, like: str = TAG) -> str:
    """The digest of a tensor's bytes, in the order in which elements are stored.

    Args:
        tensor (`torch.Tensor`):
            On the CPU.
        like (`str`, *optional*):
            A digest that it is to be compared with: without a tag, it is the SHA-256 of all bytes at once.

    Returns:
        `str`: Hexadecimal digits, with a tag before them if they are of blocks.

    Example:
        >>> tensor_digest(torch.zeros(3), like="0" * 64)
        '15ec7bf0b50732b49f8228e07d24365338f9e3ab994b00af08e5a3bffe55fd8b'

    """
    data = _bytes_of(tensor)
    if not like.startswith(TAG):
        return hashlib.sha256(_view(data)).hexdigest()
    whole = hashlib.sha256()
    for start in range(0, len(data), _TOGETHER):
        whole.update(_digests(data[start : start + _TOGETHER]))
    whole.update(len(data).to_bytes(8, "little"))
    return TAG + whole.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _view(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]


_hashed_before = 0


def _digests(data: torch.Tensor) -> bytes:
    """The SHA-256 of each block of some bytes, no more than `_TOGETHER`, one behind the other."""
    global _hashed_before
    whole, found = len(data) // _BLOCK, b""
    if whole >= _FEWEST and _hashed_before >= _HASHED_BEFORE and _can_hash_together():
        found, data = _digests_together(data.data_ptr(), whole), data[whole * _BLOCK :]
    _hashed_before += len(data)
    return found + b"".join(hashlib.sha256(_view(each)).digest() for each in torch.split(data, _BLOCK) if len(each))


@cache
def _can_hash_together() -> bool:
    return can_compile() and not has_fast_hashlib()


def _digests_together(address: int, count: int) -> bytes:
    """The same by machine code. Lanes without a block of their own hash the last one again."""
    run, lanes = hashing_code(), [min(lane, count - 1) for lane in range(WIDTH)]
    states = _first_states().clone()
    run(_BLOCK // 64, _addresses(*(address + lane * _BLOCK for lane in lanes)), states.data_ptr())
    run(1, _addresses(*[_padding().data_ptr()] * WIDTH), states.data_ptr())
    words = states.view(-1, WIDTH).t()[:count].contiguous()
    return words.view(torch.uint8).view(-1, 4).flip(1).contiguous().numpy().tobytes()


_addresses = ctypes.c_void_p * WIDTH


@cache
def _first_states() -> torch.Tensor:
    from hf_taskvec.algebra.hashing_code import FIRST_STATE

    words = torch.tensor(FIRST_STATE, dtype=torch.int64, device="cpu")
    return words.to(torch.int32).repeat_interleave(WIDTH)


@cache
def _padding() -> torch.Tensor:
    """What SHA-256 hashes behind a block: a bit that is set, zeros, and the number of bits."""
    padding = b"\x80" + bytes(55) + (8 * _BLOCK).to_bytes(8, "big")
    return torch.tensor(list(padding), dtype=torch.uint8, device="cpu")
