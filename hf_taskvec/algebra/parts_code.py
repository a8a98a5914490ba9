"""LLVM's instructions for the parts of saved differences: splitting them, and making sparse tensors and using them."""

from typing import Any

import torch
from llvmlite import ir

from hf_taskvec.algebra.loop_instructions import Loop
from hf_taskvec.algebra.machine_code import REPORTED, WIDTH
from hf_taskvec.algebra.vector_instructions import (
    I16,
    I32,
    I64,
    POINTER,
    PRECISION,
    STORED,
    TOO_LARGE,
    all_lanes,
    converted,
    extreme,
    lanes,
    rounded,
    vector_of,
    widened,
)

_BITS = {2: I16, 4: I32, 8: I64}
_NOTHING = ir.Constant(I64, 0)


def split_loop(tuned: torch.dtype, base: torch.dtype, output: torch.dtype) -> ir.Module:
    """A module with `loop(blocks, size, tuned, base, high, low, report)`: the parts of a difference.

    What these are is told in `exact_difference`. The report gets four numbers for each block of `size` elements: how
    many elements of the high part and of the low part have a bit that is set; whether -0.0 is among the inputs; and
    whether a number is not finite in the output's dtype, and all else is void. `size` is a multiple of `WIDTH`.

    A difference of 16-bit numbers is made in fp32, any other in fp64. Where that is exact, rounding it gives the high
    part. Where it is not, the smaller number is so small that the high part is the larger one, and what was lost
    (Knuth's TwoSum) is in the low part.
    """
    precision = torch.float32 if {tuned, base} in ({torch.bfloat16}, {torch.float16}) else torch.float64
    stored = _BITS[output.itemsize]
    build, (blocks, size, from_tuned, from_base, to_high, to_low, report) = _function(ir.VoidType(), [I64] * 2, 5)
    for written in (to_high, to_low):
        written.add_attribute("noalias")
    outer = Loop(build)
    block = outer.carried(_NOTHING)
    start = build.mul(block, size)
    inner = Loop(build)
    offset, *counted, zeros = (inner.carried(_NOTHING) for _ in range(4))
    largest = inner.carried(all_lanes(I32, 0))
    place = build.add(start, offset)

    def read(address: Any, kind: torch.dtype) -> tuple[Any, Any]:
        """The numbers, and which of them are -0.0."""
        bits = _BITS[kind.itemsize]
        found = build.load(build.gep(address, [place], source_etype=bits), typ=vector_of(bits), align=1)
        number = widened(build, build.bitcast(found, vector_of(STORED[kind])), kind)
        return converted(build, number, precision), build.icmp_unsigned("==", found, _minus_zero(kind))

    (minuend, became), (subtrahend, was) = read(from_tuned, tuned), read(from_base, base)
    # Adding zero makes 0.0 of -0.0, so that -0.0 less either is -0.0.
    total = build.fsub(minuend, build.fadd(subtrahend, all_lanes(PRECISION[precision], 0.0)))
    taken = build.fsub(total, minuend)
    error = build.fsub(build.fsub(minuend, build.fsub(total, taken)), build.fadd(subtrahend, taken))
    high, magnitude = rounded(build, total, precision, output)
    remaining = build.fadd(build.fsub(total, converted(build, widened(build, high, output), precision)), error)
    if precision == torch.float32 and output == torch.bfloat16:  # nothing to round
        low = build.trunc(build.lshr(build.bitcast(remaining, vector_of(I32)), all_lanes(I32, 16)), vector_of(I16))
    else:
        low, _ = rounded(build, remaining, precision, output)
    high, low = (build.bitcast(each, vector_of(stored)) for each in (high, low))
    low = build.select(became, _minus_zero(output), low)
    for part, address in ((high, to_high), (low, to_low)):
        build.store(part, build.gep(address, [place], source_etype=stored), align=1)

    following = build.add(offset, ir.Constant(I64, WIDTH))
    more = [
        build.add(old, build.ctpop(lanes(build, build.icmp_unsigned("!=", each, all_lanes(stored, 0)))))
        for old, each in zip(counted, (high, low), strict=True)
    ]
    more_zeros = build.or_(zeros, lanes(build, build.or_(became, was)))
    now_largest = extreme(build, ">", largest, magnitude)
    handed_on = zip((offset, *counted, zeros, largest), (following, *more, more_zeros, now_largest), strict=True)
    inner.end(dict(handed_on), build.icmp_signed("<", following, size))

    too_large = lanes(build, build.icmp_unsigned(">=", now_largest, all_lanes(I32, TOO_LARGE[output])))
    first = build.mul(block, ir.Constant(I64, REPORTED))
    for number, value in enumerate((*more, more_zeros, too_large)):
        build.store(value, build.gep(report, [build.add(first, ir.Constant(I64, number))], source_etype=I64))
    next_block = build.add(block, ir.Constant(I64, 1))
    outer.end({block: next_block}, build.icmp_signed("<", next_block, blocks))
    build.ret_void()
    return build.module


def collecting_loop(itemsize: int) -> ir.Module:
    """A module with `loop(count, numbers, offsets, values)`: it gives how many numbers have a bit that is set.

    Where these stand in their blocks of 65,536 goes to `offsets`, 16 bits each, and they themselves to `values`; both
    have room for all. `count` is a multiple of `WIDTH`.
    """
    kind = ir.IntType(8 * itemsize)
    build, (count, numbers, offsets, values) = _function(I64, [I64], 3)
    for written in (offsets, values):
        written.add_attribute("noalias")
    loop = Loop(build)
    place, found = loop.carried(_NOTHING), loop.carried(_NOTHING)
    vector = build.load(build.gep(numbers, [place], source_etype=kind), typ=vector_of(kind), align=1)
    those = lanes(build, build.icmp_unsigned("!=", vector, all_lanes(kind, 0)))
    without = build.block
    with build.if_then(build.icmp_unsigned("!=", those, _NOTHING)):
        each = Loop(build)
        left, kept = each.carried(those), each.carried(found)
        position = build.add(place, build.cttz(left, ir.Constant(ir.IntType(1), 1)))
        number = build.load(build.gep(numbers, [position], source_etype=kind), typ=kind)
        build.store(build.trunc(position, I16), build.gep(offsets, [kept], source_etype=I16))
        build.store(number, build.gep(values, [kept], source_etype=kind))
        fewer = build.and_(left, build.sub(left, ir.Constant(I64, 1)))
        more = build.add(kept, ir.Constant(I64, 1))
        each.end({left: fewer, kept: more}, build.icmp_unsigned("!=", fewer, _NOTHING))
        some = build.block
    now = build.phi(I64)
    now.add_incoming(found, without)
    now.add_incoming(more, some)
    following = build.add(place, ir.Constant(I64, WIDTH))
    loop.end({place: following, found: now}, build.icmp_signed("<", following, count))
    build.ret(now)
    return build.module


def scattering_loop(itemsize: int) -> ir.Module:
    """A module with `loop(blocks, ends, offsets, values, out, first, size)`: each value goes to its place.

    That is its offset, plus where its block of 65,536 elements begins: at `first`, which may be negative, or behind the
    block before. `ends` has 64 bits for each block, and one number more: where its values begin. What would be outside
    of the `size` elements of `out` is left out.
    """
    kind = ir.IntType(8 * itemsize)
    build, (blocks, ends, offsets, values, out, first, size) = _function(ir.VoidType(), [I64], 4, [I64] * 2)
    out.add_attribute("noalias")
    outer = Loop(build)
    block = outer.carried(_NOTHING)
    next_block = build.add(block, ir.Constant(I64, 1))
    start, stop = (build.load(build.gep(ends, [each], source_etype=I64), typ=I64) for each in (block, next_block))
    begins = build.add(first, build.shl(block, ir.Constant(I64, 16)))
    with build.if_then(build.icmp_signed("<", start, stop)):
        inner = Loop(build)
        number = inner.carried(start)
        offset = build.load(build.gep(offsets, [number], source_etype=I16), typ=I16)
        place = build.add(build.zext(offset, I64), begins)
        with build.if_then(build.icmp_unsigned("<", place, size)):
            value = build.load(build.gep(values, [number], source_etype=kind), typ=kind)
            build.store(value, build.gep(out, [place], source_etype=kind))
        following = build.add(number, ir.Constant(I64, 1))
        inner.end({number: following}, build.icmp_signed("<", following, stop))
    outer.end({block: next_block}, build.icmp_signed("<", next_block, blocks))
    build.ret_void()
    return build.module


def _function(result: Any, before: list[Any], pointers: int, behind: list[Any] | None = None) -> tuple[Any, Any]:
    """A function `loop` in a module of its own, and its arguments: some numbers before and behind addresses."""
    kind = ir.FunctionType(result, [*before, *[POINTER] * pointers, *(behind or [])])
    function = ir.Function(ir.Module(), kind, "loop")
    return ir.IRBuilder(function.append_basic_block("before")), function.args


def _minus_zero(kind: torch.dtype) -> ir.Constant:
    return all_lanes(_BITS[kind.itemsize], -(1 << (8 * kind.itemsize - 1)))
