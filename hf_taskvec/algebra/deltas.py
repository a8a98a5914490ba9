"""The kinds of change to one parameter: dense, difference, low-rank, rows, DoRA.

A delta is a frozen value over `Source`s. It can add `weight x` its rows to an fp64 accumulator, which is all that
evaluating an expression needs; deltas that are sums of stored tensors also show their `parts`, so that like tensors
can be folded (two fine-tunes of one base read that base once).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from hf_taskvec.algebra.sources import RowsOf, Source, numel
from hf_taskvec.errors import MismatchError, some

# Elements in a tile: small enough that its fp64 accumulator (4 MiB) stays near a core, large enough that threads work
# in torch and do not wait for each other in Python. Tiles depend on the shape alone, so an expression gives the same
# bits live, streamed, and on any number of threads or processes.
TILE = 1 << 19


def tile_rows(shape: tuple[int, ...]) -> int:
    """How many rows of a parameter make one tile."""
    return max(1, TILE // max(1, numel(shape[1:])))


# Sign and stored tensor, in the order in which they must be added.
Parts = tuple[tuple[int, Source], ...]


class Delta(ABC):
    """A change to one parameter."""

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


def _add_parts(parts: Parts, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
    # As `Sum` does it: a whole weight multiplies the stored tensors, any other their exact sum.
    change = out if weight.is_integer() else torch.zeros_like(out)
    for sign, source in parts:
        tensor = source.read()
        rows = tensor if tensor.ndim == 0 else tensor[start:stop]
        change.add_(rows.to(out), alpha=sign * weight if change is out else sign)
    if change is not out:
        out.add_(change.mul_(weight))


@dataclass(frozen=True)
class Dense(Delta):
    """A stored change: one tensor, or high and low parts whose exact sum it is."""

    tensors: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not self.tensors or any(part.shape != self.shape for part in self.tensors):
            raise _contradiction("the parts of a dense change", *self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensors[0].shape

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.tensors

    @property
    def parts(self) -> Parts:
        return tuple((1, tensor) for tensor in self.tensors)

    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        _add_parts(self.parts, out, start, stop, weight)


@dataclass(frozen=True)
class Difference(Delta):
    """`tuned - base`, two stored tensors that are read only when used."""

    base: Source
    tuned: Source

    def __post_init__(self) -> None:
        if self.base.shape != self.tuned.shape:
            raise _contradiction("base and fine-tune", self.base, self.tuned)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tuned.shape

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.base, self.tuned)

    @property
    def parts(self) -> Parts:
        return ((-1, self.base), (1, self.tuned))

    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        _add_parts(self.parts, out, start, stop, weight)


@dataclass(frozen=True)
class LowRank(Delta):
    """`scaling * left @ right`, e.g. LoRA's `B @ A`. The factors are never changed or multiplied out."""

    left: Source
    right: Source
    scaling: float = 1.0

    def __post_init__(self) -> None:
        left, right = self.left.shape, self.right.shape
        if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
            raise _contradiction("two factors", self.left, self.right, why="which cannot be multiplied")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.left.shape[0], self.right.shape[1])

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.left, self.right)

    @property
    def rank(self) -> int:
        return min(self.left.shape[1], *self.shape)

    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        out.addmm_(self.left.read()[start:stop].to(out), self.right.read().to(out), alpha=weight * self.scaling)


@dataclass(frozen=True)
class Rows(Delta):
    """A change to some rows of a parameter of `n_rows` rows: trained tokens, or a vocabulary of another size."""

    index: range | tuple[int, ...]
    inner: Delta
    n_rows: int

    def __post_init__(self) -> None:
        rows = self.inner.shape[:1]
        if rows != (len(self.index),) or not all(0 <= row < self.n_rows for row in self.index):
            raise MismatchError(
                f"a change to rows {some(map(str, self.index))} of {self.n_rows} holds {list(rows)} rows: "
                "they must be as many, and within the parameter."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n_rows, *self.inner.shape[1:])

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.inner.sources

    @property
    def rank(self) -> int:
        return self.inner.rank

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
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.base, *self.low_rank.sources, self.magnitude)

    def _tuned_direction(self, start: int, stop: int) -> torch.Tensor:
        rows = self.base.read()[start:stop].double()
        self.low_rank.add_rows(rows, start, stop, 1.0)
        return rows

    @cached_property
    def _gain(self) -> torch.Tensor:
        """g, one number for each output. One pass over the base weight, in tiles."""
        step = tile_rows(self.shape)
        squares = []
        for start in range(0, self.shape[0], step):
            rows = self._tuned_direction(start, min(start + step, self.shape[0]))
            squares.append(rows.square_().sum(dim=1 - self.axis))
        norm = (torch.cat(squares) if self.axis == 0 else torch.stack(squares).sum(dim=0)).sqrt()
        return self.magnitude.read().double().flatten() / norm

    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        gain = self._gain.to(out.device)
        gain = gain[start:stop, None] if self.axis == 0 else gain
        out.add_(self._tuned_direction(start, stop).to(out.device).mul_(gain), alpha=weight)
        out.add_(self.base.read()[start:stop].to(out), alpha=-weight)


def _contradiction(what: str, *sources: Source, why: str = "which do not fit together") -> MismatchError:
    shapes = " and ".join(str(list(source.shape)) for source in sources)
    return MismatchError(f"{what} have shapes {shapes or 'of no part at all'}, {why}.")


def row_difference(base: Source, tuned: Source, index: tuple[int, ...]) -> Rows:
    """The change of the rows `index` of `base` to the rows of `tuned`."""
    return Rows(index, Difference(RowsOf(base, index), tuned), base.shape[0])
