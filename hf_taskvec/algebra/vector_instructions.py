"""LLVM's instructions on several numbers at a time: what is stored, as fp32 or fp64, and rounding to it."""

from typing import Any

import torch
from llvmlite import ir

from hf_taskvec.algebra.machine_code import WIDTH, rounds_to_bfloat


class _BrainFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bf16, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


I16, I32, I64 = (ir.IntType(bits) for bits in (16, 32, 64))
SINGLE, DOUBLE, POINTER, BRAIN = ir.FloatType(), ir.DoubleType(), ir.PointerType(), _BrainFloat()
STORED = {torch.bfloat16: I16, torch.float16: I16, torch.float32: SINGLE, torch.float64: DOUBLE}
PRECISION = {torch.float32: SINGLE, torch.float64: DOUBLE}

# The bits of fp32 numbers: infinity, and the least that are infinite in 16 bits.
_INFINITE = 0x7F800000
TOO_LARGE = {torch.bfloat16: 0x7F7F8000, torch.float16: 0x477FF000, torch.float32: _INFINITE}


def widened(build: ir.IRBuilder, number: Any, kind: torch.dtype) -> Any:
    """A stored number as fp32, or as fp64 if it is that."""
    if kind in (torch.float32, torch.float64):
        return number
    bits = build.zext(number, vector_of(I32))
    if kind == torch.bfloat16:
        return build.bitcast(build.shl(bits, all_lanes(I32, 16)), vector_of(SINGLE))
    # fp16's exponents are 112 less. Subnormal numbers get a leading one, which is subtracted again.
    sign = build.shl(build.and_(bits, all_lanes(I32, 0x8000)), all_lanes(I32, 16))
    magnitude = build.and_(bits, all_lanes(I32, 0x7FFF))
    moved = build.add(build.shl(magnitude, all_lanes(I32, 13)), all_lanes(I32, 112 << 23))
    finite = build.icmp_unsigned("<", magnitude, all_lanes(I32, 0x7C00))
    normal = build.select(finite, moved, build.or_(moved, all_lanes(I32, _INFINITE)))
    one_more = build.bitcast(build.add(moved, all_lanes(I32, 1 << 23)), vector_of(SINGLE))
    subnormal = build.bitcast(build.fsub(one_more, all_lanes(SINGLE, 2.0**-14)), vector_of(I32))
    small = build.icmp_unsigned("<", magnitude, all_lanes(I32, 0x400))
    return build.bitcast(build.or_(build.select(small, subnormal, normal), sign), vector_of(SINGLE))


def rounded(
    build: ir.IRBuilder, number: Any, precision: torch.dtype, output: torch.dtype, is_normal: bool = False
) -> tuple[Any, Any]:
    """A number as it is stored, rounded once; and the bits of its magnitude in fp32, if there is something to look at.

    fp64 becomes fp32 by rounding to odd, as in `rounding.round_once`, and fp32 a 16-bit number by rounding to nearest
    even: the sum of what is cut off, almost a half, and the last bit that stays carries by itself.
    """
    if output == torch.float64:
        return converted(build, number, torch.float64), None
    single = number
    if precision == torch.float64:
        single = build.fptrunc(number if output == torch.float32 else _odd(build, number), vector_of(SINGLE))
    bits = build.bitcast(single, vector_of(I32))
    magnitude = build.and_(bits, all_lanes(I32, 0x7FFFFFFF))
    if output == torch.float32:
        return single, magnitude
    if output == torch.bfloat16 and is_normal and rounds_to_bfloat():  # it makes zeros of subnormal numbers
        return build.bitcast(build.fptrunc(single, vector_of(BRAIN)), vector_of(I16)), magnitude
    if output == torch.bfloat16:  # fp32's upper half: the sign stays where it is
        return build.trunc(_cut_off(build, bits, 16), vector_of(I16)), magnitude
    # Below 2**-14 its numbers are the multiples of 2**-24, and so are those of fp32 from a half on.
    shifted = build.fadd(build.bitcast(magnitude, vector_of(SINGLE)), all_lanes(SINGLE, 0.5))
    subnormal = build.sub(build.bitcast(shifted, vector_of(I32)), all_lanes(I32, 0x3F000000))
    small = build.icmp_unsigned("<", magnitude, all_lanes(I32, 113 << 23))
    half = build.select(small, subnormal, build.sub(_cut_off(build, magnitude, 13), all_lanes(I32, 112 << 10)))
    sign = build.and_(build.lshr(bits, all_lanes(I32, 16)), all_lanes(I32, 0x8000))
    return build.trunc(build.or_(half, sign), vector_of(I16)), magnitude


def _cut_off(build: ir.IRBuilder, bits: Any, count: int) -> Any:
    """Bits without the last ones, rounded to nearest even."""
    shortened = build.lshr(bits, all_lanes(I32, count))
    last = build.and_(shortened, all_lanes(I32, 1))
    almost_half = all_lanes(I32, (1 << (count - 1)) - 1)
    return build.lshr(build.add(build.add(bits, almost_half), last), all_lanes(I32, count))


def _odd(build: ir.IRBuilder, number: Any) -> Any:
    """An fp64 number whose last bits, which fp32 does not have, are folded into the one before them."""
    below = all_lanes(I64, (1 << 29) - 1)
    bits = build.bitcast(number, vector_of(I64))
    folded = build.or_(build.add(build.and_(bits, below), below), bits)
    return build.bitcast(build.and_(folded, all_lanes(I64, -(1 << 29))), vector_of(DOUBLE))


def lanes(build: ir.IRBuilder, condition: Any) -> Any:
    """A bit for each lane in which a condition holds."""
    return build.zext(build.bitcast(condition, ir.IntType(WIDTH)), I64)


def any_lane(build: ir.IRBuilder, conditions: Any) -> Any:
    """Whether a condition holds in some lane."""
    mask = build.bitcast(conditions, ir.IntType(WIDTH))
    return build.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(WIDTH), 0))


def converted(build: ir.IRBuilder, number: Any, precision: torch.dtype) -> Any:
    """A number in fp32 or fp64."""
    wanted = vector_of(PRECISION[precision])
    if number.type == wanted:
        return number
    return build.fptrunc(number, wanted) if precision == torch.float32 else build.fpext(number, wanted)


def extreme(build: ir.IRBuilder, which: str, one: Any, other: Any) -> Any:
    """Of two unsigned numbers the one of which the comparison holds."""
    return build.select(build.icmp_unsigned(which, one, other), one, other)


def broadcast(build: ir.IRBuilder, scalar: Any) -> Any:
    """A number in all lanes."""
    vector = ir.VectorType(scalar.type, WIDTH)
    one = build.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return build.shuffle_vector(one, ir.Constant(vector, ir.Undefined), all_lanes(I32, 0))


def vector_of(kind: Any) -> ir.VectorType:
    """A type, `WIDTH` times."""
    return ir.VectorType(kind, WIDTH)


def all_lanes(kind: Any, value: float) -> ir.Constant:
    """A constant in all lanes."""
    return ir.Constant(vector_of(kind), [value] * WIDTH)
