"""Changes that are computed from other changes whenever they are read: what a merging rule makes of many vectors.

Nothing is computed when such a change is made, and no whole parameter is held while it is used. `ComputedElements` are
an expression over the elements, `ComputedTiles` a function of tiles; `Factored` holds factors that need all of a
parameter at once (a decomposition), the last few of them.
"""

import hashlib
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from typing_extensions import override

from hf_taskvec.algebra.deltas import Delta, DeltaWriter, Dense
from hf_taskvec.algebra.elementwise import Element
from hf_taskvec.algebra.formulas import Formula, FormulaBuilder
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.sources import Source, describe, handle_of, numel
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.threads import one_thread

Terms = tuple[Term, ...]

# Elements that a rule works on at a time: what it needs for several vectors then stays near a core, and threads work in
# torch more than they wait for each other in Python.
_PIECE = 1 << 18


def _pieces(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The runs of rows that are worked on at a time, as far as rows `start:stop` reach into them.

    They depend on the shape alone: whichever rows are asked for, a rule gets the same pieces.
    """
    step = max(1, _PIECE // max(1, numel(shape[1:])))
    length = shape[0] if shape else 1
    for first in range(start - start % step, stop, step):
        yield first, min(first + step, length)


_free = threading.local()


@contextmanager
def borrowed(count: int, size: tuple[int, ...], dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    """Some tensors, uninitialised, of memory that this thread uses again and again.

    Fresh memory for each piece goes back to the system with every piece, and costs more than what is computed in it.
    What is larger than a piece is not kept.
    """
    elements = numel(size)
    free: list[torch.Tensor] = _free.__dict__.setdefault(str(dtype), [])
    with torch.inference_mode(False):  # what inference mode makes cannot be written to outside of it
        memory = [
            free.pop() if free and elements <= _PIECE else torch.empty(max(elements, _PIECE), dtype=dtype, device="cpu")
            for _ in range(count)
        ]
    try:
        yield [each[:elements].view(size) for each in memory]
    finally:
        free.extend(each for each in memory if each.numel() == _PIECE)


class Tiles:
    """A change of one parameter, piece by piece: what the functions of merging rules read."""

    def __init__(self, terms: Terms) -> None:
        self.shape = terms[0].delta.shape
        self._sum = Sum(self.shape, terms)

    @property
    def dtype(self) -> torch.dtype:
        """What is needed to add the change up: fp32 for the difference of two stored 16-bit tensors, else fp64."""
        return torch.float32 if self._sum.is_short else torch.float64

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows `start:stop`, a tensor of its own that may be written to."""
        return self._sum.rows(start, stop, dtype)

    def rows_into(self, out: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop`, written to `out`."""
        return self._sum.rows_into(out, start, stop)

    def element(self, build: FormulaBuilder) -> Element | None:
        """The change as an expression, if it is one of stored tensors alone."""
        return self._sum.element(build)

    @kept_subnormals()
    def count_magnitudes(self, first: int, shift: int, bins: int) -> torch.Tensor:
        """A histogram of the elements' magnitudes, in fp32, whose bits are in the order of the numbers.

        Args:
            first (`int`):
                The bits of the first number of the first bin.
            shift (`int`):
                A bin has two to the power of this many numbers.
            bins (`int`):
                How many there are; what is in none of them is not counted.

        Returns:
            `torch.Tensor`: How many elements are in each, int64.
        """
        histogram = torch.zeros(bins + 4, dtype=torch.int64, device="cpu")
        histogram[:3] = torch.tensor([first, shift, bins], device="cpu")
        build = FormulaBuilder(self.dtype)
        element = self.element(build)
        length = self.shape[0] if self.shape else 1
        if element is not None and build.formula(element).count(histogram, 0, length):
            return histogram[3:-1]
        one = FormulaBuilder(torch.float32)
        tile = one.formula(one.made())
        for start, stop in _pieces(self.shape, 0, length):
            size = (stop - start, *self.shape[1:]) if self.shape else ()
            with borrowed(1, size, self.dtype) as (piece,):
                rows = self.rows_into(piece, start, stop).float()
                if not tile.count(histogram, 0, 0, [rows]):
                    places = (rows.abs().view(torch.int32).flatten() - first).bitwise_right_shift_(shift)
                    inside = places[(places >= 0) & (places < bins)]
                    histogram[3:-1] += torch.bincount(inside, minlength=bins)
        return histogram[3:-1]


Statistic = Callable[[Tiles], Any]
TileFunction = Callable[[list[torch.Tensor], list[Any], int], torch.Tensor]
ElementFunction = Callable[[FormulaBuilder, list[Element], list[Any]], Element]


@dataclass(frozen=True)
class Computed(Delta):
    """A change that is a function of others, element by element. Its numbers are fp32, wherever it is used.

    They are computed in fp32 if all vectors are differences of 16-bit models, whose weights have fewer bits to round to
    in the end; in fp64 and rounded once otherwise.

    Args:
        name (`str`):
            The parameter's.
        inputs (`tuple` of tuples of `Term`):
            The changes that it is computed from, one or more terms each.
        key (`str`):
            What the function does, with its parameters; two changes are equal if inputs and key are.
        statistics (`tuple` of callables):
            For each input, a function that finds something about it as a whole, such as a threshold. It is called when
            first needed, and what it gives is kept. None at all if nothing has to be found.
    """

    name: str
    inputs: tuple[Terms, ...]
    key: str
    statistics: tuple[Statistic, ...] = field(compare=False, repr=False)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.inputs[0][0].delta.shape

    @property
    @override
    def sources(self) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(s for terms in self.inputs for term in terms for s in term.delta.sources))

    @property
    @override
    def is_single(self) -> bool:
        return True

    @override
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any]:
        if writer.reference:
            raise UnsupportedError(
                f"{name} is computed by a merging rule, so no file can be referred to. Save the vector without "
                "reference=True."
            )
        return {"kind": Dense.kind, "parts": writer.rounded(key, name, self)}

    @override
    def __reduce__(self) -> NoReturn:
        raise _not_pickled()

    @cached_property
    def _tiles(self) -> list[Tiles]:
        return [Tiles(terms) for terms in self.inputs]

    @cached_property
    def _found(self) -> "list[_Once]":
        return [_Once(find, tiles) for find, tiles in zip(self.statistics, self._tiles, strict=True)]

    def _wait_for_statistics(self) -> list[Any]:
        """Threads that need the same statistics share the work: each takes an input that no other has taken."""
        if not self.statistics:
            return [None] * len(self.inputs)
        for once in self._found:
            once.start()
        return [once.wait() for once in self._found]

    @abstractmethod
    def _merged(self, first: int, last: int) -> AbstractContextManager[torch.Tensor]:
        """Rows `first:last`, one of the pieces, in fp32."""

    @property
    def _precision(self) -> torch.dtype:
        return max((tiles.dtype for tiles in self._tiles), key=lambda dtype: dtype.itemsize)

    def _size(self, first: int, last: int) -> tuple[int, ...]:
        return (last - first, *self.shape[1:]) if self.shape else ()

    def _check_finite(self, rows: torch.Tensor) -> None:
        if not rows.sum().isfinite() and not rows.isfinite().all():
            raise not_finite(self.name)

    @override
    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        for first, last in _pieces(self.shape, start, stop):
            with self._merged(first, last) as rows:
                low, high = max(first, start), min(last, stop)
                there, found = (
                    (out[low - start : high - start], rows[low - first : high - first]) if self.shape else (out, rows)
                )
                if out.dtype == torch.float32:  # `Sum` asks for it with whole weights only, which keep all bits
                    there.add_(found.to(out.device), alpha=weight)
                else:  # the product rounded first, as for a stored change: the same bits
                    there.add_(found.to(out).mul_(weight))


@dataclass(frozen=True)
class ComputedTiles(Computed):
    """A change that a function computes from the inputs' tiles.

    Args:
        function (`Callable`):
            Gets the inputs' tiles (which it may write to), their statistics, and the tile's first row; gives the
            result's tile.
    """

    function: TileFunction = field(compare=False, repr=False)

    @override
    @contextmanager
    def _merged(self, first: int, last: int) -> Iterator[torch.Tensor]:
        statistics = self._wait_for_statistics()
        with borrowed(len(self._tiles), self._size(first, last), self._precision) as memory:
            inputs = [tiles.rows_into(tile, first, last) for tiles, tile in zip(self._tiles, memory, strict=True)]
            rows = self.function(inputs, statistics, first).float()
            self._check_finite(rows)
            yield rows


@dataclass(frozen=True)
class ComputedElements(Computed):
    """A change that is an elementwise expression of the inputs: one pass over what is stored.

    Args:
        element (`Callable`):
            Gets a builder, the inputs' elements and their statistics; gives the result's element.
    """

    element: ElementFunction = field(compare=False, repr=False)

    @cached_property
    def _formula(self) -> tuple[Formula, tuple[Tiles, ...]]:
        """The expression, and those of the inputs that have to be made tile by tile for it."""
        build = FormulaBuilder(self._precision)
        found = [tiles.element(build) for tiles in self._tiles]
        made = tuple(tiles for tiles, element in zip(self._tiles, found, strict=True) if element is None)
        elements = [build.made() if element is None else element for element in found]
        return build.formula(self.element(build, elements, self._wait_for_statistics())), made

    @override
    @contextmanager
    def _merged(self, first: int, last: int) -> Iterator[torch.Tensor]:
        formula, tiles = self._formula
        size = self._size(first, last)
        with borrowed(len(tiles), size, self._precision) as memory, borrowed(1, size, torch.float32) as (rows,):
            made = [each.rows_into(tile, first, last) for each, tile in zip(tiles, memory, strict=True)]
            if not formula.write(rows, first, last, made):
                rows.copy_(formula.rows(first, last, made))
                self._check_finite(rows)
            yield rows


def _not_pickled() -> UnsupportedError:
    return UnsupportedError(
        "the vector is computed by a merging rule, or drawn as noise in factors, when it is used: functions do so, "
        "which cannot be pickled. Save the vector to a folder and load it where it is needed, or send the vectors that "
        "it is made of and combine() them there."
    )


class _Once:
    """A statistic that one thread finds and all others get."""

    def __init__(self, find: Statistic, tiles: Tiles) -> None:
        self._find, self._tiles = find, tiles
        self._lock = threading.Lock()
        self._found: tuple[Any] | None = None

    def start(self) -> None:
        """Find it, unless another thread is doing so."""
        if self._found is None and self._lock.acquire(blocking=False):
            try:
                self._found = self._found or (self._find(self._tiles),)
            finally:
                self._lock.release()

    def wait(self) -> Any:
        with self._lock:
            # If the other thread failed, nothing was found: trying again raises the same error here.
            self._found = self._found or (self._find(self._tiles),)
        return self._found[0]


# Bytes of computed factors that are kept: those of all of a model's adapters, or of a few dense matrices.
_KEPT = 1 << 28
_recent: "list[weakref.ref[Factored]]" = []  # those that hold their factors, the last used at the end
_recent_lock = threading.Lock()


@dataclass(frozen=True)
class Factored:
    """A computation that gives two factors, or a whole tensor, from the changes of one parameter.

    It holds them while they, and all factors used since, take no more than `_KEPT` bytes.

    Args:
        inputs (`tuple` of tuples of `Term`):
            The changes that they are computed from.
        key (`str`):
            What the function does, with its parameters.
        shapes (`tuple` of shapes):
            Those of the left and the right factor, or of the tensor, known beforehand.
        function (`Callable`):
            Gives them; they are kept in fp32.
    """

    inputs: tuple[Terms, ...]
    key: str
    shapes: tuple[tuple[int, ...], ...]
    function: Callable[[], tuple[torch.Tensor, ...]] = field(compare=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, compare=False, repr=False, init=False)
    _held: list[tuple[torch.Tensor, ...]] = field(default_factory=list, compare=False, repr=False, init=False)

    @override
    def __reduce__(self) -> NoReturn:
        raise _not_pickled()

    def compute(self) -> tuple[torch.Tensor, ...]:
        """All of them, computed unless they are still held."""
        with self._lock:
            held = self._held[:]  # another thread may free it
            result = held[0] if held else self._computed()
            assert tuple(tuple(factor.shape) for factor in result) == self.shapes
            self._held[:] = [result]
        _drop_oldest_but(self)
        return result

    @one_thread()
    @kept_subnormals()
    def _computed(self) -> tuple[torch.Tensor, ...]:
        return tuple(factor.float().contiguous() for factor in self.function())

    @property
    def nbytes(self) -> int:
        """The bytes that they take."""
        return sum(4 * numel(shape) for shape in self.shapes)

    @property
    def factors(self) -> tuple["Factor", "Factor"]:
        """The left and the right factor, computed when they are read."""
        return Factor(self, 0), Factor(self, 1)

    @property
    def tensor(self) -> "Factor":
        """The tensor, where it is one, computed when it is read."""
        return Factor(self, 0)


def _drop_oldest_but(used: Factored) -> None:
    """Free the factors that were not used for the longest time, if all together take more than `_KEPT` bytes."""
    with _recent_lock:
        others = [each for ref in reversed(_recent) if (each := ref()) is not None and each is not used]
        left, kept = _KEPT - used.nbytes, [used]
        for each in others:
            left -= each.nbytes
            if left >= 0:
                kept.append(each)
            else:
                each._held.clear()
        _recent[:] = [weakref.ref(each) for each in reversed(kept)]


@dataclass(frozen=True)
class Factor(Source):
    """One of the factors, or the tensor, that a computation gives."""

    of: Factored
    part: int

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.of.shapes[self.part]

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.float32

    @override
    def read(self) -> torch.Tensor:
        return self.of.compute()[self.part]

    @property
    @override
    def identity(self) -> str:
        return f"{hashlib.sha256(describe(self.of).encode()).hexdigest()}.{self.part}"

    @cached_property
    @override
    def handle(self) -> str:
        return f"{describe(self.of, handle_of)}.{self.part}"

    @property
    @override
    def roots(self) -> tuple[Source, ...]:
        every = (s for terms in self.of.inputs for term in terms for s in term.delta.sources)
        return tuple(dict.fromkeys(root for source in every for root in source.roots))
