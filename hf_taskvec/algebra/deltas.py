"""The kinds of change to one parameter: dense, difference, low-rank, rows, DoRA.

A delta is a frozen value over `Source`s. It can add `weight x` its rows to an fp64 accumulator, which is all that
evaluating an expression needs; deltas that are sums of stored tensors also show their `parts`, so that like tensors
can be folded (two fine-tunes of one base read that base once). Whatever else differs between kinds is a method here, so
that a new kind of change is one class.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Protocol

import torch
from typing_extensions import override

from hf_taskvec.algebra.exact_difference import exact_parts
from hf_taskvec.algebra.formulas import sum_formula
from hf_taskvec.algebra.sources import InMemory, RowsOf, Source, are_rows, numel, rows_of
from hf_taskvec.algebra.tiles import tiles_of_shape
from hf_taskvec.errors import CorruptFileError, MismatchError, some
from hf_taskvec.filenames import VECTOR_RECORD
from hf_taskvec.typed_values import typed

# More than any parameter has. A record alone may say what it likes: the rows of a parameter of which some change, or
# factors of rank 0, need no bytes in a file.
_MOST_ELEMENTS = 1 << 36

# Sign and stored tensor, in the order in which they must be added.
Parts = tuple[tuple[int, Source], ...]


class DeltaWriter(Protocol):
    """What a kind of change needs in order to be saved: somewhere to put its tensors.

    `reference` says that the file shall name the tensors' own files instead of holding copies of them.
    """

    reference: bool

    def source(self, key: str, source: Source) -> Any:
        """Have a tensor stored as it is, and get what stands for it in the record."""

    def exact(self, key: str, name: str, delta: "Difference") -> list[Any]:
        """Have a difference stored without loss; what stands for its parts, none if nothing changed."""

    def rounded(self, key: str, name: str, delta: "Delta") -> list[str]:
        """Have a change stored as one dense tensor in the dtype that was asked for, else in fp32."""

    @property
    def rounds(self) -> bool:
        """Whether a dtype was asked for that dense changes are rounded to."""


class Delta(ABC):
    """A change to one parameter."""

    #: what a saved vector calls this kind of change; None for one that is stored as another kind
    kind: ClassVar[str | None] = None
    #: every kind that can be stored, by that name
    kinds: ClassVar[dict[str, "type[Delta]"]] = {}

    def __init_subclass__(cls) -> None:
        if cls.kind is not None:
            Delta.kinds[cls.kind] = cls

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter that is changed."""

    @property
    @abstractmethod
    def sources(self) -> tuple[Source, ...]:
        """Every stored tensor that evaluating the change reads."""

    @property
    def parts(self) -> Parts | None:
        """The change as a sum of sign x stored tensor, in the order in which they must be added; else None.

        What is subtracted comes first: on the vector's own base `(base - base) + tuned` is exact, while
        `base + (tuned - base)` loses a tiny tuned weight next to a large base weight.
        """
        return None

    @property
    def factors(self) -> "LowRank | None":
        """The change as a product of two factors, if it is held so; else None."""
        return None

    @property
    def is_partial(self) -> bool:
        """Whether only some of the parameter's rows are changed, whatever their number."""
        return False

    @property
    def is_single(self) -> bool:
        """Whether the change is made of fp32 numbers that `add_rows` gives as they are, whatever it adds them to."""
        return False

    @property
    def rank(self) -> int:
        """The rank as represented: that of the factors, or the smaller side of a dense matrix."""
        return min(self.shape, default=1) if len(self.shape) > 1 else 1

    @abstractmethod
    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        """Add `weight` times rows `start:stop` of the change to the fp64 tensor `out`."""

    def changes(self, start: int, stop: int) -> bool:
        """Whether anything but zeros may be in rows `start:stop`."""
        return True

    def only_rows(self, kept: tuple[int, ...]) -> "Delta":
        """The change to the rows `kept` alone. Stays lazy where the kind allows it; here it is computed in fp64."""
        change = torch.zeros(self.shape, dtype=torch.float64, device="cpu")
        self.add_rows(change, 0, self.shape[0], 1.0)
        return Rows(kept, Dense((InMemory(change[list(kept)]),)), self.shape[0])

    def owned(self, name: str) -> "Delta | None":
        """The same change sharing no memory with a live model; None if nothing changed in the parameter `name`."""
        raise AssertionError(f"{name}: a {type(self).__name__} is not made from a live model's weights")

    @abstractmethod
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any] | None:
        """The change to the parameter `name` as JSON, its tensors stored under `key`; None if nothing changed."""

    @classmethod
    def from_record(cls, entry: Mapping[str, Any], source: "ReadSource") -> "Delta":
        """The change of this kind that `to_record` described."""
        raise AssertionError(f"{cls.__name__} is stored as another kind of change")


#: from what stands for a tensor in a record to the tensor
ReadSource = Callable[[Any], Source]


def read_delta(entry: Mapping[str, Any], source: ReadSource) -> Delta:
    """The change that a record describes, of whatever kind."""
    kind = entry["kind"]
    if kind not in Delta.kinds:
        raise CorruptFileError(f"{VECTOR_RECORD} has a change of unknown kind {kind!r}. Upgrade hf_taskvec.")
    delta = Delta.kinds[kind].from_record(entry, source)
    if max((numel(delta.shape), *delta.shape)) > _MOST_ELEMENTS:
        raise CorruptFileError(
            f"{VECTOR_RECORD} has a change to a parameter of shape {list(delta.shape)}: no parameter is that large."
        )
    return delta


class _Stored(Delta):
    """A change that is a sum of stored tensors."""

    @property
    @abstractmethod
    def parts(self) -> Parts: ...

    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        # As `Sum` does it: a whole weight multiplies the stored tensors, any other their exact sum.
        opened = [(float(sign), source.readable()) for sign, source in self.parts]
        parts = [(sign, rows_of(each, start, stop, number)) for number, (sign, each) in enumerate(opened)]
        if weight.is_integer():
            whole = sum_formula([(1.0, out), *((sign * weight, tensor) for sign, tensor in parts)])
        else:
            whole = sum_formula([(1.0, out)], [(weight, parts)])
        out.copy_(whole.rows(0, stop - start, device=out.device))


@dataclass(frozen=True)
class Dense(_Stored):
    """A stored change: one tensor, or high and low parts whose exact sum it is."""

    kind = "dense"

    tensors: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not self.tensors or any(part.shape != self.shape for part in self.tensors):
            raise _contradiction("the parts of a dense change", *self.tensors)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.tensors[0].shape

    @property
    @override
    def sources(self) -> tuple[Source, ...]:
        return self.tensors

    @property
    @override
    def parts(self) -> Parts:
        return tuple((1, tensor) for tensor in self.tensors)

    @override
    def only_rows(self, kept: tuple[int, ...]) -> Delta:
        return Rows(kept, Dense(tuple(RowsOf(part, kept) for part in self.tensors)), self.shape[0])

    @override
    def owned(self, name: str) -> Delta:
        return Dense(tuple(InMemory(source.read().clone()) for source in self.tensors))

    @override
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any]:
        if writer.rounds:
            return {"kind": self.kind, "parts": writer.rounded(key, name, self)}
        parts = [writer.source(f"{key}.part{number}", part) for number, part in enumerate(self.tensors)]
        return {"kind": self.kind, "parts": parts}

    @classmethod
    @override
    def from_record(cls, entry: Mapping[str, Any], source: ReadSource) -> Delta:
        return cls(tuple(source(part) for part in entry["parts"]))


@dataclass(frozen=True)
class Difference(_Stored):
    """`tuned - base`, two stored tensors that are read only when used."""

    kind = "difference"

    base: Source
    tuned: Source

    def __post_init__(self) -> None:
        if self.base.shape != self.tuned.shape:
            raise _contradiction("base and fine-tune", self.base, self.tuned)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.tuned.shape

    @property
    @override
    def sources(self) -> tuple[Source, ...]:
        return (self.base, self.tuned)

    @property
    @override
    def parts(self) -> Parts:
        return ((-1, self.base), (1, self.tuned))

    @override
    def only_rows(self, kept: tuple[int, ...]) -> Delta:
        return Rows(kept, Difference(RowsOf(self.base, kept), RowsOf(self.tuned, kept)), self.shape[0])

    @override
    def owned(self, name: str) -> Delta | None:
        parts = exact_parts(self.tuned.readable(), self.base.readable(), name)
        return Dense(parts) if parts else None

    @override
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any] | None:
        if writer.reference:
            return {"kind": self.kind, "base": writer.source(key, self.base), "tuned": writer.source(key, self.tuned)}
        parts = writer.rounded(key, name, self) if writer.rounds else writer.exact(key, name, self)
        return {"kind": Dense.kind, "parts": parts} if parts else None

    @classmethod
    @override
    def from_record(cls, entry: Mapping[str, Any], source: ReadSource) -> Delta:
        return cls(source(entry["base"]), source(entry["tuned"]))


@dataclass(frozen=True)
class LowRank(Delta):
    """`scaling * left @ right`, e.g. LoRA's `B @ A`. The factors are never changed or multiplied out."""

    kind = "low-rank"

    left: Source
    right: Source
    scaling: float = 1.0

    def __post_init__(self) -> None:
        left, right = self.left.shape, self.right.shape
        if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
            raise _contradiction("two factors", self.left, self.right, why="which cannot be multiplied")

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return (self.left.shape[0], self.right.shape[1])

    @property
    @override
    def sources(self) -> tuple[Source, ...]:
        return (self.left, self.right)

    @property
    @override
    def factors(self) -> "LowRank":
        return self

    @property
    @override
    def rank(self) -> int:
        return min(self.left.shape[1], *self.shape)

    @override
    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        out.addmm_(self.left.read()[start:stop].to(out), self.right.read().to(out), alpha=weight * self.scaling)

    @override
    def only_rows(self, kept: tuple[int, ...]) -> Delta:
        left = self.left.read()
        only = torch.zeros_like(left)
        only[list(kept)] = left[list(kept)]
        return LowRank(InMemory(only), self.right, self.scaling)

    @override
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any]:
        left, right = writer.source(f"{key}.left", self.left), writer.source(f"{key}.right", self.right)
        return {"kind": self.kind, "scaling": self.scaling, "left": left, "right": right}

    @classmethod
    @override
    def from_record(cls, entry: Mapping[str, Any], source: ReadSource) -> Delta:
        left, right = source(entry["left"]), source(entry["right"])
        return cls(left, right, typed(float, entry["scaling"], "scaling"))


@dataclass(frozen=True)
class Rows(Delta):
    """A change to some rows of a parameter of `n_rows` rows: trained tokens, or a vocabulary of another size."""

    kind = "rows"

    index: range | tuple[int, ...]
    inner: Delta
    n_rows: int

    def __post_init__(self) -> None:
        rows = self.inner.shape[:1]
        if rows != (len(self.index),) or not are_rows(self.index, self.n_rows):
            raise MismatchError(
                f"a change to rows {some(map(str, self.index))} of {self.n_rows} holds {list(rows)} rows: "
                "they must be as many, within the parameter, and each there once."
            )

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return (self.n_rows, *self.inner.shape[1:])

    @property
    @override
    def sources(self) -> tuple[Source, ...]:
        return self.inner.sources

    @property
    @override
    def is_partial(self) -> bool:
        return True

    @property
    @override
    def rank(self) -> int:
        return self.inner.rank

    @override
    def owned(self, name: str) -> Delta | None:
        inner = self.inner.owned(name)
        return inner and Rows(self.index, inner, self.n_rows)

    @override
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any] | None:
        index = self.index
        rows = {"start": index.start, "stop": index.stop} if isinstance(index, range) else list(index)
        inner = self.inner.to_record(key, name, writer)
        return inner and {"kind": self.kind, "rows": rows, "of": self.n_rows, "change": inner}

    @classmethod
    @override
    def from_record(cls, entry: Mapping[str, Any], source: ReadSource) -> Delta:
        rows = entry["rows"]
        index = range(rows["start"], rows["stop"]) if isinstance(rows, dict) else tuple(rows)
        inner = read_delta(entry["change"], source)
        if isinstance(inner, Rows):
            raise CorruptFileError(f"{VECTOR_RECORD} has rows of a change to rows.")
        return cls(index, inner, int(entry["of"]))

    @override
    def changes(self, start: int, stop: int) -> bool:
        if isinstance(self.index, range):
            return start < self.index.stop and self.index.start < stop
        following = bisect_left(self._in_order, start)
        return following < len(self._in_order) and self._in_order[following] < stop

    @cached_property
    def _in_order(self) -> list[int]:
        return sorted(self.index)

    @override
    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        if isinstance(self.index, range):
            first, last = max(start, self.index.start), min(stop, self.index.stop)
            if first < last:
                offset = self.index.start
                self.inner.add_rows(out[first - start : last - start], first - offset, last - offset, weight)
            return
        inside = [(position, row - start) for position, row in enumerate(self.index) if start <= row < stop]
        for _, run in groupby(enumerate(inside), lambda pair: pair[1][0] - pair[0]):  # neighbours in `inner`
            positions, rows = zip(*(each for _, each in run), strict=True)
            changed = out[list(rows)]
            self.inner.add_rows(changed, positions[0], positions[-1] + 1, weight)
            out[list(rows)] = changed


@dataclass(frozen=True)
class DoRA(Delta):
    """`(diag(g) - I) W + diag(g) s B A`, with `g = m / ||W + s B A||` for each output (Liu et al. 2024, eq. 5).

    `base` is the weight W that the adapter was trained on; the change stays tied to it wherever it is applied.
    `axis` says along which axis of the stored weight the outputs lie: 0 for `Linear`, 1 for `Conv1D` and embeddings.
    """

    kind = "dora"

    base: Source
    low_rank: LowRank
    magnitude: Source
    axis: int = 0

    def __post_init__(self) -> None:
        if self.axis not in (0, 1):
            raise MismatchError(f"the outputs of a matrix lie along its axis 0 or 1, not {self.axis}.")
        fits = self.base.shape == self.low_rank.shape and numel(self.magnitude.shape) == self.shape[self.axis]
        if not fits:
            raise _contradiction("base, factors and magnitude of DoRA", *self.sources)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    @override
    def sources(self) -> tuple[Source, ...]:
        return (self.base, *self.low_rank.sources, self.magnitude)

    def _tuned_direction(self, start: int, stop: int) -> torch.Tensor:
        rows = rows_of(self.base.readable(), start, stop).double()
        self.low_rank.add_rows(rows, start, stop, 1.0)
        return rows

    @cached_property
    def _gain(self) -> torch.Tensor:
        """g, one number for each output. One pass over the base weight, in tiles."""
        squares = []
        for start, stop in tiles_of_shape(self.shape):
            rows = self._tuned_direction(start, stop)
            squares.append(rows.square_().sum(dim=1 - self.axis))
        norm = (torch.cat(squares) if self.axis == 0 else torch.stack(squares).sum(dim=0)).sqrt()
        return self.magnitude.read().double().flatten() / norm

    @override
    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        gain = self._gain.to(out.device)
        gain = gain[start:stop, None] if self.axis == 0 else gain
        out.add_(self._tuned_direction(start, stop).to(out.device).mul_(gain), alpha=weight)
        out.add_(rows_of(self.base.readable(), start, stop).to(out), alpha=-weight)

    @override
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "axis": self.axis,
            "base": writer.source(f"{key}.base", self.base),
            "magnitude": writer.source(f"{key}.magnitude", self.magnitude),
            "low_rank": self.low_rank.to_record(key, name, writer),
        }

    @classmethod
    @override
    def from_record(cls, entry: Mapping[str, Any], source: ReadSource) -> Delta:
        low_rank = read_delta(entry["low_rank"], source).factors
        if low_rank is None:
            raise CorruptFileError(f"{VECTOR_RECORD} has a DoRA change without low-rank factors.")
        base, magnitude = source(entry["base"]), source(entry["magnitude"])
        return cls(base, low_rank, magnitude, int(entry["axis"]))


def _contradiction(what: str, *sources: Source, why: str = "which do not fit together") -> MismatchError:
    shapes = " and ".join(str(list(source.shape)) for source in sources)
    return MismatchError(f"{what} have shapes {shapes or 'of no part at all'}, {why}.")


def row_difference(base: Source, tuned: Source, index: tuple[int, ...]) -> Rows:
    """The change of the rows `index` of `base` to the rows of `tuned`."""
    return Rows(index, Difference(RowsOf(base, index), tuned), base.shape[0])
