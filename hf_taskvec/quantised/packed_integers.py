"""Integers of a few bits in words of 32: compressed-tensors' `pack-quantized`, GPTQ and AWQ.

| format | a word of codes holds | a word of zeros holds | a code of 0 bits is |
|---|---|---|---|
| compressed-tensors | neighbouring inputs of an output | neighbouring outputs | −2^(bits−1), zeros alike |
| GPTQ | neighbouring inputs | neighbouring outputs, each zero less one (of version 2 as it is) | 0 |
| AWQ | 8 outputs in the order 0, 2, 4, 6, 1, 3, 5, 7 | the same | 0 |

GPTQ and AWQ store the transpose: the outputs of a weight, which are its rows, are columns of what is stored.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

import torch
from typing_extensions import override

from hf_taskvec.quantised.bit_fields import pack_fields, unpack_fields
from hf_taskvec.quantised.packed_weight import Grid, Levels, Opened, ScaledWeight, Scales, StoredPiece

#: the bits of an AWQ code
AWQ_BITS = 4
# Where output k of 8 stands in an AWQ word, and which output stands at place k.
_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ_OUTPUT = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class PackedIntegers(ScaledWeight):
    """Roles `codes`, `scales`, perhaps `zeros`, and `groups`: the group of each input, where that is not its place.

    Args:
        bits (`int`):
            Of a code.
        group (`int`):
            How many inputs of an output share a scale.
        product (`torch.dtype`):
            The dtype of scales and products, before these become weights.
    """

    bits: int
    group: int
    product: torch.dtype
    _groups: list[torch.Tensor] = field(default_factory=list, compare=False, repr=False, kw_only=True)

    @property
    def inputs(self) -> int:
        """How many inputs the weight has."""
        return self.size[1]

    @property
    @override
    def product_dtype(self) -> torch.dtype:
        return self.product

    @cached_property
    def _column_groups(self) -> torch.Tensor | None:
        """The group of each input, unless they are in order."""
        source = self.part("groups")
        if source is None:
            return None
        found = source.read().long()
        in_order = torch.equal(found, torch.arange(self.inputs, device="cpu") // self.group)
        return None if in_order or bool((found < 0).all()) else found

    @property
    @override
    def grid(self) -> Grid:
        return Grid(1, self.group, self._column_groups)

    @property
    @override
    def row_unit(self) -> int:
        return 32 // gcd(32, self.bits)  # outputs whose zeros share words

    @property
    @override
    def levels(self) -> Levels:
        return Levels(self._lowest, self._lowest + (1 << self.bits) - 1)

    @property
    def _lowest(self) -> float:
        return 0.0

    @override
    def check(self, opened: Opened) -> None:
        super().check(opened)
        groups = self._column_groups
        if groups is not None and not (int(groups.min()) >= 0 and int(groups.max()) < self._group_count):
            raise self.damaged("groups", f"names groups beyond the {self._group_count} that have scales")

    @property
    @abstractmethod
    def _group_count(self) -> int: ...


@dataclass(frozen=True)
class PackQuantized(PackedIntegers):
    """compressed-tensors' `pack-quantized`."""

    @property
    @override
    def format_name(self) -> str:
        return "pack-quantized"

    @property
    @override
    def _lowest(self) -> float:
        return -float(1 << (self.bits - 1))

    @property
    @override
    def _group_count(self) -> int:
        return -(-self.inputs // self.group)

    @override
    def codes(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        return unpack_fields(opened["codes"][start:stop], self.bits, self.inputs).float().add_(self._lowest)

    @override
    def scales(self, opened: Opened, start: int, stop: int) -> Scales:
        scales = opened["scales"].reshape(-1, self._group_count)
        zeros = opened.get("zeros")
        return Scales(
            scales[start:stop].float() if len(scales) > 1 else scales.float(),
            None if zeros is None else self._zeros(zeros, start, stop),
        )

    def _zeros(self, words: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        unit = self.row_unit
        first, last = start // unit * unit, -(-stop // unit) * unit
        of_rows = words[first * self.bits // 32 : last * self.bits // 32].t().contiguous()
        fields = unpack_fields(of_rows, self.bits, min(last, self.size[0]) - first)
        return fields[:, start - first : stop - first].t().float().add_(self._lowest)

    @override
    def pieces(self, codes: torch.Tensor, found: Scales, start: int) -> Iterator[StoredPiece]:
        yield StoredPiece("codes", pack_fields(codes - self._lowest, self.bits), start)
        source = self.part("scales")
        assert source is not None
        yield StoredPiece("scales", found.scales.to(source.dtype).reshape(-1, *source.shape[1:]), start)
        if found.zeros is not None:
            words = pack_fields((found.zeros - self._lowest).t(), self.bits).t().contiguous()
            yield StoredPiece("zeros", words, start * self.bits // 32)


@dataclass(frozen=True)
class Gptq(PackedIntegers):
    """GPTQ's, whatever made them: AutoGPTQ, GPTQModel or Optimum.

    Args:
        zeros_less_one (`bool`):
            Whether zeros are stored less one, as in the first version of the format.
    """

    zeros_less_one: bool

    @property
    @override
    def format_name(self) -> str:
        return "GPTQ"

    @property
    @override
    def _group_count(self) -> int:
        source = self.part("scales")
        assert source is not None
        return source.shape[0]

    @property
    def _mask(self) -> int:
        return (1 << self.bits) - 1

    @override
    def codes(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        words = opened["codes"][:, start:stop].t().contiguous()
        return unpack_fields(words, self.bits, self.inputs).float()

    @override
    def scales(self, opened: Opened, start: int, stop: int) -> Scales:
        zeros = self._columns(opened["zeros"], start, stop)
        if self.zeros_less_one:
            zeros = zeros.add_(1).bitwise_and_(self._mask)
        return Scales(opened["scales"][:, start:stop].t().float(), zeros.t().float())

    def _columns(self, words: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Fields `start:stop` of each row of words."""
        unit = self.row_unit
        first, last = start // unit * unit, -(-stop // unit) * unit
        some = words[:, first * self.bits // 32 : last * self.bits // 32].contiguous()
        return unpack_fields(some, self.bits, last - first)[:, start - first : stop - first]

    @override
    def pieces(self, codes: torch.Tensor, found: Scales, start: int) -> Iterator[StoredPiece]:
        assert found.zeros is not None
        yield StoredPiece("codes", pack_fields(codes, self.bits).t().contiguous(), start, is_columns=True)
        yield StoredPiece("scales", found.scales.t().to(self.scales_dtype).contiguous(), start, is_columns=True)
        zeros = found.zeros.t().int()
        if self.zeros_less_one:
            zeros = (zeros - 1) & self._mask
        yield StoredPiece("zeros", pack_fields(zeros, self.bits), start * self.bits // 32, is_columns=True)


@dataclass(frozen=True)
class Awq(PackedIntegers):
    """AWQ's `gemm`: 4 bits."""

    @property
    @override
    def format_name(self) -> str:
        return "AWQ"

    @property
    @override
    def _group_count(self) -> int:
        source = self.part("scales")
        assert source is not None
        return source.shape[0]

    @override
    def codes(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        return self._columns(opened["codes"], start, stop).t().float()

    @override
    def scales(self, opened: Opened, start: int, stop: int) -> Scales:
        zeros = opened.get("zeros")
        return Scales(
            opened["scales"][:, start:stop].t().float(),
            None if zeros is None else self._columns(zeros, start, stop).t().float(),
        )

    def _columns(self, words: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        first, last = start // 8, -(-stop // 8)
        fields = unpack_fields(words[:, first:last].contiguous(), AWQ_BITS, (last - first) * 8)
        ordered = fields.unflatten(1, (-1, 8))[..., list(_AWQ_PLACE)].flatten(1)
        return ordered[:, start - first * 8 : stop - first * 8]

    @override
    def pieces(self, codes: torch.Tensor, found: Scales, start: int) -> Iterator[StoredPiece]:
        yield StoredPiece("codes", self._words(codes), start // 8, is_columns=True)
        yield StoredPiece("scales", found.scales.t().to(self.scales_dtype).contiguous(), start, is_columns=True)
        if found.zeros is not None:
            yield StoredPiece("zeros", self._words(found.zeros), start // 8, is_columns=True)

    @staticmethod
    def _words(fields: torch.Tensor) -> torch.Tensor:
        """Words of the outputs of each input (or group), of fields whose outputs are rows."""
        return pack_fields(fields.t().unflatten(1, (-1, 8))[..., list(_AWQ_OUTPUT)].flatten(1), AWQ_BITS)
