"""Tensors of which little is not zero: where that stands, and what it is.

The elements, in the order in which they are stored, are taken in blocks of 65,536. Three tensors hold what has a bit
that is set, -0.0 included: how many such elements each block has, the place of each in its block (16 bits, in order),
and their values. That is four bytes for an element of 16 bits, whatever the size of the tensor, and any rows are found
without looking at the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from typing_extensions import override

from hf_taskvec.algebra.machine_code import can_compile, collecting_code, scattering_code
from hf_taskvec.algebra.rounding import FLOATS, dtype_name
from hf_taskvec.algebra.scratch import Slot, buffer
from hf_taskvec.algebra.sources import RowReader, Source, numel
from hf_taskvec.errors import CorruptFileError, MismatchError

#: elements that 16 bits can tell apart
BLOCK = 1 << 16

#: the dtypes of the counts and of the places in a block
COUNTS, OFFSETS = torch.int32, torch.uint16

#: integers of as many bytes, for the bits of a number
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# What torch can add up.
_MOST_DIMENSIONS = 64

# For fewer elements torch is done before machine code is made.
_LEAST = 1 << 16


def blocks_of(shape: Sequence[int]) -> int:
    """The number of blocks of a tensor."""
    return -(-numel(shape) // BLOCK)


def sparse_bytes(shape: Sequence[int], count: int, dtype: torch.dtype) -> int:
    """The bytes of a tensor of which `count` elements are kept."""
    return blocks_of(shape) * COUNTS.itemsize + count * (OFFSETS.itemsize + dtype.itemsize)


def collect(elements: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> int:
    """Write down where some blocks have bits that are set, and their elements there.

    Args:
        elements (`torch.Tensor`):
            Of one block after the other, contiguous; the last may have less than `BLOCK`.
        offsets (`torch.Tensor`):
            Where the places in the blocks go, with room for as many.
        values (`torch.Tensor`):
            Where the elements go, with room for as many.

    Returns:
        `int`: How many they are.
    """
    whole, found = elements.numel() // BLOCK * BLOCK if can_compile() else 0, 0
    if whole:
        run = collecting_code(elements.dtype.itemsize)
        found = int(run(whole, elements.data_ptr(), offsets.data_ptr(), values.data_ptr()))
    if whole == elements.numel():
        return found
    (places,) = elements[whole:].view(INTEGERS[elements.dtype.itemsize]).nonzero(as_tuple=True)
    kept = slice(found, found + len(places))
    offsets[kept].copy_(places % BLOCK)
    values[kept].copy_(elements[whole:][places])
    return kept.stop


@dataclass(frozen=True)
class Sparse(Source):
    """A tensor that is zero but for some elements, of at least one dimension.

    Args:
        size (`tuple` of `int`):
            Its shape.
        counts (`Source`):
            How many elements each block of `BLOCK` elements keeps.
        offsets (`Source`):
            Where in its block each of them stands, in order.
        values (`Source`):
            What they are.
        name (`str`, *optional*):
            What errors call it.
    """

    size: tuple[int, ...]
    counts: Source
    offsets: Source
    values: Source
    name: str = field(default="a sparse tensor", compare=False)
    _checked: set[bool] = field(default_factory=set, compare=False, repr=False)

    def __post_init__(self) -> None:
        expected = ((self.counts, COUNTS, (blocks_of(self.size),)), (self.offsets, OFFSETS, self.values.shape))
        fits = all(source.dtype == dtype and source.shape == shape for source, dtype, shape in expected)
        fits = fits and len(self.values.shape) == 1
        is_shape = 0 < len(self.size) <= _MOST_DIMENSIONS and min(self.size) >= 0
        if not is_shape or not fits or self.values.dtype not in FLOATS:
            found = ", ".join(f"{dtype_name(each.dtype)} {list(each.shape)}" for each in self._stored)
            raise MismatchError(
                f"{self.name}: counts, offsets and values are {found}, which do not make a tensor of shape "
                f"{list(self.size[:_MOST_DIMENSIONS])}."
            )

    @property
    def _stored(self) -> tuple[Source, Source, Source]:
        return (self.counts, self.offsets, self.values)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.size

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    @override
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._stored)

    @override
    def readable(self) -> "SparseRows":
        counts, offsets, values = (each.read().contiguous() for each in self._stored)
        # Before anything is made of them: how many there are is what decides how much is read.
        if bool((counts < 0).any()) or int(counts.sum(dtype=torch.int64)) != len(values):
            raise self._damaged(f"its counts do not add up to the {len(values)} elements that it has")
        ends = torch.zeros(len(counts) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, dtype=torch.int64, out=ends[1:])
        found = SparseRows(self.size, ends, offsets, values)
        if not self._checked:
            self._check(found)
            self._checked.add(True)
        return found

    def _check(self, found: "SparseRows") -> None:
        places, total = found.offsets.numpy(), numel(self.size)
        for block, (start, stop) in enumerate(pairwise(found.ends.tolist())):
            these = places[start:stop]
            if not (these[1:] > these[:-1]).all():
                raise self._damaged(f"its positions in block {block} are not in order, or not each there once")
            if len(these) and block * BLOCK + int(these[-1]) >= total:
                raise self._damaged(f"a position in block {block} is beyond its {total} elements")

    def _damaged(self, how: str) -> CorruptFileError:
        return CorruptFileError(f"{self.name} is damaged: {how}. Download or save the vector again.")

    @override
    def read(self) -> torch.Tensor:
        whole = torch.zeros(self.size, dtype=self.dtype, device="cpu")
        self.readable().scatter(whole.view(-1), 0)
        return whole

    @property
    @override
    def identity(self) -> str:
        return f"sparse{list(self.size)}({','.join(each.identity for each in self._stored)})"

    @cached_property
    @override
    def handle(self) -> str:
        return f"sparse{list(self.size)}({','.join(each.handle for each in self._stored)})"

    @property
    @override
    def roots(self) -> tuple[Source, ...]:
        return tuple(root for each in self._stored for root in each.roots)


@dataclass(frozen=True, eq=False)
class SparseRows(RowReader):
    """A sparse tensor that is open: any of its rows, with its zeros.

    Args:
        size (`tuple` of `int`):
            Its shape.
        ends (`torch.Tensor`):
            64 bits each: 0, and how many elements are kept up to the end of each block.
        offsets (`torch.Tensor`):
            Where they stand in their blocks.
        values (`torch.Tensor`):
            What they are.
    """

    size: tuple[int, ...]
    ends: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.size

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @override
    def rows(self, start: int, stop: int, number: int = 0) -> torch.Tensor:
        size = (stop - start, *self.size[1:])
        out = buffer(Slot.ROWS, size, self.dtype, self.device, number).zero_()
        self.scatter(out.view(-1), start * numel(self.size[1:]))
        return out

    def scatter(self, out: torch.Tensor, first: int) -> None:
        """Write what is kept of the elements from `first` on to `out`, which is all zeros."""
        last = min(first + out.numel(), numel(self.size))
        start, stop = first // BLOCK, -(-last // BLOCK)
        if numel(self.size) >= _LEAST and can_compile() and start < stop:
            stored = (each.data_ptr() for each in (self.ends[start:], self.offsets, self.values, out))
            scattering_code(self.dtype.itemsize)(stop - start, *stored, start * BLOCK - first, out.numel())
            return
        for block, (begin, end) in enumerate(pairwise(self.ends[start : stop + 1].tolist()), start):
            found = self.offsets[begin:end].to(torch.int64) + (block * BLOCK - first)
            inside = (found >= 0) & (found < out.numel())
            out[found[inside]] = self.values[begin:end][inside]
