"""FP8 and int8: codes of a byte in a matrix (or one for each expert), and a scale for each block of them.

| blocks | as in |
|---|---|
| so many rows and columns, less at the ends | FP8 of DeepSeek and transformers, compressed-tensors' `block` |
| the whole matrix | FP8 with one scale, compressed-tensors' `tensor` |
| a row | compressed-tensors' `channel`: FP8, and int8 of W8A8 |

Scales are floating numbers, or powers of 2 of which the exponent is stored (ue8m0). Experts of some FP8 models are FP4,
two codes in a byte, with a scale for 32 of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import override

from hf_taskvec.quantised.bit_fields import FP4, pack_fp4, unpack_fp4
from hf_taskvec.quantised.packed_weight import Grid, Levels, Opened, ScaledWeight, Scales, StoredPiece

#: a byte that holds an exponent, with what is subtracted from it
EXPONENTS, EXPONENT_BIAS = (torch.uint8, torch.float8_e8m0fnu), 127
FLOAT_CODES = {torch.float8_e4m3fn: Levels(-448.0, 448.0, torch.float8_e4m3fn, 16 / 448)}
FLOAT_CODES[torch.float8_e5m2] = Levels(-57344.0, 57344.0, torch.float8_e5m2, 1 / 14)


def scale_numbers(stored: torch.Tensor) -> torch.Tensor:
    """Scales in fp32, whatever they are stored as."""
    if stored.dtype == torch.uint8:
        return (stored.float() - EXPONENT_BIAS).exp2()
    return stored.float()


def stored_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The way back, for scales that the dtype can hold."""
    if dtype == torch.uint8:
        return (scales.log2() + EXPONENT_BIAS).to(torch.uint8)
    return scales.to(dtype)


@dataclass(frozen=True)
class ScaledMatrix(ScaledWeight):
    """Codes of a byte, in the order of the weights; roles `codes`, `scales` and perhaps `zeros`.

    Args:
        block (`tuple` of `int`):
            The rows and columns that share a scale.
        product (`torch.dtype`):
            The dtype of scales and products, before these become weights.
    """

    block: tuple[int, int]
    product: torch.dtype

    @property
    @override
    def format_name(self) -> str:
        return "FP8" if self.levels.floats is not None else "int8"

    @property
    @override
    def grid(self) -> Grid:
        return Grid(*self.block)

    @property
    @override
    def levels(self) -> Levels:
        codes = self.part("codes")
        assert codes is not None
        return FLOAT_CODES.get(codes.dtype, Levels(-128.0, 127.0))

    @property
    @override
    def product_dtype(self) -> torch.dtype:
        return self.product

    @override
    def codes(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        return opened["codes"][start:stop].float()

    @override
    def scales(self, opened: Opened, start: int, stop: int) -> Scales:
        zeros = opened.get("zeros")
        return Scales(
            self._of_rows(scale_numbers(opened["scales"]), start, stop),
            None if zeros is None else self._of_rows(zeros.float(), start, stop),
        )

    def _of_rows(self, numbers: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if len(self.size) > 2:
            return numbers.reshape(self.size[0], *self.blocks(self.size[1]))[start:stop]
        first, last = start // self.block[0], -(-stop // self.block[0])
        return numbers.reshape(self.blocks(self.size[0]))[first:last]

    @override
    def pieces(self, codes: torch.Tensor, found: Scales, start: int) -> Iterator[StoredPiece]:
        yield StoredPiece("codes", self._stored_codes(codes), start)
        for role, numbers in (("scales", found.scales), ("zeros", found.zeros)):
            source = self.part(role)
            if source is None or numbers is None or (self.is_whole and start):
                continue
            first = 0 if self.is_whole else start // self.row_unit
            stored = stored_scales(numbers, source.dtype) if role == "scales" else numbers.to(source.dtype)
            rows = source.shape if self.is_whole else (len(numbers), *source.shape[1:])
            if len(self.size) > 2:  # perhaps of a part of the outputs
                rows = (len(numbers), *[-1][: len(source.shape) - 1], *source.shape[2:])
            stored = stored.reshape(rows)
            yield StoredPiece(role, stored, first)

    def _stored_codes(self, codes: torch.Tensor) -> torch.Tensor:
        source = self.part("codes")
        assert source is not None
        return codes.to(source.dtype)


@dataclass(frozen=True)
class Fp4Matrix(ScaledMatrix):
    """The same with two FP4 codes in a byte."""

    @property
    @override
    def format_name(self) -> str:
        return "FP4"

    @property
    @override
    def levels(self) -> Levels:
        return Levels(-FP4[-1], FP4[-1], torch.uint8, 1 / 6)

    @override
    def codes(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        return unpack_fp4(opened["codes"][start:stop])

    @override
    def _stored_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return pack_fp4(codes).view(torch.int8)
