"""Differences without loss: `tuned - base` in the fewest bytes that hold it exactly.

The error of a rounded sum of two p-bit numbers is itself a p-bit number (Dekker 1971). So a high and a low part of the
inputs' own dtype always hold the difference exactly, and often the high part does so alone.

Zero has a sign, which `base + (tuned - base)` does not always give back. Where base and tuned are both -0.0, a
difference of -0.0 does. Where a weight has become -0.0, it takes the low part: that is -0.0 there, and is added in a
way that keeps it (`formulas.FormulaBuilder`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_taskvec.algebra.rounding import check_finite, dtype_name, round_once
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.tiles import tile_rows
from hf_taskvec.errors import BadValueError

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_SMALLER = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
}


@dataclass(frozen=True)
class Format:
    """How a difference is stored exactly: in which dtype, and in how many parts (0 if nothing changed)."""

    dtype: torch.dtype
    parts: int


@kept_subnormals()
def exact_format(tuned: torch.Tensor, base: torch.Tensor, name: str) -> Format:
    """The smallest exact format of `tuned - base`. Reads both once; refuses NaN and infinities by name."""
    dtype = torch.promote_types(tuned.dtype, base.dtype)
    while True:
        smaller = list(_SMALLER.get(dtype, ()))
        changed = rounded = signed = overflow = False
        for a, b in _tiles(tuned, base):
            check_finite(a, a.dtype, name)
            check_finite(b, b.dtype, name)
            high, low = _split(a, b, dtype)
            if not high.isfinite().all() or not torch.equal(low.to(dtype).double(), low):
                overflow = True
                break
            negative, was_negative = _is_negative_zero(a), _is_negative_zero(b)
            changed = changed or bool(high.any() or (negative ^ was_negative).any())
            rounded = rounded or bool(low.any())
            signed = signed or bool((negative & ~was_negative).any())
            smaller = [each for each in smaller if torch.equal(high.to(each).to(dtype), high)]
        if not overflow:
            break
        if dtype not in _WIDER:
            raise BadValueError(f"{name}: the difference of the weights is too large for {dtype_name(dtype)}.")
        dtype = _WIDER[dtype]
    if not rounded and smaller:
        dtype = smaller[0]
    return Format(dtype, 2 if rounded or signed else int(changed))


def exact_rows(tuned: torch.Tensor, base: torch.Tensor, form: Format) -> Iterator[tuple[torch.Tensor, ...]]:
    """The parts of `tuned - base` in an exact format, tile by tile."""
    for a, b in _tiles(tuned, base):
        yield _parts(a, b, form)


@kept_subnormals()
def _parts(tuned: torch.Tensor, base: torch.Tensor, form: Format) -> tuple[torch.Tensor, ...]:
    high, low = _split(tuned, base, form.dtype)
    return (high, low.to(form.dtype))[: form.parts]


def exact_parts(tuned: torch.Tensor, base: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
    """`tuned - base` as new tensors whose exact sum it is; none if nothing changed."""
    form = exact_format(tuned, base, name)
    if not form.parts:
        return ()
    parts = zip(*exact_rows(tuned, base, form), strict=True)
    return tuple(torch.cat([rows.reshape(-1) for rows in part]).view(tuned.shape) for part in parts)


def _tiles(tuned: torch.Tensor, base: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if not tuned.ndim:
        yield tuned, base
        return
    step = tile_rows(tuple(tuned.shape))
    yield from zip(torch.split(tuned, step), torch.split(base, step), strict=True)


def _split(tuned: torch.Tensor, base: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded difference in `dtype`, and its error in fp64 (Dekker's Fast2Sum, exact for p-bit inputs)."""
    minuend, subtrahend = tuned.double(), -base.double()
    high = round_once(minuend + subtrahend, dtype)
    swap = minuend.abs() < subtrahend.abs()
    large, small = torch.where(swap, subtrahend, minuend), torch.where(swap, minuend, subtrahend)
    low = small - (high.double() - large)
    if (negative := _is_negative_zero(tuned)).any():
        low = torch.where(negative, -0.0, low)
        high = torch.where(negative & (base == 0), torch.tensor(-0.0, dtype=dtype, device="cpu"), high)
    return high, low


def _is_negative_zero(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor == 0) & tensor.signbit()
