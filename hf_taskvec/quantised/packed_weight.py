"""A weight that is stored in fewer bits: several stored tensors, of which rows of the weight are made when asked for.

All formats but GGUF say the same: `weight = (code - zero) * scale`, where a block of the weight shares a scale, and a
zero if there is one. They differ in where the codes lie, and in which elements make a block. So a format is one small
subclass of `ScaledWeight`, which reads codes, scales and zeros of some rows and writes them, and nothing else.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import torch
from typing_extensions import override

from hf_taskvec.algebra.rounding import dtype_name
from hf_taskvec.algebra.sources import RowReader, Source, numel, sampled_places, tensor_bytes
from hf_taskvec.algebra.tiles import TILE
from hf_taskvec.errors import CorruptFileError, MismatchError

#: role of a stored tensor in its format -> the tensor, open
Opened = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class PackedWeight(Source):
    """A weight that is computed of several stored tensors.

    Args:
        name (`str`):
            What the weight is called in its files, and in errors.
        size (`tuple` of `int`):
            Its shape.
        kept_as (`torch.dtype`):
            The dtype that transformers gives it when it is loaded without quantisation.
        parts (`tuple` of `tuple[str, str, Source]`):
            For each stored tensor its role in the format, its name in the files, and itself.
    """

    name: str = field(compare=False)
    size: tuple[int, ...]
    kept_as: torch.dtype
    parts: tuple[tuple[str, str, Source], ...]
    _checked: set[bool] = field(default_factory=set, compare=False, repr=False, kw_only=True)

    @property
    @abstractmethod
    def format_name(self) -> str:
        """What the format is called, in messages and records."""

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.size

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.kept_as

    @property
    @override
    def nbytes(self) -> int:
        return sum(each.nbytes for _, _, each in self.parts)

    @property
    @override
    def identity(self) -> str:
        return self._described(tuple(each.identity for _, _, each in self.parts))

    @cached_property
    @override
    def handle(self) -> str:
        return self._described(tuple(each.handle for _, _, each in self.parts))

    @property
    @override
    def roots(self) -> tuple[Source, ...]:
        return tuple(root for _, _, each in self.parts for root in each.roots)

    def _described(self, parts: tuple[str, ...]) -> str:
        own = (each.name for each in fields(self) if each.compare and each.name != "parts")
        return f"{self.format_name}{[str(getattr(self, each)) for each in own]}({','.join(parts)})"

    def part(self, role: str) -> Source | None:
        """The stored tensor of that role, if the weight has one."""
        return next((each for found, _, each in self.parts if found == role), None)

    def part_name(self, role: str) -> str:
        """The name in the files of the tensor of that role."""
        return next(name for found, name, _ in self.parts if found == role)

    @override
    def readable(self) -> "PackedRows":
        opened = {role: each.read() for role, _, each in self.parts}
        if not self._checked:
            self.check(opened)
            self._checked.add(True)
        return PackedRows(self, opened)

    @override
    def read(self) -> torch.Tensor:
        whole, opened = torch.empty(self.size, dtype=self.dtype, device="cpu"), self.readable()
        for start, stop in self.runs():
            whole[start:stop] = opened.rows(start, stop)
        return whole

    @override
    def sampled(self) -> bytes:
        opened, width, size = self.readable(), max(1, numel(self.size[1:])), self.dtype.itemsize
        found = []
        for first, last in sampled_places(numel(self.size), size):  # no other rows are made than those
            start = first // (width * size)
            rows = opened.rows(start, -(-last // (width * size)))
            found.append(tensor_bytes(rows)[first - start * width * size : last - start * width * size])
        return b"".join(found)

    @property
    def row_unit(self) -> int:
        """How many rows are stored together: those that share scales, or words."""
        return 1

    def runs(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows of about a tile, none of which cuts rows that are stored together."""
        rows, unit = self.size[0], self.row_unit
        step = max(1, TILE // max(1, numel(self.size[1:])) // unit) * unit
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def check(self, opened: Opened) -> None:
        """Refuse stored tensors whose content makes no sense, when they are opened for the first time."""

    @abstractmethod
    def unpack(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop` of the weight, in its dtype."""


@dataclass(frozen=True, eq=False)
class PackedRows(RowReader):
    """A packed weight that is open: any of its rows."""

    weight: PackedWeight
    opened: Opened

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.weight.size

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @override
    def rows(self, start: int, stop: int, number: int = 0) -> torch.Tensor:
        return self.weight.unpack(self.opened, start, stop)


class Levels(NamedTuple):
    """The codes that a format has: equal steps from `low` to `high`, or small floating numbers."""

    low: float
    high: float
    #: where they are floating numbers: what they are stored as
    floats: torch.dtype | None = None
    #: and half the step to what would be the next one, in parts of the largest
    half_step: float = 0.0


class Grid(NamedTuple):
    """Which elements share a scale: blocks of so many rows and columns, the last of which may be smaller.

    With `groups`, each column is in the group that it tells, and `columns` does not count.
    """

    rows: int
    columns: int
    groups: torch.Tensor | None = None

    def spread(self, values: torch.Tensor, like: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """A number of each block as one of each element (or what broadcasts to that); `offset` rows are left out."""
        found = values
        if self.groups is not None:
            found = found[..., self.groups]
        elif found.shape[-1] > 1 and self.columns > 1:
            found = found.repeat_interleave(self.columns, -1)[..., : like[-1]]
        if found.shape[-2] > 1 and self.rows > 1:
            found = found.repeat_interleave(self.rows, -2)
        return found[..., offset : offset + like[-2], :] if found.shape[-2] > 1 else found

    def extremes(self, rows: torch.Tensor, across: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and highest number of each block, or 0; `across` says how many blocks lie side by side."""
        if self.groups is not None:
            index = self.groups.expand(rows.shape)
            made = [rows.new_zeros(*rows.shape[:-1], across) for _ in range(2)]
            low, high = (
                each.scatter_reduce_(-1, index, rows, how) for each, how in zip(made, ("amin", "amax"), strict=True)
            )
        else:
            wide = torch.nn.functional.pad(rows, (0, across * self.columns - rows.shape[-1]))
            low, high = wide.unflatten(-1, (across, self.columns)).aminmax(dim=-1)
        if self.rows > 1:
            count = -(-rows.shape[-2] // self.rows)
            missing = (0, 0, 0, count * self.rows - rows.shape[-2])
            low, high = (torch.nn.functional.pad(each, missing) for each in (low, high))
            low = low.unflatten(-2, (count, self.rows)).amin(dim=-2)
            high = high.unflatten(-2, (count, self.rows)).amax(dim=-2)
        return low.clamp(max=0.0), high.clamp(min=0.0)


class Scales(NamedTuple):
    """The stored scales of some blocks in fp32, and their zeros if the format has such."""

    scales: torch.Tensor
    zeros: torch.Tensor | None

    def of_outputs(self, weight: "ScaledWeight", first: int, last: int) -> "Scales":
        """Those of a part of the outputs, which begins with a block; of a matrix all."""
        if len(weight.size) == 2:
            return self
        some = slice(first // weight.grid.rows, -(-last // weight.grid.rows))
        return Scales(self.scales[:, some], None if self.zeros is None else self.zeros[:, some])


class StoredPiece(NamedTuple):
    """Elements of a stored tensor: some of its rows, or of all its rows some columns."""

    role: str
    elements: torch.Tensor
    start: int
    is_columns: bool = False


class ScaledWeight(PackedWeight):
    """A packed weight of the form `(code - zero) * scale`."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """Which elements share a scale."""

    @property
    @abstractmethod
    def levels(self) -> Levels:
        """Which codes there are."""

    @property
    @abstractmethod
    def product_dtype(self) -> torch.dtype:
        """The dtype in which the format's own library has scales and makes products, before it converts those."""

    def in_use(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales as they are multiplied with, in fp32."""
        return scales.to(self.product_dtype).float()

    @property
    def scales_dtype(self) -> torch.dtype:
        """What new scales have to be rounded to."""
        found = self.part("scales")
        assert found is not None
        return found.dtype

    @property
    def is_whole(self) -> bool:
        """Whether all rows of a matrix share their scales."""
        return len(self.size) == 2 and self.grid.rows >= self.size[0]

    @property
    @override
    def row_unit(self) -> int:
        return 1 if self.is_whole or len(self.size) > 2 else self.grid.rows

    def parts_of_rows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of outputs, of about a tile: of experts, each of which is one row here. All of them of a matrix."""
        inputs, outputs = self.size[-1], self.size[-2] if len(self.size) > 2 else stop - start
        if self.outputs_are_last:
            inputs, outputs = outputs, inputs
        unit = self.grid.rows
        step = max(1, TILE // max(1, inputs * (stop - start)) // unit) * unit
        whole = len(self.size) == 2 or self.grid.groups is not None
        for first in range(0, outputs, outputs if whole else step):
            yield first, outputs if whole else min(first + step, outputs)

    @property
    def outputs_are_last(self) -> bool:
        """Whether the codes lie as the transpose of the weight."""
        return False

    def outputs_first(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as their codes lie; the same function leads back."""
        return rows

    @abstractmethod
    def codes(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        """The codes of rows `start:stop` in fp32, outputs first."""

    @abstractmethod
    def scales(self, opened: Opened, start: int, stop: int) -> Scales:
        """The scales of the blocks that rows `start:stop` are in."""

    @abstractmethod
    def pieces(self, codes: torch.Tensor, found: Scales, start: int) -> Iterator[StoredPiece]:
        """What is stored of whole blocks, from row `start` on, whose codes and scales are given."""

    @override
    def check(self, opened: Opened) -> None:
        scales = opened["scales"]
        if scales.dtype == torch.uint8:
            return  # an exponent: what it leads to is checked with the weights
        if not bool(scales.float().isfinite().all()):
            raise self.damaged("scales", "has scales that are NaN or infinite")

    @override
    def unpack(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        codes, found = self.codes(opened, start, stop), self.scales(opened, start, stop)
        return self.values(codes, found, start % self.grid.rows if self.row_unit > 1 else 0)

    def values(self, codes: torch.Tensor, found: Scales, offset: int = 0) -> torch.Tensor:
        """The weights that codes and scales stand for; `codes` is written over.

        The first block begins `offset` rows before the codes do.
        """
        grid, size = self.grid, tuple(codes.shape)
        if found.zeros is not None:
            codes = codes.sub_(grid.spread(found.zeros, size, offset))
        product = codes.mul_(grid.spread(self.in_use(found.scales), size, offset))
        return self.outputs_first(product.to(self.product_dtype).to(self.dtype)).contiguous()

    def blocks(self, rows: int) -> tuple[int, int]:
        """How many blocks so many rows of a matrix have, from top to bottom and across."""
        return (-(-rows // self.grid.rows), -(-self.size[-1] // self.grid.columns))

    def damaged(self, role: str, how: str) -> CorruptFileError:
        """The error for a stored tensor whose content makes no sense, to be raised by the caller."""
        return CorruptFileError(
            f"{self.part_name(role)} {how}, so {self.name} cannot be read. Download the model again, or ask its author."
        )


def check_part(name: str, source: Source, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], of: str) -> None:
    """Refuse a stored tensor that does not fit the others.

    Raises:
        `MismatchError`: Naming it, what it is, and what it must be.
    """
    if source.dtype in dtypes and source.shape == shape:
        return
    expected = " or ".join(_name(each) for each in dtypes)
    raise MismatchError(
        f"{name} is {_name(source.dtype)} of shape {list(source.shape)}, and must be {expected} of shape {list(shape)} "
        f"for {of}. The file is damaged, or of a variant of the format that is not known: use the model in bf16."
    )


def _name(dtype: torch.dtype | str) -> str:
    return dtype if isinstance(dtype, str) else dtype_name(dtype)
