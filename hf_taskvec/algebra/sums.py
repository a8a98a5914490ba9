"""Evaluating an expression: fp64 accumulation over tiles, and one rounding.

Everything that turns terms into numbers goes through `Sum`: live edits, streamed checkpoints, saved vectors and
measures. So they agree to the last bit, also where the process has told the processor to flush subnormal numbers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_taskvec.algebra.deltas import Delta, LowRank, Parts
from hf_taskvec.algebra.rounding import round_once
from hf_taskvec.algebra.scratch import Slot, buffer
from hf_taskvec.algebra.sources import Source
from hf_taskvec.algebra.stored_rows import combine_rows
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.tiles import tiles_of_shape

# Elements of a right factor that are converted at a time, whatever its rank.
_BLOCK = 1 << 18

# Elements that are added at a time where several fp32 tensors are needed for it.
_PART = 1 << 17

# What shifting leaves of an fp32 number that is half-way between two bf16 numbers.
_HALFWAY = -(1 << 31)


@dataclass(frozen=True)
class Term:
    """A weighted change: one summand of an expression."""

    weight: float
    delta: Delta


_Tensors = list[tuple[float, torch.Tensor]]
_Factors = list[tuple[float, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Prepared:
    """What the tiles of a sum read."""

    folded: _Tensors
    scaled: list[tuple[float, _Tensors]]
    factors: _Factors


class Sum:
    """`target + scale * sum(weight * delta)` for one parameter, ready to be evaluated tile by tile.

    Terms of whole weight, such as `-τ`, are folded: a stored tensor that occurs more than once (the target being the
    vector's own base, or a base shared by many fine-tunes) gets one coefficient, and is not read at all if that is 0.
    Other weights multiply the exact difference, as in `base + λ * (tuned - base)`: folding would multiply rounded
    coefficients with large weights instead of a small change. Such changes are added to each other before the target.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        terms: Iterable[Term],
        target: Source | None = None,
        scale: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        coefficients: dict[Source, float] = {} if target is None else {target: 1.0}
        subtracted: dict[Source, None] = {}
        self._scaled: list[tuple[float, Parts]] = []
        self._low_rank: list[tuple[float, LowRank]] = []
        self._others: list[tuple[float, Delta]] = []
        for term in terms:
            weight = scale * term.weight
            parts = term.delta.parts
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

    def _prepare(self) -> _Prepared:
        """Several threads may get here at once: each makes its own, and the last one stays."""
        every = dict.fromkeys(s for parts in [self._folded, *(p for _, p in self._scaled)] for _, s in parts)
        tensors = {source: source.read() for source in every}
        self._prepared = _Prepared(
            [(coefficient, tensors[source]) for coefficient, source in self._folded],
            [(weight, [(sign, tensors[source]) for sign, source in parts]) for weight, parts in self._scaled],
            [(weight * d.scaling, d.left.read(), d.right.read()) for weight, d in self._low_rank],
        )
        return self._prepared

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Rows `start:stop`, added up in `dtype`; the range must be one of `tiles`, for the bits to be reproducible."""
        return self.rows_into(torch.empty(self._size(start, stop), dtype=dtype, device=self.device), start, stop)

    @property
    def is_short(self) -> bool:
        """Whether the sum is of at most two stored 16-bit tensors, whose difference fp32 holds."""
        if self._scaled or self._low_rank or self._others or len(self._folded) > 2:
            return False
        return all(source.dtype in (torch.bfloat16, torch.float16) for _, source in self._folded)

    def _size(self, start: int, stop: int) -> tuple[int, ...]:
        return (stop - start, *self.shape[1:]) if self.shape else ()

    @kept_subnormals()
    def rows_into(self, out: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """All summands of rows `start:stop`, added up in the dtype of `out`."""
        ready = self._prepared or self._prepare()
        self._add_stored(out, ready, start, stop)
        self._add_products(out, ready.factors, start, stop)
        for weight, delta in self._others:
            delta.add_rows(out, start, stop, weight)
        return out

    def _add_stored(self, out: torch.Tensor, ready: _Prepared, start: int, stop: int) -> None:
        """Write the sum of all stored tensors to `out`: scaled changes first, and to them what is folded.

        At weights such as 0.3 and -0.7 many sums are ties, which the order of the additions decides: this one gives
        `target + (0.3 * a - 0.7 * b)`, as it is written.
        """
        if not ready.scaled:
            combine_rows(ready.folded, out, start, stop)
            return
        summand = buffer(Slot.SUMMAND, tuple(out.shape), out.dtype, self.device)
        for number, (weight, parts) in enumerate(ready.scaled):
            change = combine_rows(parts, summand if number else out, start, stop).mul_(weight)
            if number:
                out.add_(change)
        out.add_(combine_rows(ready.folded, summand, start, stop))

    def _add_products(self, out: torch.Tensor, factors: _Factors, start: int, stop: int) -> None:
        """Add the low-rank terms, in blocks of columns: whatever the rank, little of a factor is held at a time."""
        for weight, left, right in factors:
            rows = left[start:stop].to(out)
            width = max(1, _BLOCK // max(1, right.shape[0]))
            for columns, block in zip(torch.split(out, width, dim=1), torch.split(right, width, dim=1), strict=True):
                columns.addmm_(rows, block.to(out), alpha=weight)

    @kept_subnormals()
    def rounded(self, start: int, stop: int, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Rows `start:stop` rounded once to `dtype`. Refuses what is not finite in it, naming the parameter.

        To be used at once: the next call of this thread may write over it.
        """
        size = self._size(start, stop)
        out = buffer(Slot.OUTPUT, size, dtype, self.device)
        if self._fits_single(dtype):
            if len(self._folded) == 2:
                self._add_at_once(out, start, stop)
            else:
                out.copy_(self.rows_into(buffer(Slot.ACCUMULATOR, size, torch.float32, self.device), start, stop))
            # One NaN or infinity makes the sum so. A sum that is too large itself only costs the slower way.
            if out.sum().isfinite():
                return out
        if self._is_one_addition(dtype) and self._add_change(out, start, stop).sum().isfinite():
            return out
        # fp64 also holds intermediate values that overflow fp32, and shows which parameter is not finite.
        return round_once(
            self.rows_into(buffer(Slot.ACCUMULATOR, size, torch.float64, self.device), start, stop), dtype, name, out
        )

    def _add_at_once(self, out: torch.Tensor, start: int, stop: int) -> None:
        """Two stored tensors, added by torch's own 16-bit kernels: in fp32, rounded once, in one pass.

        `2a - b`, which is `base - τ`, is a `lerp`, computed as `b - 2 (b - a)`. Where the inner difference needs more
        than 24 bits, one of the two numbers is too small to move the other's last bit, so its rounding does not show.
        """
        ready = self._prepared or self._prepare()
        (first, a), (second, b) = (
            (c, (tensor[start:stop] if self.shape else tensor).to(self.device)) for c, tensor in ready.folded
        )
        if first == 1.0:
            torch.add(a, b, alpha=second, out=out)
        elif second == 1.0:
            torch.add(b, a, alpha=first, out=out)
        elif (first, second) == (2.0, -1.0):
            torch.lerp(a, b, -1.0, out=out)
        elif (first, second) == (-1.0, 2.0):
            torch.lerp(b, a, -1.0, out=out)
        else:
            torch.add(torch.mul(a, first, out=out), b, alpha=second, out=out)

    def _fits_single(self, dtype: torch.dtype) -> bool:
        """Whether fp32 is enough for a result of 16 bits.

        It is, to the last bit, for at most one addition of p-bit numbers, p = 8 or 11: rounding to 24 bits and then to
        p is the same as rounding to p at once if 24 >= 2p + 2 (Figueroa 1995). Whole coefficients that are powers of
        two keep p-bit numbers p-bit. This covers `base - τ` on the vector's own base. And it is for one low-rank change
        of rank 32 or less on a bf16 base, if it is small beside the weights: its rounding then moves fewer than one
        element in 10,000 by one unit (0.1 to 0.3 measured for random factors, up to 0.8 for factors of one sign).
        Several low-rank changes may be large and cancel, so they are added in fp64.
        """
        if dtype not in (torch.bfloat16, torch.float16) or self._scaled or self._others or not self._folded:
            return False
        if any(abs(c) not in (1.0, 2.0, 4.0) or source.dtype != dtype for c, source in self._folded):
            return False
        if self._low_rank:
            one = len(self._low_rank) == 1 and len(self._folded) == 1
            return dtype == torch.bfloat16 and one and self._low_rank[0][1].rank <= 32 and self._is_small
        return len(self._folded) <= 2

    @cached_property
    def _is_small(self) -> bool:
        """Whether the one low-rank change reaches less far than the weights, seen from some of their rows.

        What fp32 loses of a product grows with `|left| |right|`, its reach, however much of that cancels; and it shows
        the more, the smaller the sum.
        """
        ready = self._prepared or self._prepare()
        ((_, tensor),), ((weight, left, right),) = ready.folded, ready.factors
        return abs(weight) * left.shape[1] * _size(left) * _size(right) <= 0.75 * _size(tensor)

    def _is_one_addition(self, dtype: torch.dtype) -> bool:
        """Whether all there is are a bf16 tensor and a change that is computed in fp32."""
        if (
            dtype != torch.bfloat16
            or self._scaled
            or self._low_rank
            or len(self._folded) != 1
            or len(self._others) != 1
        ):
            return False
        ((coefficient, source),), ((weight, delta),) = self._folded, self._others
        return coefficient == 1.0 and source.dtype == dtype and abs(weight) in (1.0, 2.0, 4.0) and delta.is_single

    def _add_change(self, out: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """A bf16 tensor and an fp32 change, added in fp32 and rounded to bf16.

        Rounding twice goes wrong only where the first rounding loses something and ends half-way between two bf16
        numbers: there, at one element in 65,536 or fewer, the sum is taken in fp64.
        """
        (weight, delta), ((_, tensor),) = self._others[0], (self._prepared or self._prepare()).folded
        change = buffer(Slot.SUMMAND, tuple(out.shape), torch.float32, self.device).zero_()
        delta.add_rows(change, start, stop, weight)
        base = (tensor[start:stop] if self.shape else tensor).to(self.device).reshape(-1)
        for first in range(0, out.numel(), _PART):
            part = slice(first, first + _PART)
            _add_single(base[part], change.view(-1)[part], out.view(-1)[part])
        return out

    def tiles(self) -> Iterator[tuple[int, int]]:
        """The row ranges to evaluate."""
        return tiles_of_shape(self.shape)

    def into(self, out: torch.Tensor, name: str) -> None:
        """Evaluate the whole parameter into `out`, rounded once to its dtype."""
        for start, stop in self.tiles():
            (out[start:stop] if self.shape else out).copy_(self.rounded(start, stop, out.dtype, name))


def _size(matrix: torch.Tensor) -> float:
    """The root mean square of the elements, from at most 64 rows."""
    rows = matrix[:: 1 + matrix.shape[0] // 64]
    norm: float = torch.linalg.vector_norm(rows, dtype=torch.float32).item()
    return norm / float(max(1, rows.numel()) ** 0.5)


def _add_single(base: torch.Tensor, change: torch.Tensor, out: torch.Tensor) -> None:
    """A part of `Sum._add_change`."""
    size = tuple(out.shape)
    slots = (Slot.BASE, Slot.TOTAL, Slot.PART, Slot.REST)
    single, total, most, rest = (buffer(slot, size, torch.float32, out.device) for slot in slots)
    out.copy_(torch.add(single.copy_(base), change, out=total))
    # What the sum has lost, exactly: (base - (total - most)) + (change - most), with most = total - base (Knuth's
    # TwoSum).
    torch.sub(total, torch.sub(total, single, out=most), out=rest)
    lost = single.sub_(rest).add_(torch.sub(change, most, out=most))
    halfway = total.view(torch.int32).bitwise_left_shift_(16).eq_(_HALFWAY).neg_()
    wrong = lost.view(torch.int32).bitwise_and_(halfway).nonzero().view(-1)
    if len(wrong):
        out[wrong] = round_once(base[wrong].double() + change[wrong].double(), out.dtype)
