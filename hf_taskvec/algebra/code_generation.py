"""LLVM's instructions for elementwise expressions: reading stored numbers, the operations, and the rounding."""

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from hf_taskvec.algebra.elementwise import Element
from hf_taskvec.algebra.machine_code import WIDTH

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_SINGLE, _DOUBLE, _POINTER = ir.FloatType(), ir.DoubleType(), ir.PointerType()
_STORED = {torch.bfloat16: _I16, torch.float16: _I16, torch.float32: _SINGLE, torch.float64: _DOUBLE}
_BITS = {2: _I16, 4: _I32, 8: _I64}
_PRECISION = {torch.float32: _SINGLE, torch.float64: _DOUBLE}

# Lanes in which products are added up.
_FEW = 4

# The bits of fp32 numbers: infinity; the smallest normal one; the least that are infinite in 16 bits.
_INFINITE, _SMALLEST_NORMAL = 0x7F800000, 0x00800000
_TOO_LARGE = {torch.bfloat16: 0x7F7F8000, torch.float16: 0x477FF000, torch.float32: _INFINITE}


def elementwise_loop(element: Element, inputs: tuple[torch.dtype, ...], output: torch.dtype) -> ir.Module:
    """A module with the function `loop(count, addresses of the inputs, factors, address of the output)`.

    It gives 0, or something else if a number is not finite in the output's dtype or needs more care than it is given
    here. The last elements are those before the end, so a few are written twice: `count` is at least `WIDTH`.
    """
    loop = _Loop(inputs)
    build, out = loop.builder, loop.output
    out.add_attribute("noalias")
    largest, smallest = loop.carried(_all(_I32, 0)), loop.carried(_all(_I32, 0x7FFFFFFF))
    written, magnitude = rounded(build, loop.value(element), element.precision, output)
    build.store(written, build.gep(out, [loop.place], source_etype=_STORED[output]), align=1)
    more_than, less_than = largest, smallest
    if magnitude is not None:
        more_than = _extreme(build, ">", largest, magnitude)
        # Zero becomes the largest: it needs no care.
        less_than = _extreme(build, "<", smallest, build.sub(magnitude, _all(_I32, 1)))
    loop.end({largest: more_than, smallest: less_than})
    build.ret(_verdict(build, more_than, less_than, output))
    return loop.module


def histogram_loop(element: Element, inputs: tuple[torch.dtype, ...]) -> ir.Module:
    """A module with the function `loop(count, addresses of the inputs, factors, address of the histogram)`.

    The histogram begins with three 64-bit numbers: the first magnitude, as the bits of an fp32 number, how many bits to
    shift by, and how many bins there are. Behind them are the bins: how many elements are in each. What is below the
    first magnitude, or beyond the last bin, is counted in one bin more.
    """
    loop = _Loop(inputs)
    build, histogram = loop.builder, loop.output
    first, shift, bins = (
        build.load(build.gep(histogram, [ir.Constant(_I64, k)], source_etype=_I64), typ=_I64) for k in range(3)
    )
    counts = build.gep(histogram, [ir.Constant(_I64, 3)], source_etype=_I64)
    bits = build.bitcast(_converted(build, loop.value(element), torch.float32), _vector(_I32))
    distance = build.sub(build.and_(bits, _all(_I32, 0x7FFFFFFF)), _broadcast(build, build.trunc(first, _I32)))
    found = build.lshr(distance, _broadcast(build, build.trunc(shift, _I32)))
    beyond = _broadcast(build, build.trunc(bins, _I32))
    inside = build.and_(build.icmp_unsigned("<", found, beyond), _is_new(loop))
    with build.if_then(_any(build, inside)):
        places = build.zext(build.select(inside, found, beyond), _vector(_I64))
        for lane in range(WIDTH):
            place = build.extract_element(places, ir.Constant(_I32, lane))
            address = build.gep(counts, [place], source_etype=_I64)
            build.store(build.add(build.load(address, typ=_I64), ir.Constant(_I64, 1)), address)
    loop.end({})
    build.ret(ir.Constant(_I64, 0))
    return loop.module


def products_loop(elements: Sequence[Element], inputs: tuple[torch.dtype, ...]) -> ir.Module:
    """A module with the function `loop(count, addresses of the inputs, factors, address of the products)`.

    The products are fp64 numbers, to which the inner product of each expression with itself and with those before it is
    added: of the first with itself, of the second with the first, of the second with itself, and so on.
    """
    loop = _Loop(inputs)
    build, zero = loop.builder, _all(_DOUBLE, 0.0)
    new = _is_new(loop)
    values = [build.select(new, _converted(build, loop.value(each), torch.float64), zero) for each in elements]
    sums = {}
    for number, one in enumerate(values):
        for other in values[: number + 1]:
            product, width = build.fmul(one, other), WIDTH
            while width > _FEW:  # few accumulators stay in registers, however many lanes there are
                width //= 2
                product = build.fadd(*(_half(build, product, first, width) for first in (0, width)))
            total = loop.carried(ir.Constant(ir.VectorType(_DOUBLE, _FEW), [0.0] * _FEW))
            sums[total] = build.fadd(total, product)
    loop.end(sums)
    for number, found in enumerate(sums.values()):
        address = build.gep(loop.output, [ir.Constant(_I64, number)], source_etype=_DOUBLE)
        whole = build.load(address, typ=_DOUBLE)
        for lane in range(_FEW):
            whole = build.fadd(whole, build.extract_element(found, ir.Constant(_I32, lane)))
        build.store(whole, address)
    build.ret(ir.Constant(_I64, 0))
    return loop.module


def _half(build: ir.IRBuilder, vector: Any, first: int, width: int) -> Any:
    lanes = ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width)))
    return build.shuffle_vector(vector, vector, lanes)


def _is_new(loop: "_Loop") -> Any:
    """Which elements are worked on for the first time: of those before the end, some were before."""
    build, lanes = loop.builder, ir.Constant(_vector(_I64), list(range(WIDTH)))
    return build.icmp_signed(">=", build.add(_broadcast(build, loop.place), lanes), _broadcast(build, loop.index))


class _Loop:
    """A function that goes over all elements, `WIDTH` at a time, while its body is written down.

    Attributes:
        builder (`ir.IRBuilder`):
            At the end of the body, and then of the function.
        index:
            The first of the elements that are next.
        place:
            The first that is worked on: the same, or near the end a little before it.
        output:
            The function's last argument.
    """

    def __init__(self, inputs: tuple[torch.dtype, ...]) -> None:
        self.module = ir.Module()
        function = ir.Function(self.module, ir.FunctionType(_I64, [_I64, _POINTER, _POINTER, _POINTER]), "loop")
        self._count, addresses, factors, self.output = function.args
        self._before, self._body = function.append_basic_block("before"), function.append_basic_block("body")
        self.builder = build = ir.IRBuilder(self._before)
        self._vectors = _Vectors(build, inputs, addresses, factors)
        last = build.sub(self._count, ir.Constant(_I64, WIDTH))
        build.branch(self._body)
        build.position_at_end(self._body)
        self.index = self.carried(ir.Constant(_I64, 0))
        self.place = build.select(build.icmp_signed("<", self.index, last), self.index, last)

    def value(self, element: Element) -> Any:
        """An expression's value for the elements that are worked on."""
        return self._vectors.value(element, self.place)

    def carried(self, first: ir.Constant) -> Any:
        """A value that is handed on from one time to the next."""
        self.builder.position_at_start(self._body)
        phi = self.builder.phi(first.type)
        phi.add_incoming(first, self._before)
        self.builder.position_at_end(self._body)
        return phi

    def end(self, carried: dict[Any, Any]) -> None:
        """Go on with what is carried, or behind the loop."""
        build, ended = self.builder, self.builder.block
        following = build.add(self.index, ir.Constant(_I64, WIDTH))
        for phi, value in {self.index: following, **carried}.items():
            phi.add_incoming(value, ended)
        after = build.function.append_basic_block("after")
        build.cbranch(build.icmp_signed("<", following, self._count), self._body, after)
        build.position_at_end(after)


class _Vectors:
    """The values of an expression for the elements from a place on. Each stored one is read once."""

    def __init__(self, builder: ir.IRBuilder, inputs: tuple[torch.dtype, ...], addresses: Any, factors: Any) -> None:
        self._builder, self._inputs, self._factors = builder, inputs, factors
        self._addresses = [
            builder.load(builder.gep(addresses, [ir.Constant(_I64, k)], source_etype=_POINTER), typ=_POINTER)
            for k in range(len(inputs))
        ]
        self._scalars: dict[int, Any] = {}

    def value(self, element: Element, place: Any, known: dict[Element, Any] | None = None) -> Any:
        known = {} if known is None else known
        if element not in known:
            operands = [self.value(each, place, known) for each in element.operands]
            known[element] = self._made(element, place, operands)
        return known[element]

    def _made(self, element: Element, place: Any, operands: list[Any]) -> Any:
        build = self._builder
        match element.operation:
            case "input":
                kind = self._inputs[element.number]
                address = build.gep(self._addresses[element.number], [place], source_etype=_STORED[kind])
                number = widened(build, build.load(address, typ=_vector(_STORED[kind]), align=1), kind)
                return _converted(build, number, element.precision)
            case "factor":
                address = build.gep(self._factors, [ir.Constant(_I64, element.number)], source_etype=_DOUBLE)
                scalar = build.load(address, typ=_DOUBLE)
                if element.precision == torch.float32:
                    scalar = build.fptrunc(scalar, _SINGLE)
                return _broadcast(build, scalar)
            case "add":
                return build.fadd(*operands)
            case "subtract":
                return build.fsub(*operands)
            case "multiply":
                return build.fmul(*operands)
            case "divide":
                return build.fdiv(*operands)
            case "above":
                return build.fcmp_ordered(">", *operands)
            case "choose":
                return build.select(*operands)
            case "single":
                return build.fptrunc(operands[0], _vector(_SINGLE))
            case "magnitude":
                whole = _I32 if element.precision == torch.float32 else _I64
                bits = build.bitcast(operands[0], _vector(whole))
                cleared = build.and_(bits, _all(whole, (1 << (whole.width - 1)) - 1))
                return build.bitcast(cleared, operands[0].type)


def widened(build: ir.IRBuilder, number: Any, kind: torch.dtype) -> Any:
    """A stored number as fp32, or as fp64 if it is that."""
    if kind in (torch.float32, torch.float64):
        return number
    bits = build.zext(number, _vector(_I32))
    if kind == torch.bfloat16:
        return build.bitcast(build.shl(bits, _all(_I32, 16)), _vector(_SINGLE))
    # fp16's exponents are 112 less. Subnormal numbers get a leading one, which is subtracted again.
    sign = build.shl(build.and_(bits, _all(_I32, 0x8000)), _all(_I32, 16))
    magnitude = build.and_(bits, _all(_I32, 0x7FFF))
    moved = build.add(build.shl(magnitude, _all(_I32, 13)), _all(_I32, 112 << 23))
    finite = build.icmp_unsigned("<", magnitude, _all(_I32, 0x7C00))
    normal = build.select(finite, moved, build.or_(moved, _all(_I32, _INFINITE)))
    one_more = build.bitcast(build.add(moved, _all(_I32, 1 << 23)), _vector(_SINGLE))
    subnormal = build.bitcast(build.fsub(one_more, _all(_SINGLE, 2.0**-14)), _vector(_I32))
    small = build.icmp_unsigned("<", magnitude, _all(_I32, 0x400))
    return build.bitcast(build.or_(build.select(small, subnormal, normal), sign), _vector(_SINGLE))


def rounded(build: ir.IRBuilder, number: Any, precision: torch.dtype, output: torch.dtype) -> tuple[Any, Any]:
    """A number as it is stored, rounded once; and the bits of its magnitude in fp32, if there is something to look at.

    fp64 becomes fp32 by rounding to odd, as in `rounding.round_once`, and fp32 a 16-bit number by rounding to nearest
    even: the sum of what is cut off, almost a half, and the last bit that stays carries by itself.
    """
    if output == torch.float64:
        return _converted(build, number, torch.float64), None
    single = number
    if precision == torch.float64:
        single = build.fptrunc(number if output == torch.float32 else _odd(build, number), _vector(_SINGLE))
    bits = build.bitcast(single, _vector(_I32))
    magnitude = build.and_(bits, _all(_I32, 0x7FFFFFFF))
    if output == torch.float32:
        return single, magnitude
    if output == torch.bfloat16:  # fp32's upper half: the sign stays where it is
        return build.trunc(_cut_off(build, bits, 16), _vector(_I16)), magnitude
    # Below 2**-14 its numbers are the multiples of 2**-24, and so are those of fp32 from a half on.
    shifted = build.fadd(build.bitcast(magnitude, _vector(_SINGLE)), _all(_SINGLE, 0.5))
    subnormal = build.sub(build.bitcast(shifted, _vector(_I32)), _all(_I32, 0x3F000000))
    small = build.icmp_unsigned("<", magnitude, _all(_I32, 113 << 23))
    half = build.select(small, subnormal, build.sub(_cut_off(build, magnitude, 13), _all(_I32, 112 << 10)))
    sign = build.and_(build.lshr(bits, _all(_I32, 16)), _all(_I32, 0x8000))
    return build.trunc(build.or_(half, sign), _vector(_I16)), magnitude


def _cut_off(build: ir.IRBuilder, bits: Any, count: int) -> Any:
    """Bits without the last ones, rounded to nearest even."""
    shortened = build.lshr(bits, _all(_I32, count))
    last = build.and_(shortened, _all(_I32, 1))
    almost_half = _all(_I32, (1 << (count - 1)) - 1)
    return build.lshr(build.add(build.add(bits, almost_half), last), _all(_I32, count))


def _odd(build: ir.IRBuilder, number: Any) -> Any:
    """An fp64 number whose last bits, which fp32 does not have, are folded into the one before them."""
    below = _all(_I64, (1 << 29) - 1)
    bits = build.bitcast(number, _vector(_I64))
    folded = build.or_(build.add(build.and_(bits, below), below), bits)
    return build.bitcast(build.and_(folded, _all(_I64, -(1 << 29))), _vector(_DOUBLE))


def _verdict(build: ir.IRBuilder, largest: Any, smallest: Any, output: torch.dtype) -> Any:
    """1 if a number is too large for the output, or (bf16) so small that fp32 has too few bits for it."""
    if output == torch.float64:
        return ir.Constant(_I64, 0)
    found = build.icmp_unsigned(">=", largest, _all(_I32, _TOO_LARGE[output]))
    if output == torch.bfloat16:
        small = build.icmp_unsigned("<", smallest, _all(_I32, _SMALLEST_NORMAL - 1))
        found = build.or_(found, small)
    return build.zext(_any(build, found), _I64)


def _any(build: ir.IRBuilder, conditions: Any) -> Any:
    mask = build.bitcast(conditions, ir.IntType(WIDTH))
    return build.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(WIDTH), 0))


def _converted(build: ir.IRBuilder, number: Any, precision: torch.dtype) -> Any:
    wanted = _vector(_PRECISION[precision])
    if number.type == wanted:
        return number
    return build.fptrunc(number, wanted) if precision == torch.float32 else build.fpext(number, wanted)


def _extreme(build: ir.IRBuilder, which: str, one: Any, other: Any) -> Any:
    return build.select(build.icmp_unsigned(which, one, other), one, other)


def _broadcast(build: ir.IRBuilder, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, WIDTH)
    one = build.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return build.shuffle_vector(one, ir.Constant(vector, ir.Undefined), _all(_I32, 0))


def _vector(kind: Any) -> ir.VectorType:
    return ir.VectorType(kind, WIDTH)


def _all(kind: Any, value: float) -> ir.Constant:
    return ir.Constant(_vector(kind), [value] * WIDTH)


def split_loop(tuned: torch.dtype, base: torch.dtype, output: torch.dtype) -> ir.Module:
    """A module with `loop(count, tuned, base, high, low, report)`: the parts of a difference (`exact_difference`).

    The report gets four numbers: how many elements of the high part and of the low part have a bit that is set; whether
    -0.0 is among the inputs; and whether a number is not finite in the output's dtype, and all else is void. `count` is
    a multiple of `WIDTH`.

    A difference of 16-bit numbers is made in fp32, any other in fp64. Where that is exact, rounding it gives the high
    part. Where it is not, the smaller number is so small that the high part is the larger one, and what was lost
    (Knuth's TwoSum) is in the low part.
    """
    precision = torch.float32 if {tuned, base} in ({torch.bfloat16}, {torch.float16}) else torch.float64
    stored = _BITS[output.itemsize]
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64, *[_POINTER] * 5]), "loop")
    count, from_tuned, from_base, to_high, to_low, report = function.args
    for written in (to_high, to_low):
        written.add_attribute("noalias")
    before, loop, after = (function.append_basic_block(name) for name in ("before", "loop", "after"))
    build = ir.IRBuilder(before)
    build.branch(loop)

    build.position_at_end(loop)
    place, *counted, zeros = (build.phi(_I64) for _ in range(4))
    largest = build.phi(_vector(_I32))

    def read(address: Any, kind: torch.dtype) -> tuple[Any, Any]:
        """The numbers, and which of them are -0.0."""
        bits = _BITS[kind.itemsize]
        found = build.load(build.gep(address, [place], source_etype=bits), typ=_vector(bits), align=1)
        number = widened(build, build.bitcast(found, _vector(_STORED[kind])), kind)
        return _converted(build, number, precision), build.icmp_unsigned("==", found, _minus_zero(kind))

    (minuend, became), (subtrahend, was) = read(from_tuned, tuned), read(from_base, base)
    # Adding zero makes 0.0 of -0.0, so that -0.0 less either is -0.0.
    total = build.fsub(minuend, build.fadd(subtrahend, _all(_PRECISION[precision], 0.0)))
    taken = build.fsub(total, minuend)
    error = build.fsub(build.fsub(minuend, build.fsub(total, taken)), build.fadd(subtrahend, taken))
    high, magnitude = rounded(build, total, precision, output)
    remaining = build.fadd(build.fsub(total, _converted(build, widened(build, high, output), precision)), error)
    if precision == torch.float32 and output == torch.bfloat16:  # nothing to round
        low = build.trunc(build.lshr(build.bitcast(remaining, _vector(_I32)), _all(_I32, 16)), _vector(_I16))
    else:
        low, _ = rounded(build, remaining, precision, output)
    high, low = (build.bitcast(each, _vector(stored)) for each in (high, low))
    low = build.select(became, _minus_zero(output), low)
    for part, address in ((high, to_high), (low, to_low)):
        build.store(part, build.gep(address, [place], source_etype=stored), align=1)

    following = build.add(place, ir.Constant(_I64, WIDTH))
    more = [
        build.add(old, build.ctpop(_lanes(build, build.icmp_unsigned("!=", each, _all(stored, 0)))))
        for old, each in zip(counted, (high, low), strict=True)
    ]
    more_zeros = build.or_(zeros, _lanes(build, build.or_(became, was)))
    now_largest = _extreme(build, ">", largest, magnitude)
    for phi, new in zip((place, *counted, zeros), (following, *more, more_zeros), strict=True):
        phi.add_incoming(ir.Constant(_I64, 0), before)
        phi.add_incoming(new, loop)
    largest.add_incoming(_all(_I32, 0), before)
    largest.add_incoming(now_largest, loop)
    build.cbranch(build.icmp_signed("<", following, count), loop, after)

    build.position_at_end(after)
    too_large = _lanes(build, build.icmp_unsigned(">=", now_largest, _all(_I32, _TOO_LARGE[output])))
    for number, value in enumerate((*more, more_zeros, too_large)):
        build.store(value, build.gep(report, [ir.Constant(_I64, number)], source_etype=_I64))
    build.ret_void()
    return module


def collecting_loop(itemsize: int) -> ir.Module:
    """A module with `loop(count, numbers, offsets, values)`: it gives how many numbers have a bit that is set.

    Where these stand goes to `offsets`, 16 bits each, and they themselves to `values`; both have room for all. `count`
    is a multiple of `WIDTH`.
    """
    kind, module = ir.IntType(8 * itemsize), ir.Module()
    function = ir.Function(module, ir.FunctionType(_I64, [_I64, *[_POINTER] * 3]), "loop")
    count, numbers, offsets, values = function.args
    for written in (offsets, values):
        written.add_attribute("noalias")
    names = ("before", "loop", "one", "onwards", "after")
    before, loop, one, onwards, after = (function.append_basic_block(name) for name in names)
    build = ir.IRBuilder(before)
    build.branch(loop)

    build.position_at_end(loop)
    place, found = build.phi(_I64), build.phi(_I64)
    vector = build.load(build.gep(numbers, [place], source_etype=kind), typ=_vector(kind), align=1)
    lanes = _lanes(build, build.icmp_unsigned("!=", vector, _all(kind, 0)))
    some = build.icmp_unsigned("!=", lanes, ir.Constant(_I64, 0))
    build.cbranch(some, one, onwards)

    build.position_at_end(one)
    left, kept = build.phi(_I64), build.phi(_I64)
    position = build.add(place, build.cttz(left, ir.Constant(ir.IntType(1), 1)))
    number = build.load(build.gep(numbers, [position], source_etype=kind), typ=kind)
    build.store(build.trunc(position, _I16), build.gep(offsets, [kept], source_etype=_I16))
    build.store(number, build.gep(values, [kept], source_etype=kind))
    fewer = build.and_(left, build.sub(left, ir.Constant(_I64, 1)))
    more = build.add(kept, ir.Constant(_I64, 1))
    for phi, first, new in ((left, lanes, fewer), (kept, found, more)):
        phi.add_incoming(first, loop)
        phi.add_incoming(new, one)
    build.cbranch(build.icmp_unsigned("!=", fewer, ir.Constant(_I64, 0)), one, onwards)

    build.position_at_end(onwards)
    now = build.phi(_I64)
    now.add_incoming(found, loop)
    now.add_incoming(more, one)
    following = build.add(place, ir.Constant(_I64, WIDTH))
    for phi, new in ((place, following), (found, now)):
        phi.add_incoming(ir.Constant(_I64, 0), before)
        phi.add_incoming(new, onwards)
    build.cbranch(build.icmp_signed("<", following, count), loop, after)

    build.position_at_end(after)
    build.ret(now)
    return module


def scattering_loop(itemsize: int) -> ir.Module:
    """A module with `loop(count, offsets, values, out, first, size)`: each value goes to its offset plus `first`.

    `first` may be negative. What would be outside of the `size` elements of `out` is left out.
    """
    kind, module = ir.IntType(8 * itemsize), ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64, *[_POINTER] * 3, _I64, _I64]), "loop")
    count, offsets, values, out, first, size = function.args
    out.add_attribute("noalias")
    names = ("before", "loop", "inside", "onwards", "after")
    before, loop, inside, onwards, after = (function.append_basic_block(name) for name in names)
    build = ir.IRBuilder(before)
    build.branch(loop)

    build.position_at_end(loop)
    number = build.phi(_I64)
    offset = build.load(build.gep(offsets, [number], source_etype=_I16), typ=_I16)
    place = build.add(build.zext(offset, _I64), first)
    build.cbranch(build.icmp_unsigned("<", place, size), inside, onwards)

    build.position_at_end(inside)
    value = build.load(build.gep(values, [number], source_etype=kind), typ=kind)
    build.store(value, build.gep(out, [place], source_etype=kind))
    build.branch(onwards)

    build.position_at_end(onwards)
    following = build.add(number, ir.Constant(_I64, 1))
    number.add_incoming(ir.Constant(_I64, 0), before)
    number.add_incoming(following, onwards)
    build.cbranch(build.icmp_signed("<", following, count), loop, after)

    build.position_at_end(after)
    build.ret_void()
    return module


def _minus_zero(kind: torch.dtype) -> ir.Constant:
    return _all(_BITS[kind.itemsize], -(1 << (8 * kind.itemsize - 1)))


def _lanes(build: ir.IRBuilder, condition: Any) -> Any:
    """A bit for each lane in which a condition holds."""
    return build.zext(build.bitcast(condition, ir.IntType(WIDTH)), _I64)
