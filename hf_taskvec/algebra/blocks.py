"""A part of a tensor that somebody holds: some of its rows, some of its columns, or both.

A process of a sharded model holds a `Block` of each weight, and computes no more than that. Stored tensors are cut to
the block before anything is added up, element by element, so no bit hangs on it. What is computed of whole tiles, such
as the product of two factors, is computed for the whole tile and then cut: the last bits of a product hang on its size.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from typing_extensions import override

from hf_taskvec.algebra.sources import Readable, RowReader, View
from hf_taskvec.errors import UnsupportedError


@dataclass(frozen=True)
class Block:
    """Which elements of a tensor are held: along each dimension the positions, in rising order.

    Args:
        positions (`tuple` of `range` or `tuple[int, ...]`):
            One for each dimension of the tensor.

    Example:
        >>> block = Block((range(1, 3), (0, 2)))
        >>> block.cut(torch.arange(9).view(3, 3))
        tensor([[3, 5],
                [6, 8]])

    """

    positions: tuple[range | tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for each in self.positions:
            if not isinstance(each, range) and any(one >= other for one, other in pairwise(each)):
                raise UnsupportedError("a weight is sharded in parts that are not in their order.")

    @classmethod
    def of(cls, positions: Sequence[Sequence[int]]) -> "Block":
        """A block of any positions; neighbouring ones become a `range`."""
        return cls(tuple(_as_range(each) for each in positions))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is held."""
        return tuple(len(each) for each in self.positions)

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Which of the held rows are among rows `start:stop` of the whole tensor."""
        if not self.positions:
            return start, stop
        held = self.positions[0]
        return bisect_left(held, start), bisect_left(held, stop)

    def cut(self, tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
        """What is held of a tensor, or of a tile of it that begins with row `start`; a view where that is possible."""
        for dimension, held in self._among(tensor, start):
            if isinstance(held, range):
                tensor = tensor.narrow(dimension, held.start, len(held))
            else:
                tensor = tensor.index_select(dimension, torch.tensor(held, device=tensor.device))
        return tensor

    def place(self, held: torch.Tensor, tensor: torch.Tensor, start: int = 0) -> None:
        """Write what is held into its places in a tensor, or in a tile of it that begins with row `start`."""
        _place(held, tensor, self._among(tensor, start))

    def _among(self, tensor: torch.Tensor, start: int) -> list[tuple[int, range | tuple[int, ...]]]:
        """Dimension and positions in a tile, of those dimensions that are not held whole."""
        found: list[tuple[int, range | tuple[int, ...]]] = []
        for dimension, held in enumerate(self.positions):
            first = start if dimension == 0 else 0
            if dimension == 0:
                low, high = self.rows(start, start + tensor.shape[0])
                held = held[low:high]
            if isinstance(held, range):
                held = range(held.start - first, held.stop - first) if held else range(0)
            else:
                held = tuple(each - first for each in held)
            if held != range(tensor.shape[dimension]):
                found.append((dimension, held))
        return found


def _place(held: torch.Tensor, tensor: torch.Tensor, among: list[tuple[int, range | tuple[int, ...]]]) -> None:
    if not among:
        tensor.copy_(held)
        return
    (dimension, positions), *others = among
    if isinstance(positions, range):
        _place(held, tensor.narrow(dimension, positions.start, len(positions)), others)
    else:
        index = torch.tensor(positions, device=tensor.device)
        some = tensor.index_select(dimension, index)
        _place(held, some, others)
        tensor.index_copy_(dimension, index, some)


def _as_range(positions: Sequence[int]) -> range | tuple[int, ...]:
    held = tuple(positions)
    if not held:
        return range(0)
    whole = range(held[0], held[-1] + 1)
    return whole if len(whole) == len(held) and held == tuple(whole) else held


@dataclass(frozen=True)
class PartOf(View):
    """What a block holds of a stored tensor."""

    block: Block

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @override
    def read(self) -> torch.Tensor:
        return self.block.cut(self.source.read())

    @override
    def readable(self) -> Readable:
        opened = self.source.readable()
        return _RowsOfBlock(opened, self.block) if isinstance(opened, RowReader) else self.block.cut(opened)

    @property
    @override
    def place(self) -> str:
        return str(self.block)


@dataclass(frozen=True)
class _RowsOfBlock(RowReader):
    """What a block holds of a tensor whose rows are made when they are asked for."""

    whole: RowReader
    block: Block

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @override
    def rows(self, start: int, stop: int, number: int = 0) -> torch.Tensor:
        held = self.block.positions[0][start:stop]
        first, last = (held[0], held[-1] + 1) if len(held) else (0, 0)
        return self.block.cut(self.whole.rows(first, last, number), first)
