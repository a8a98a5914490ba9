"""Tensors that are read when used: the leaves of every expression.

A `Source` knows its shape and dtype without touching its data. `read` gives the tensor, usually a view over a
memory-mapped file, which must never be written to. Two sources are equal if they stand for the same stored tensor;
that is how like terms are found without reading anything.
"""

import dataclasses
import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from typing_extensions import override

from hf_taskvec.algebra.digests import TAG, tag_of, tensor_digest
from hf_taskvec.errors import MismatchError, some
from hf_taskvec.threads import workers

_SAMPLE = 4096  # bytes at the start, the middle and the end of a tensor that enter a fingerprint

_RUN = 1 << 19  # elements that are hashed or compared at a time


class RowReader(ABC):
    """A tensor whose rows are made when they are asked for: no more than those are in memory."""

    #: where the rows are made
    device = torch.device("cpu")

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, of at least one dimension."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""

    @abstractmethod
    def rows(self, start: int, stop: int, number: int = 0) -> torch.Tensor:
        """Rows `start:stop`, in memory of this thread that the next call with this number writes over."""


#: a tensor, or what gives its rows
Readable = torch.Tensor | RowReader


def rows_of(tensor: Readable, start: int, stop: int, number: int = 0) -> torch.Tensor:
    """Rows `start:stop` of a tensor; a scalar is its own row.

    Args:
        tensor (`Readable`):
            What `Source.readable` gave.
        start (`int`):
            The first row.
        stop (`int`):
            The row after the last.
        number (`int`, *optional*, defaults to 0):
            Tensors whose rows are used at the same time need numbers of their own.
    """
    if isinstance(tensor, RowReader):
        return tensor.rows(start, stop, number)
    return tensor[start:stop] if tensor.ndim else tensor


def runs_of_elements(tensor: Readable, size: int) -> Iterator[torch.Tensor]:
    """All elements in the order in which they are stored, `size` at a time, to be used at once; the last may be fewer.

    Args:
        tensor (`Readable`):
            What `Source.readable` gave.
        size (`int`):
            How many elements.

    Example:
        >>> [run.tolist() for run in runs_of_elements(torch.arange(5), 2)]
        [[0, 1], [2, 3], [4]]

    """
    if isinstance(tensor, torch.Tensor):
        yield from torch.split(tensor.detach().contiguous().view(-1), size)
        return
    count, width = tensor.shape[0], numel(tensor.shape[1:])
    step = max(1, size // max(1, width))
    rest = torch.empty(0, dtype=tensor.dtype, device="cpu")
    for start in range(0, count, step):
        rows = tensor.rows(start, min(start + step, count)).reshape(-1)
        whole, *others = torch.split(torch.cat([rest, rows]) if len(rest) else rows.clone(), size)
        for run in others:
            yield whole
            whole = run
        if len(whole) == size:
            yield whole
            whole = whole[:0]
        rest = whole
    if len(rest) or not count * width:
        yield rest


class Source(ABC):
    """A tensor that is read when used."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""

    @abstractmethod
    def read(self) -> torch.Tensor:
        """The tensor, on the CPU. Read-only: it may be a view over a mapped file."""

    def readable(self) -> "Readable":
        """The tensor, or what gives some of its rows where it is not stored as they are: for `rows_of`."""
        return self.read()

    def sampled(self) -> bytes:
        """Some bytes of it; see `samples`."""
        return samples(self.read())

    @property
    def identity(self) -> str:
        """A text that is the same only for the same content."""
        return tensor_digest(self.read())

    @cached_property
    def handle(self) -> str:
        """A text that only equal sources share, for which nothing is read. What is in no file has one of its own."""
        return uuid.uuid4().hex

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor's elements."""
        return numel(self.shape) * self.dtype.itemsize

    @property
    def roots(self) -> "tuple[Source, ...]":
        """The stored tensors that this source is a view of (itself, if it is not a view)."""
        return (self,)

    @property
    def is_collective(self) -> bool:
        """Whether several processes have to read it together, in one order, and so on one thread."""
        return False


def numel(shape: Sequence[int]) -> int:
    """The number of elements of a shape (1 for a scalar)."""
    count = 1
    for size in shape:
        count *= size
    return count


def are_rows(index: range | tuple[int, ...], count: int) -> bool:
    """Whether these are different rows of a tensor of `count` rows; neither number costs time or memory.

    >>> are_rows((0, 2), 3), are_rows((0, 0), 3), are_rows(range(1, 10**18), 3)
    (True, False, False)
    """
    if isinstance(index, range):
        return index.step == 1 and (not index or (index.start >= 0 and index.stop <= count))
    if not all(isinstance(row, Integral) and not isinstance(row, bool) for row in index):
        return False
    return not index or (min(index) >= 0 and max(index) < count and len(set(index)) == len(index))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes, without a copy if it is contiguous."""
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def samples(tensor: torch.Tensor) -> bytes:
    """The first, middle and last bytes of a tensor: enough to tell another model, not another element."""
    data = tensor_bytes(tensor.detach())
    return b"".join(data[start:stop] for start, stop in sampled_places(tensor.numel(), tensor.element_size()))


def sampled_places(elements: int, size: int) -> list[tuple[int, int]]:
    """Where `samples` takes bytes of a tensor of so many elements of a size."""
    count = _SAMPLE // size
    middle = max(0, elements // 2 - count // 2)
    pieces = ((0, count), (middle, middle + count), (max(0, elements - count), elements))
    return [(start * size, min(stop, elements) * size) for start, stop in pieces]


def describe(value: object, leaf: Callable[[Source], str] = lambda source: source.identity) -> str:
    """A value over sources as a text that is the same only for what reads the same: how expressions are fingerprinted.

    Fields that do not take part in comparing a value (functions, caches) do not take part here.

    Args:
        value (`object`):
            A source, or tuples and dataclasses down to sources and plain values.
        leaf (`Callable`, *optional*):
            What stands for a source: by default its `identity`, for which it is read.
    """
    if isinstance(value, Source):
        return leaf(value)
    if isinstance(value, tuple):
        return "(" + ",".join(describe(each, leaf) for each in value) + ")"
    if dataclasses.is_dataclass(value):
        compared = (each.name for each in dataclasses.fields(value) if each.compare)
        return f"{type(value).__name__}({','.join(describe(getattr(value, name), leaf) for name in compared)})"
    return repr(value)


def handle_of(source: Source) -> str:
    """The source's `handle`: what `describe` takes where nothing shall be read."""
    return source.handle


def sampled_fingerprint(tensors: Mapping[str, Source]) -> str:
    """A digest of names, shapes, dtypes and samples of every tensor."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        source = tensors[name]
        digest.update(f"{name}|{list(source.shape)}|{source.dtype}|".encode())
        digest.update(source.sampled())
    return digest.hexdigest()


def full_digest(tensors: Mapping[str, Source], like: str = TAG) -> str:
    """A digest of names, shapes, dtypes and every byte of every tensor. All of them are read, on several threads.

    Args:
        tensors (`Mapping[str, Source]`):
            Name -> tensor.
        like (`str`, *optional*):
            A digest that it is to be compared with: see `tensor_digest`.
    """
    digest, names = hashlib.sha256(), sorted(tensors)
    with workers(1 if any(source.is_collective for source in tensors.values()) else None) as run:
        contents = run(lambda each: tensor_digest(tensors[each].read(), like), names)
        for name, content in zip(names, contents, strict=True):
            digest.update(f"{name}|{list(tensors[name].shape)}|{tensors[name].dtype}|{content}\n".encode())
    return tag_of(like) + digest.hexdigest()


def same_bytes(tensors: Mapping[str, Source], others: Mapping[str, Source]) -> bool:
    """Whether two models have the same names, shapes, dtypes and bytes. What is the same file is not read."""
    if tensors.keys() != others.keys():
        return False
    pairs = [(source, others[name]) for name, source in tensors.items()]
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in pairs):
        return False
    with workers() as run:
        return all(run(_have_same_bytes, (pair for pair in pairs if pair[0] != pair[1])))


def _have_same_bytes(pair: tuple[Source, Source]) -> bool:
    runs = zip(*(runs_of_elements(source.readable(), _RUN) for source in pair), strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in runs)


@dataclass(frozen=True, eq=False)
class InMemory(Source):
    """A tensor that already is in memory. The vector owns it: nobody else may write to it."""

    tensor: torch.Tensor

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @override
    def read(self) -> torch.Tensor:
        return self.tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InMemory) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


@dataclass(frozen=True)
class View(Source):
    """A stored tensor seen in another form: what a subclass does not say is the stored tensor's."""

    source: Source

    @property
    @abstractmethod
    def place(self) -> str:
        """What of it is seen, as a text: with the stored tensor's own it tells this view from any other."""

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    @override
    def identity(self) -> str:
        return f"{self.source.identity}{self.place}"

    @cached_property
    @override
    def handle(self) -> str:
        return f"{self.source.handle}{self.place}"

    @property
    @override
    def roots(self) -> tuple[Source, ...]:
        return self.source.roots

    @property
    @override
    def is_collective(self) -> bool:
        return self.source.is_collective


@dataclass(frozen=True)
class Transposed(View):
    """The transpose of a stored matrix, as a view."""

    def __post_init__(self) -> None:
        if len(self.source.shape) != 2:
            raise MismatchError(f"only a matrix has a transpose, not a tensor of shape {list(self.source.shape)}.")

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[::-1]

    @override
    def read(self) -> torch.Tensor:
        return self.source.read().t()

    @property
    @override
    def place(self) -> str:
        return ".T"


def runs_without(rows: int, left_out: Iterable[int]) -> list[range]:
    """All rows of a tensor but for some, in runs of neighbours.

    >>> runs_without(6, [4, 2, 9])
    [range(0, 2), range(3, 4), range(5, 6)]
    """
    stops = sorted({row for row in left_out if row < rows})
    runs = (range(before + 1, stop) for before, stop in zip([-1, *stops], [*stops, rows], strict=True))
    return [run for run in runs if run]


@dataclass(frozen=True)
class RowsOf(View):
    """Some rows of a stored tensor: a free view for a `range`, a small copy for scattered indices."""

    index: range | tuple[int, ...]

    def __post_init__(self) -> None:
        rows = self.source.shape[0] if self.source.shape else 0
        if not are_rows(self.index, rows):
            raise MismatchError(
                f"rows {some(map(str, self.index))} are not all within the {rows} rows of a tensor, or not each there "
                "once."
            )

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return (len(self.index), *self.source.shape[1:])

    @override
    def read(self) -> torch.Tensor:
        found = self.readable()
        return found if isinstance(found, torch.Tensor) else found.rows(0, len(self.index)).clone()

    @override
    def readable(self) -> Readable:
        if not isinstance(self.index, range):
            return self._gathered
        opened = self.source.readable()
        if isinstance(opened, RowReader):
            return _RunOfRows(opened, self.index)
        return opened[self.index.start : self.index.stop]

    @cached_property
    def _gathered(self) -> torch.Tensor:
        opened = self.source.readable()
        if isinstance(opened, torch.Tensor):
            return opened[list(self.index)]
        rows = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for position, row in enumerate(self.index):
            rows[position] = opened.rows(row, row + 1)[0]
        return rows

    @property
    @override
    def place(self) -> str:
        return f"[{self.index}]"


@dataclass(frozen=True)
class _RunOfRows(RowReader):
    """Neighbouring rows of a tensor whose rows are made when they are asked for."""

    whole: RowReader
    index: range

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return (len(self.index), *self.whole.shape[1:])

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @override
    def rows(self, start: int, stop: int, number: int = 0) -> torch.Tensor:
        return self.whole.rows(self.index.start + start, self.index.start + stop, number)
