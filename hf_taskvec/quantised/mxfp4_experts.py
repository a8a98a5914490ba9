"""MXFP4 as gpt-oss has it: for each expert blocks of 32 FP4 codes in 16 bytes, and the exponent of a scale for each.

Blocks lie along the inputs of an output; the weight itself has inputs first, so it is the transpose of what is stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import override

from hf_taskvec.quantised.bit_fields import FP4, pack_fp4, unpack_fp4
from hf_taskvec.quantised.packed_weight import Grid, Levels, Opened, ScaledWeight, Scales, StoredPiece
from hf_taskvec.quantised.scaled_matrix import scale_numbers, stored_scales

#: codes that share a scale, and the bytes that they take
BLOCK_CODES, BLOCK_BYTES = 32, 16


@dataclass(frozen=True)
class Mxfp4Experts(ScaledWeight):
    """Roles `codes` `[experts, outputs, blocks, 16]` and `scales` `[experts, outputs, blocks]`, both bytes."""

    @property
    @override
    def format_name(self) -> str:
        return "MXFP4"

    @property
    @override
    def grid(self) -> Grid:
        return Grid(1, BLOCK_CODES)

    @property
    @override
    def levels(self) -> Levels:
        return Levels(-FP4[-1], FP4[-1], torch.uint8, 1 / 6)

    @property
    @override
    def product_dtype(self) -> torch.dtype:
        return torch.bfloat16  # as transformers: which holds every product of a code and a power of 2

    @property
    @override
    def outputs_are_last(self) -> bool:
        return True

    @override
    def outputs_first(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(1, 2)

    @override
    def unpack(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        found = torch.empty((stop - start, *self.size[1:]), dtype=self.dtype, device="cpu")
        for first, last in self.parts_of_rows(start, stop):  # an expert is large, and fp32 takes eight times its bytes
            some = {role: each[:, first:last] for role, each in opened.items()}
            found[..., first:last] = super().unpack(some, start, stop)
        return found

    @override
    def codes(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        return unpack_fp4(opened["codes"][start:stop].flatten(-2))

    @override
    def scales(self, opened: Opened, start: int, stop: int) -> Scales:
        return Scales(scale_numbers(opened["scales"][start:stop]), None)

    @override
    def pieces(self, codes: torch.Tensor, found: Scales, start: int) -> Iterator[StoredPiece]:
        yield StoredPiece("codes", pack_fp4(codes).unflatten(-1, (-1, BLOCK_BYTES)), start)
        yield StoredPiece("scales", stored_scales(found.scales, torch.uint8), start)
