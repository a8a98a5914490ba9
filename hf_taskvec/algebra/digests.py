"""Digests of tensors: BLAKE3 of their bytes, which takes a core as long as reading them from a fast disk.

A digest is a text with a tag before it. Earlier ones are still compared: `blocks:` stands for the SHA-256 over the
SHA-256 of every 65,536 bytes, and without a tag it is the SHA-256 of all bytes at once.
"""

import hashlib
from collections.abc import Callable

import torch
from blake3 import blake3

#: what a digest begins with
TAG = "blake3:"

_BLOCKS, _BLOCK = "blocks:", 1 << 16


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
        self._hash = blake3()

    def update(self, elements: torch.Tensor) -> None:
        """The next elements, on the CPU."""
        self._hash.update(_bytes_of(elements))

    def text(self) -> str:
        """The digest of all elements so far."""
        return TAG + self._hash.hexdigest()


def tag_of(digest: str) -> str:
    """The tag of a digest: which one it is."""
    return next((tag for tag in (TAG, _BLOCKS) if digest.startswith(tag)), "")


def tensor_digest(tensor: torch.Tensor, like: str = TAG) -> str:
    """The digest of a tensor's bytes, in the order in which elements are stored.

    Args:
        tensor (`torch.Tensor`):
            On the CPU.
        like (`str`, *optional*):
            A digest that it is to be compared with, and so of the same kind.

    Returns:
        `str`: Hexadecimal digits, with a tag before them.

    Example:
        >>> tensor_digest(torch.zeros(3), like="0" * 64)
        '15ec7bf0b50732b49f8228e07d24365338f9e3ab994b00af08e5a3bffe55fd8b'

    """
    tag = tag_of(like)
    return tag + _KINDS[tag](_bytes_of(tensor))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _of_blocks(data: memoryview) -> str:
    whole = hashlib.sha256()
    for start in range(0, len(data), _BLOCK):
        whole.update(hashlib.sha256(data[start : start + _BLOCK]).digest())
    whole.update(len(data).to_bytes(8, "little"))
    return whole.hexdigest()


_KINDS: dict[str, Callable[[memoryview], str]] = {
    TAG: lambda data: blake3(data).hexdigest(),
    _BLOCKS: _of_blocks,
    "": lambda data: hashlib.sha256(data).hexdigest(),
}
