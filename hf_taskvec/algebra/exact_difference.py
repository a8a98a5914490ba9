"""Differences without loss: `tuned - base` in the fewest bytes that hold it exactly.

The error of a rounded sum of two p-bit numbers is itself a p-bit number (Dekker 1971). So a high and a low part of the
inputs' own dtype always hold the difference exactly, and often the high part does so alone: the difference of two
numbers within a factor of two of each other is exact (Sterbenz 1974). Of a fine-tune that is nearly every weight, so
the low part is nearly all zeros and is held as a sparse tensor, and so is a high part where little changed.

Zero has a sign, which `base + (tuned - base)` does not always give back. Where base and tuned are both -0.0, a
difference of -0.0 does. Where a weight has become -0.0, it takes the low part: that is -0.0 there, and is added in a
way that keeps it (`formulas.FormulaBuilder`).
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hf_taskvec.algebra.machine_code import REPORTED, can_compile, split_code
from hf_taskvec.algebra.rounding import check_finite, dtype_name, round_once
from hf_taskvec.algebra.scratch import Slot, buffer
from hf_taskvec.algebra.sources import InMemory, Readable, Source, numel, runs_of_elements
from hf_taskvec.algebra.sparse_tensors import BLOCK, COUNTS, INTEGERS, OFFSETS, Sparse, collect, sparse_bytes
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.tiles import TILE
from hf_taskvec.errors import BadValueError

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_SMALLER = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
}
_COMPILED = {torch.bfloat16, torch.float16, torch.float32}
_CPU = torch.device("cpu")

# What three tensors take beside their elements more than one does, in a record and in the header of its file.
_MORE_RECORDS = 1024


@dataclass(frozen=True)
class Format:
    """How a difference is stored exactly.

    Args:
        dtype (`torch.dtype`):
            Of its parts.
        parts (`int`):
            How many there are: 0 if nothing changed.
        shape (`tuple` of `int`):
            Of the difference.
        counts (`tuple` of `tuple` of `int`):
            For each part, how many elements of each block have a bit that is set.
    """

    dtype: torch.dtype
    parts: int
    shape: tuple[int, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()

    def is_sparse(self, part: int) -> bool:
        """Whether a part is held as a sparse tensor, because that is smaller."""
        if not self.shape or not self.counts:
            return False
        dense = torch.Size(self.shape).numel() * self.dtype.itemsize
        return sparse_bytes(self.shape, sum(self.counts[part]), self.dtype) + _MORE_RECORDS < dense

    def tensors(self, part: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """The dtype and shape of what holds a part: itself; or counts, offsets and values."""
        if not self.is_sparse(part):
            return ((self.dtype, self.shape),)
        kept = sum(self.counts[part])
        return ((COUNTS, (len(self.counts[part]),)), (OFFSETS, (kept,)), (self.dtype, (kept,)))


@dataclass(frozen=True)
class _Found:
    """What there is in the parts of some elements: how many have a bit that is set in each, and what that tells."""

    counts: tuple[int, int]
    changed: bool
    rounded: bool
    #: whether a weight became -0.0
    signed: bool
    overflow: bool


@kept_subnormals()
def exact_format(tuned: Readable, base: Readable, name: str) -> Format:
    """The smallest exact format of `tuned - base`. Reads both once; refuses NaN and infinities by name."""
    dtype: torch.dtype | None = torch.promote_types(tuned.dtype, base.dtype)
    while dtype is not None:
        form = _format_in(tuned, base, name, dtype)
        if form is not None:
            return form
        widest, dtype = dtype, _WIDER.get(dtype)
    raise BadValueError(f"{name}: the difference of the weights is too large for {dtype_name(widest)}.")


def _format_in(tuned: Readable, base: Readable, name: str, dtype: torch.dtype) -> Format | None:
    """The format in a dtype, or one that is smaller and exact, too; None if it cannot hold the difference."""
    smaller = list(_SMALLER.get(dtype, ()))
    changed = rounded = signed = False
    counts = []
    high, low = (buffer(Slot.PARTS, (min(TILE, numel(tuned.shape)),), dtype, _CPU, part) for part in range(2))
    for a, b in _groups(tuned, base):
        high, low = high[: a.numel()], low[: a.numel()]
        for found in _split(a, b, high, low):
            if found.overflow:
                check_finite(a, a.dtype, name)
                check_finite(b, b.dtype, name)
                return None
            changed, rounded, signed = changed or found.changed, rounded or found.rounded, signed or found.signed
            counts.append(found.counts)
        if not rounded:
            smaller = [each for each in smaller if torch.equal(high.to(each).to(dtype), high)]
    if smaller and not rounded:
        dtype = smaller[0]
    parts = 2 if rounded or signed else int(changed)
    return Format(dtype, parts, tuple(tuned.shape), tuple(zip(*counts, strict=True))[:parts])


#: of each part the next elements, or the offsets and values of a sparse one
Piece = list[tuple[torch.Tensor, ...]]


def exact_pieces(tuned: Readable, base: Readable, form: Format) -> Iterator[Piece]:
    """The parts of `tuned - base` in an exact format, some elements at a time; to be used before the next are made."""
    sparse = [part < form.parts and form.is_sparse(part) for part in range(2)]
    for a, b in _groups(tuned, base):
        size = (a.numel(),)
        whole = [buffer(Slot.PARTS, size, form.dtype, _CPU, part) for part in range(2)]
        with kept_subnormals():
            _split(a, b, *whole)
        yield [_kept(whole[part], part) if sparse[part] else (whole[part],) for part in range(form.parts)]


def _kept(elements: torch.Tensor, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and values of what has a bit that is set."""
    size = (elements.numel(),)
    offsets, values = (
        buffer(Slot.PARTS, size, OFFSETS, _CPU, part),
        buffer(Slot.PARTS, size, elements.dtype, _CPU, 2 + part),
    )
    count = collect(elements, offsets, values)
    return offsets[:count], values[:count]


def exact_parts(tuned: Readable, base: Readable, name: str) -> tuple[Source, ...]:
    """`tuned - base` in new memory, as tensors whose exact sum it is; none if nothing changed."""
    form = exact_format(tuned, base, name)
    made = [
        [torch.empty(size, dtype=dtype, device="cpu") for dtype, size in form.tensors(k)] for k in range(form.parts)
    ]
    done = [0] * form.parts
    for piece in exact_pieces(tuned, base, form) if made else ():
        for part, elements in enumerate(piece):
            for tensor, some in zip(made[part][-len(elements) :], elements, strict=True):
                tensor.view(-1)[done[part] : done[part] + len(some)].copy_(some)
            done[part] += len(elements[0])
    return tuple(_source(form, part, tensors) for part, tensors in enumerate(made))


def _source(form: Format, part: int, tensors: list[torch.Tensor]) -> Source:
    if not form.is_sparse(part):
        return InMemory(tensors[0])
    tensors[0].copy_(torch.tensor(form.counts[part], dtype=COUNTS, device="cpu"))
    counts, offsets, values = map(InMemory, tensors)
    return Sparse(form.shape, counts, offsets, values)


def _groups(tuned: Readable, base: Readable) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements, some blocks at a time."""
    return zip(runs_of_elements(tuned, TILE), runs_of_elements(base, TILE), strict=True)


def _split(tuned: torch.Tensor, base: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> list[_Found]:
    """Write the rounded difference to `high`, and its error to `low`: whole blocks by machine code.

    Returns:
        `list` of `_Found`: What there is in each block.
    """
    parts = (tuned, base, high, low)
    known = {tuned.dtype, base.dtype, high.dtype} <= _COMPILED
    whole = tuned.numel() // BLOCK if known and can_compile() else 0
    report = (ctypes.c_int64 * (REPORTED * whole))()
    if whole:
        run = split_code(tuned.dtype, base.dtype, high.dtype)
        run(whole, BLOCK, *(each.data_ptr() for each in parts), report)
    found = []
    for number in range(-(-tuned.numel() // BLOCK)):
        block = slice(number * BLOCK, (number + 1) * BLOCK)
        if number >= whole:
            found.append(_split_by_torch(*(each[block] for each in parts)))
            continue
        in_high, in_low, zeros, overflow = report[REPORTED * number : REPORTED * (number + 1)]
        if zeros and not overflow:
            found.append(_found(tuned[block], base[block], high[block], low[block], (in_high, in_low)))
        else:
            found.append(_Found((in_high, in_low), in_high > 0, in_low > 0, False, overflow > 0))
    return found


def _split_by_torch(tuned: torch.Tensor, base: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> _Found:
    """The same in fp64 (Dekker's Fast2Sum, exact for p-bit inputs)."""
    minuend, subtrahend = tuned.double(), -base.double()
    round_once(minuend + subtrahend, high.dtype, out=high)
    swap = minuend.abs() < subtrahend.abs()
    large, small = torch.where(swap, subtrahend, minuend), torch.where(swap, minuend, subtrahend)
    exact = small - (high.double() - large) + 0.0  # no -0.0 but where it says something
    low.copy_(exact)
    overflow = not bool(high.isfinite().all()) or not torch.equal(low.double(), exact)
    negative = _is_negative_zero(tuned)
    low[negative] = -0.0
    high[negative & (base == 0)] = -0.0
    one, other = (int(each.view(INTEGERS[each.dtype.itemsize]).count_nonzero()) for each in (high, low))
    return replace(_found(tuned, base, high, low, (one, other)), overflow=overflow)


def _found(
    tuned: torch.Tensor, base: torch.Tensor, high: torch.Tensor, low: torch.Tensor, counts: tuple[int, int]
) -> _Found:
    """What the parts tell where there may be -0.0."""
    negative, was_negative = _is_negative_zero(tuned), _is_negative_zero(base)
    changed = bool(high.any() or (negative ^ was_negative).any())
    return _Found(counts, changed, bool(low.any()), bool((negative & ~was_negative).any()), overflow=False)


def _is_negative_zero(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor == 0) & tensor.signbit()
