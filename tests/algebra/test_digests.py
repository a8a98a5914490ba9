"""Digests of blocks, beside hashlib: whatever the size, the pieces, and whether machine code hashes."""

import hashlib

import pytest
import torch

from hf_taskvec.algebra import digests
from hf_taskvec.algebra.digests import TensorDigest, tensor_digest

BLOCK = 65_536
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 15 * BLOCK, 16 * BLOCK, 16 * BLOCK + 5, 37 * BLOCK + 77]


def by_hashlib(data: bytes) -> str:
    """What the docstring of the module says."""
    blocks = (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))
    whole = b"".join(hashlib.sha256(block).digest() for block in blocks) + len(data).to_bytes(8, "little")
    return "blocks:" + hashlib.sha256(whole).hexdigest()


@pytest.fixture(params=["machine code", "hashlib"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    together = request.param == "machine code"
    monkeypatch.setattr(digests, "_HASHED_BEFORE", 0)
    monkeypatch.setattr(digests, "_can_hash_together", lambda: together)
    if together:  # nothing is left to the other way but what is no whole block, and a few blocks
        monkeypatch.setattr(digests, "_FEWEST", 1)
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_is_what_hashlib_makes_of_the_blocks(size: int, way: str) -> None:
    data = torch.randint(256, (size + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))[3:]
    assert tensor_digest(data) == by_hashlib(data.numpy().tobytes())


@pytest.mark.parametrize("piece", [1000, BLOCK, 3 * BLOCK + 5, 17 * BLOCK])
def test_pieces_give_the_digest_of_the_whole(piece: int, way: str) -> None:
    whole = torch.randn(19 * BLOCK // 4 + 11, generator=torch.Generator().manual_seed(piece))
    digest = TensorDigest()
    for elements in whole.split(piece):
        digest.update(elements)
    assert digest.text() == tensor_digest(whole) == by_hashlib(whole.numpy().tobytes())


def test_every_byte_counts_in_the_order_of_elements(way: str) -> None:
    tensor = torch.zeros(40, BLOCK // 4, dtype=torch.bfloat16)
    before = tensor_digest(tensor)
    assert tensor_digest(tensor.flatten()) == before
    for place in (0, 7 * BLOCK, tensor.numel() - 1):
        changed = tensor.clone()
        changed.view(-1)[place] = -0.0
        assert tensor_digest(changed) != before
    assert tensor_digest(tensor[:39]) != before
    numbers = torch.arange(6.0).view(2, 3)
    assert tensor_digest(numbers.t()) == by_hashlib(numbers.t().contiguous().numpy().tobytes())


def test_digests_of_before_are_of_all_bytes_at_once() -> None:
    tensor = torch.randn(1000)
    plain = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert tensor_digest(tensor, like=plain) == plain
