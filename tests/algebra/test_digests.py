"""Digests of tensors: BLAKE3's own vectors, hashlib for those of before, whatever the size and the pieces."""

import hashlib

import pytest
import torch

from hf_taskvec.algebra.digests import TensorDigest, tensor_digest

BLOCK = 65_536
# From BLAKE3's published test vectors: the bytes 0, 1, …, 250, 0, 1, … of so many, and their digest.
PUBLISHED = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_digest_is_blake3s(size: int) -> None:
    data = (torch.arange(size) % 251).to(torch.uint8)
    assert tensor_digest(data) == "blake3:" + PUBLISHED[size]


@pytest.mark.parametrize("piece", [1000, BLOCK, 3 * BLOCK + 5, 17 * BLOCK])
def test_pieces_give_the_digest_of_the_whole(piece: int) -> None:
    whole = torch.randn(19 * BLOCK // 4 + 11, generator=torch.Generator().manual_seed(piece))
    digest = TensorDigest()
    for elements in whole.split(piece):
        digest.update(elements)
    assert digest.text() == tensor_digest(whole) == tensor_digest(whole.view(torch.uint8))


def test_every_byte_counts_in_the_order_of_elements() -> None:
    tensor = torch.zeros(40, BLOCK // 4, dtype=torch.bfloat16)
    before = tensor_digest(tensor)
    assert tensor_digest(tensor.flatten()) == before
    for place in (0, 7 * BLOCK, tensor.numel() - 1):
        changed = tensor.clone()
        changed.view(-1)[place] = -0.0
        assert tensor_digest(changed) != before
    assert tensor_digest(tensor[:39]) != before
    numbers = torch.arange(6.0).view(2, 3)
    assert tensor_digest(numbers.t()) == tensor_digest(numbers.t().contiguous()) != tensor_digest(numbers)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])
def test_digests_of_before_are_of_blocks_or_of_all_bytes_at_once(size: int) -> None:
    data = torch.randint(256, (size + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))[3:]
    stored = data.numpy().tobytes()
    assert tensor_digest(data, like="0" * 64) == hashlib.sha256(stored).hexdigest()
    blocks = b"".join(hashlib.sha256(stored[start : start + BLOCK]).digest() for start in range(0, size, BLOCK))
    whole = hashlib.sha256(blocks + size.to_bytes(8, "little")).hexdigest()
    assert tensor_digest(data, like="blocks:" + "0" * 64) == "blocks:" + whole
