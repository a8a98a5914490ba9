"""Evaluating an expression: fp64 accumulation over tiles, and one rounding.

Everything that turns terms into numbers goes through `Sum`: live edits, streamed checkpoints, saved vectors and
measures. So they agree to the last bit, also where the process has told the processor to flush subnormal numbers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_taskvec.algebra.blocks import Block, PartOf
from hf_taskvec.algebra.deltas import Delta, LowRank, Parts
from hf_taskvec.algebra.elementwise import Element
from hf_taskvec.algebra.formulas import Formula, FormulaBuilder, Scaled, Weighted, sum_formula
from hf_taskvec.algebra.rounding import round_once
from hf_taskvec.algebra.scratch import Slot, buffer, deeper
from hf_taskvec.algebra.sources import Readable, Source
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.tiles import tiles_of_shape

# Tiles that machine code makes in one go: it holds nothing of them.
_TILES_AT_ONCE = 8

# Elements of a right factor that are converted at a time, whatever its rank.
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Term:
    """A weighted change: one summand of an expression."""

    weight: float
    delta: Delta


_Factors = list[tuple[float, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Prepared:
    """What the tiles of a sum read: stored tensors, alone or with something that is computed; and low-rank factors."""

    folded: Weighted
    scaled: Scaled
    factors: _Factors

    @property
    def is_stored(self) -> bool:
        return bool(self.folded or self.scaled)

    @cached_property
    def tensors(self) -> list[Readable]:
        return [tensor for parts in (self.folded, *(p for _, p in self.scaled)) for _, tensor in parts]

    @cached_property
    def alone(self) -> Formula:
        return sum_formula(self.folded, self.scaled)

    @cached_property
    def with_computed(self) -> Formula:
        build = FormulaBuilder()
        return build.formula(build.sum(self.folded, self.scaled) + build.made() if self.is_stored else build.made())

    @cached_property
    def with_single(self) -> Formula:
        """What is folded, and something that was computed in fp32, added up in fp32."""
        build = FormulaBuilder(torch.float32)
        return build.formula(build.sum(self.folded) + build.made())


class Sum:
    """`target + scale * sum(weight * delta)` for one parameter, ready to be evaluated tile by tile.

    Terms of whole weight, such as `-τ`, are folded: a stored tensor that occurs more than once (the target being the
    vector's own base, or a base shared by many fine-tunes) gets one coefficient, and is not read at all if that is 0.
    Other weights multiply the exact difference, as in `base + λ * (tuned - base)`: folding would multiply rounded
    coefficients with large weights instead of a small change. Such changes are added to each other before the target.

    Args:
        shape (`tuple` of `int`):
            Of the whole parameter.
        terms (`Iterable[Term]`):
            The weighted changes.
        target (`Source`, *optional*):
            What they are added to.
        scale (`float`, *optional*, defaults to 1.0):
            λ.
        device (`torch.device`, *optional*):
            Where to compute.
        block (`Block`, *optional*):
            What is held of the parameter, and is to be evaluated. `target` and outputs are of this part then; rows are
            still counted in the whole parameter.
        target_size (`float`, *optional*):
            The root mean square of the whole target's elements, for a block: `matrix_size` of its `sampled_rows`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        terms: Iterable[Term],
        target: Source | None = None,
        scale: float = 1.0,
        device: torch.device | str = "cpu",
        block: Block | None = None,
        target_size: float | None = None,
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.block, self._target_size = block, target_size
        coefficients: dict[Source, float] = {} if target is None else {target: 1.0}
        subtracted: dict[Source, None] = {}
        self._scaled: list[tuple[float, Parts]] = []
        self._low_rank: list[tuple[float, LowRank]] = []
        self._others: list[tuple[float, Delta]] = []
        for term in terms:
            weight = scale * term.weight
            parts = term.delta.parts
            if parts is not None and block is not None:
                parts = tuple((sign, PartOf(source, block)) for sign, source in parts)
            if weight == 0.0:
                continue
            if (factors := term.delta.factors) is not None:
                self._low_rank.append((weight, factors))
            elif parts is None:
                self._others.append((weight, term.delta))
            elif not weight.is_integer():
                self._scaled.append((weight, parts))
            else:
                for sign, source in parts:
                    coefficients[source] = coefficients.get(source, 0.0) + sign * weight
                    if sign < 0:
                        subtracted[source] = None
        # The target and what is subtracted from it come first; see `Delta.parts`.
        first = [*([] if target is None else [target]), *(s for s in subtracted if s != target)]
        order = dict.fromkeys([*first, *coefficients])
        self._folded = [(coefficients[s], s) for s in order if coefficients[s] != 0.0]
        self._prepared: _Prepared | None = None

    def prepare(self) -> None:
        """Open what the sum reads, now and not with the first tile."""
        if self._prepared is None:
            self._prepare()

    def _prepare(self) -> _Prepared:
        """Several threads may get here at once: each makes its own, and the last one stays."""
        every = dict.fromkeys(s for parts in [self._folded, *(p for _, p in self._scaled)] for _, s in parts)
        tensors = {source: source.readable() for source in every}
        folded = [(coefficient, tensors[source]) for coefficient, source in self._folded]
        scaled = [(weight, [(float(sign), tensors[s]) for sign, s in parts]) for weight, parts in self._scaled]
        factors = [(weight * d.scaling, d.left.read(), d.right.read()) for weight, d in self._low_rank]
        self._prepared = _Prepared(folded, scaled, factors)
        return self._prepared

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Rows `start:stop` in `dtype`; the range must be one of `tiles`, for the bits to be reproducible."""
        return self.rows_into(torch.empty(self._size(start, stop), dtype=dtype, device=self.device), start, stop)

    @property
    def is_short(self) -> bool:
        """Whether the sum is of at most two stored 16-bit tensors, whose difference fp32 holds."""
        if self._scaled or self._low_rank or self._others or len(self._folded) > 2:
            return False
        return all(source.dtype in (torch.bfloat16, torch.float16) for _, source in self._folded)

    def _size(self, start: int, stop: int) -> tuple[int, ...]:
        return (stop - start, *self.shape[1:]) if self.shape else ()

    def _held(self, start: int, stop: int) -> tuple[int, int]:
        """Rows of the whole parameter as rows of what is held of it."""
        return (start, stop) if self.block is None else self.block.rows(start, stop)

    def _cut(self, made: list[torch.Tensor], start: int) -> list[torch.Tensor]:
        """What is held of tiles that were computed whole."""
        return made if self.block is None else [self.block.cut(each, start).contiguous() for each in made]

    @kept_subnormals()
    def rows_into(self, out: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """All summands of rows `start:stop`, added up in fp64 and written to `out`; zeros where nothing is held."""
        if self._others and out.dtype != torch.float64:
            return out.copy_(self.rows(start, stop))
        ready = self._prepared or self._prepare()
        made = self._products(ready.factors, start, stop, torch.float64)
        whole = ready.with_computed if made else ready.alone
        if self.block is not None:
            out.zero_()
            if ready.is_stored or made:
                held = whole.rows(*self._held(start, stop), self._cut(made, start), self.device)
                self.block.place(held.to(out.dtype), out, start)
        elif not ready.is_stored and not made:
            out.zero_()
        elif not whole.write(out, start, stop, made):
            out.copy_(whole.rows(start, stop, made, self.device))
        self._add_others(out, start, stop)
        return out

    def element(self, build: FormulaBuilder) -> Element | None:
        """The sum as an expression, if it is one of stored tensors alone."""
        if self._low_rank or self._others or not (self._folded or self._scaled):
            return None
        ready = self._prepared or self._prepare()
        return build.sum(ready.folded, ready.scaled)

    def _add_others(self, out: torch.Tensor, start: int, stop: int) -> None:
        with deeper():  # some are sums themselves
            for weight, delta in self._others:
                delta.add_rows(out, start, stop, weight)

    def _products(self, factors: _Factors, start: int, stop: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The sum of low-rank terms, if there are any, in blocks of columns: whatever the rank, little is held."""
        if not factors:
            return []
        out = buffer(Slot.COMPUTED, self._size(start, stop), dtype, self.device)
        for number, (weight, left, right) in enumerate(factors):
            rows = left[start:stop].to(out)
            width = max(1, _BLOCK // max(1, right.shape[0]))
            for columns, block in zip(torch.split(out, width, dim=1), torch.split(right, width, dim=1), strict=True):
                columns.addmm_(rows, block.to(out), alpha=weight, beta=1 if number else 0)
        return [out]

    @kept_subnormals()
    def rounded(
        self, start: int, stop: int, dtype: torch.dtype, name: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows `start:stop` rounded once to `dtype`. Refuses what is not finite in it, naming the parameter.

        Without `out`, memory that none of the summands shares, it is to be used at once: the next call of this thread
        may write over it.
        """
        size, (first, last) = self._size(start, stop), self._held(start, stop)
        if out is None:
            held = size if self.block is None else (last - first, *self.block.shape[1:])
            out = buffer(Slot.OUTPUT, held, dtype, self.device)
        ready, single = self._prepared or self._prepare(), self._fits_single(dtype)
        if self._others and not single:
            total = self.rows_into(buffer(Slot.ACCUMULATOR, size, torch.float64, self.device), start, stop)
            whole, made = _rounding, [total]
        elif self._others:
            computed = buffer(Slot.COMPUTED, size, torch.float32, self.device).zero_()
            self._add_others(computed, start, stop)
            whole, made = ready.with_computed, [computed]
        else:
            made = self._products(ready.factors, start, stop, torch.float32 if single else torch.float64)
            whole = ready.alone
            if made:
                whole = ready.with_single if single else ready.with_computed
        if not ready.is_stored and not made:
            return out.zero_()
        made = self._cut(made, start)
        if dtype != torch.float64 and whole.write(out, first, last, made):
            return out
        # By torch; this also shows which parameter is not finite.
        return round_once(whole.rows(first, last, made, self.device).double(), dtype, name, out)

    def _fits_single(self, dtype: torch.dtype) -> bool:
        """Whether fp32 is enough for what is computed.

        It is, to the last bit, for one change whose numbers are fp32 ones, times 1, 2 or 4. And it is for one low-rank
        change of rank 32 or less on a bf16 base, if it is small beside the weights: the rounding of the product and of
        the sum then moves fewer than one element in 10,000 by one unit (0.1 to 0.3 measured for random factors, up to
        0.8 for factors of one sign).
        Several low-rank changes may be large and cancel, so they are multiplied in fp64.
        """
        if not self._low_rank and len(self._others) == 1:
            ((weight, delta),) = self._others
            return abs(weight) in (1.0, 2.0, 4.0) and delta.is_single
        if self._others or self._scaled or len(self._low_rank) != 1 or len(self._folded) != 1:
            return False
        ((coefficient, source),) = self._folded
        same = abs(coefficient) in (1.0, 2.0, 4.0) and dtype == source.dtype == torch.bfloat16
        return same and self._low_rank[0][1].rank <= 32 and self._is_small

    @cached_property
    def _is_small(self) -> bool:
        """Whether the one low-rank change reaches less far than the weights, seen from some of their rows.

        What fp32 loses of a product grows with `|left| |right|`, its reach, however much of that cancels; and it shows
        the more, the smaller the sum.
        """
        ready = self._prepared or self._prepare()
        ((_, tensor),), ((weight, left, right),) = ready.folded, ready.factors
        size = matrix_size(sampled_rows(tensor)) if self._target_size is None else self._target_size
        reach = abs(weight) * left.shape[1] * matrix_size(sampled_rows(left)) * matrix_size(sampled_rows(right))
        return reach <= 0.75 * size

    def tiles(self) -> Iterator[tuple[int, int]]:
        """The row ranges to evaluate."""
        return tiles_of_shape(self.shape)

    @kept_subnormals()
    def _write_at_once(self, out: torch.Tensor, start: int, stop: int) -> bool:
        """Write several tiles by machine code, if they are of stored tensors alone: the bits are those of single tiles.

        Beside what the code takes for one tile, Python's own time for it counts.
        """
        ready = self._prepared or self._prepare()
        is_plain = ready.is_stored and not (self._low_rank or self._others) and self.block is None
        is_plain = is_plain and all(isinstance(each, torch.Tensor) for each in ready.tensors)
        return is_plain and out.dtype != torch.float64 and ready.alone.write(out[start:stop], start, stop)

    def _left_over(self, out: torch.Tensor) -> Iterator[tuple[int, int]]:
        """The tiles that are not written at once with their neighbours, which this does."""
        tiles = list(self.tiles())
        for number in range(0, len(tiles), _TILES_AT_ONCE):
            run = tiles[number : number + _TILES_AT_ONCE]
            if len(run) == 1 or not self._write_at_once(out, run[0][0], run[-1][1]):
                yield from run

    def into(self, out: torch.Tensor, name: str) -> None:
        """Evaluate the whole parameter into `out`, rounded once to its dtype."""
        ready = self._prepared or self._prepare()
        memory = {each.untyped_storage().data_ptr() for each in ready.tensors if isinstance(each, torch.Tensor)}
        direct = self.device == out.device and out.untyped_storage().data_ptr() not in memory
        for start, stop in self._left_over(out) if direct else self.tiles():
            first, last = self._held(start, stop)
            if self.block is not None and (first == last or not out.numel()) and self.shape:
                continue
            rows = out[first:last] if self.shape else out
            if direct:
                self.rounded(start, stop, out.dtype, name, rows)
            else:
                rows.copy_(self.rounded(start, stop, out.dtype, name))


def _only_rounding() -> Formula:
    build = FormulaBuilder()
    return build.formula(build.made())


_rounding = _only_rounding()


def sampled_rows(matrix: Readable) -> torch.Tensor:
    """At most 64 rows, from which the size of a matrix is seen: the same ones, however it is stored."""
    step = sampling_step(matrix.shape[0])
    if isinstance(matrix, torch.Tensor):
        return matrix[::step].contiguous()
    return torch.cat([matrix.rows(row, row + 1).clone() for row in range(0, matrix.shape[0], step)])


def sampling_step(rows: int) -> int:
    """How far apart the sampled rows are."""
    return 1 + rows // 64


def matrix_size(rows: torch.Tensor) -> float:
    """The root mean square of the elements."""
    norm: float = torch.linalg.vector_norm(rows, dtype=torch.float32).item()
    return norm / float(max(1, rows.numel()) ** 0.5)
