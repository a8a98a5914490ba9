"""Codes of a few bits, one after another in words of 32 bits or in bytes, and FP4's numbers."""

from functools import lru_cache

import torch

#: the magnitudes of FP4 (e2m1), by their three bits; the fourth is the sign
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def words_for(count: int, bits: int) -> int:
    """How many words hold so many fields.

    >>> words_for(8, 4), words_for(32, 3), words_for(33, 3)
    (1, 3, 4)
    """
    return -(-count * bits // 32)


def unpack_fields(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` fields of each row of words, the lowest bits first; fields may cross words.

    Args:
        words (`torch.Tensor`):
            int32, whose last dimension holds the fields.
        bits (`int`):
            Of a field: 1 to 8.
        count (`int`):
            Fields of a row.

    Returns:
        `torch.Tensor`: int32, unsigned fields.

    Example:
        >>> unpack_fields(torch.tensor([[0x7654321]], dtype=torch.int32), 4, 6).tolist()
        [[1, 2, 3, 4, 5, 6]]

    """
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device="cpu")
        return (words.unsqueeze(-1) >> shifts).bitwise_and_(mask).flatten(-2)[..., :count]
    starts = torch.arange(count, dtype=torch.int64, device="cpu") * bits
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    both = wide[..., starts // 32] | (wide[..., starts // 32 + 1] << 32)
    return ((both >> (starts % 32)) & mask).int()


def pack_fields(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """The same fields in words again; see `unpack_fields`."""
    count = fields.shape[-1]
    padded = torch.nn.functional.pad(fields.long(), (0, -count % 32)).unflatten(-1, (-1, 32))
    words = torch.zeros(*padded.shape[:-1], bits + 1, dtype=torch.int64, device="cpu")
    for number in range(32):
        word, shift = divmod(number * bits, 32)
        moved = padded[..., number] << shift
        words[..., word] |= moved & 0xFFFFFFFF
        words[..., word + 1] |= moved >> 32
    return words[..., :bits].flatten(-2)[..., : words_for(count, bits)].to(torch.int32).contiguous()


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Bytes of two FP4 numbers, the lower half first, as twice as many numbers in fp32."""
    found: torch.Tensor = _fp4_pairs()[packed.view(torch.uint8).int()].flatten(-2)
    return found


def pack_fp4(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers, each of which is one of FP4's, as bytes."""
    size = numbers.abs()
    number = torch.where(size <= 2, 2 * size, torch.where(size == FP4[-1], size + 1, size + 2))  # of 0, 0.5, … 6
    codes = number.to(torch.uint8) | (numbers.signbit().to(torch.uint8) << 3)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def nearest_fp4(numbers: torch.Tensor) -> torch.Tensor:
    """Each number rounded to one of FP4's, half-way cases to the even code; larger ones become 6.

    >>> nearest_fp4(torch.tensor([0.25, 0.26, 2.5, -5.0, 9.0])).tolist()
    [0.0, 0.5, 2.0, -4.0, 6.0]
    """
    size = numbers.abs()
    # Steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6: every other number of each has an even code.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return size.div_(step).round_().mul_(step).clamp_(max=FP4[-1]).copysign_(numbers)


@lru_cache(maxsize=1)
def _fp4_pairs() -> torch.Tensor:
    """Byte -> its two numbers."""
    numbers = torch.tensor([*FP4, *(-each for each in FP4)], dtype=torch.float32, device="cpu")
    codes = torch.arange(256, device="cpu")
    return torch.stack([numbers[codes & 15], numbers[codes >> 4]], dim=-1)
