"""LLVM's instructions for elementwise expressions: loops over stored numbers, and the operations."""

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from hf_taskvec.algebra.elementwise import Element
from hf_taskvec.algebra.loop_instructions import Loop
from hf_taskvec.algebra.machine_code import WIDTH
from hf_taskvec.algebra.vector_instructions import (
    DOUBLE,
    I32,
    I64,
    POINTER,
    SINGLE,
    STORED,
    TOO_LARGE,
    all_lanes,
    any_lane,
    broadcast,
    converted,
    extreme,
    rounded,
    vector_of,
    widened,
)

# Lanes in which products are added up.
_FEW = 4

# The bits of the smallest normal fp32 number.
_SMALLEST_NORMAL = 0x00800000


def elementwise_loop(element: Element, inputs: tuple[torch.dtype, ...], output: torch.dtype) -> ir.Module:
    """A module with the function `loop(count, addresses of the inputs, factors, address of the output)`.

    It gives 0, or something else if a number is not finite in the output's dtype or needs more care than it is given
    here. The last elements are those before the end, so a few are written twice: `count` is at least `WIDTH`.
    """
    loop = _ElementLoop(inputs)
    build, out = loop.builder, loop.output
    out.add_attribute("noalias")
    largest, smallest = loop.carried(all_lanes(I32, 0)), loop.carried(all_lanes(I32, 0x7FFFFFFF))
    # Where a number is not normal, what is written does not count.
    written, magnitude = rounded(build, loop.value(element), element.precision, output, is_normal=True)
    build.store(written, build.gep(out, [loop.place], source_etype=STORED[output]), align=1)
    more_than, less_than = largest, smallest
    if magnitude is not None:
        more_than = extreme(build, ">", largest, magnitude)
        # Zero becomes the largest: it needs no care.
        less_than = extreme(build, "<", smallest, build.sub(magnitude, all_lanes(I32, 1)))
    loop.end({largest: more_than, smallest: less_than})
    build.ret(_verdict(build, more_than, less_than, output))
    return loop.module


def histogram_loop(element: Element, inputs: tuple[torch.dtype, ...]) -> ir.Module:
    """A module with the function `loop(count, addresses of the inputs, factors, address of the histogram)`.

    The histogram begins with three 64-bit numbers: the first magnitude, as the bits of an fp32 number, how many bits to
    shift by, and how many bins there are. Behind them are the bins: how many elements are in each. What is below the
    first magnitude, or beyond the last bin, is counted in one bin more.
    """
    loop = _ElementLoop(inputs)
    build, histogram = loop.builder, loop.output
    first, shift, bins = (
        build.load(build.gep(histogram, [ir.Constant(I64, k)], source_etype=I64), typ=I64) for k in range(3)
    )
    counts = build.gep(histogram, [ir.Constant(I64, 3)], source_etype=I64)
    bits = build.bitcast(converted(build, loop.value(element), torch.float32), vector_of(I32))
    distance = build.sub(build.and_(bits, all_lanes(I32, 0x7FFFFFFF)), broadcast(build, build.trunc(first, I32)))
    found = build.lshr(distance, broadcast(build, build.trunc(shift, I32)))
    beyond = broadcast(build, build.trunc(bins, I32))
    inside = build.and_(build.icmp_unsigned("<", found, beyond), _is_new(loop))
    with build.if_then(any_lane(build, inside)):
        places = build.zext(build.select(inside, found, beyond), vector_of(I64))
        for lane in range(WIDTH):
            place = build.extract_element(places, ir.Constant(I32, lane))
            address = build.gep(counts, [place], source_etype=I64)
            build.store(build.add(build.load(address, typ=I64), ir.Constant(I64, 1)), address)
    loop.end({})
    build.ret(ir.Constant(I64, 0))
    return loop.module


def products_loop(elements: Sequence[Element], inputs: tuple[torch.dtype, ...]) -> ir.Module:
    """A module with the function `loop(count, addresses of the inputs, factors, address of the products)`.

    The products are fp64 numbers, to which the inner product of each expression with itself and with those before it is
    added: of the first with itself, of the second with the first, of the second with itself, and so on.
    """
    loop = _ElementLoop(inputs)
    build, zero = loop.builder, all_lanes(DOUBLE, 0.0)
    new = _is_new(loop)
    values = [build.select(new, converted(build, loop.value(each), torch.float64), zero) for each in elements]
    sums = {}
    for number, one in enumerate(values):
        for other in values[: number + 1]:
            product, width = build.fmul(one, other), WIDTH
            while width > _FEW:  # few accumulators stay in registers, however many lanes there are
                width //= 2
                product = build.fadd(*(_half(build, product, first, width) for first in (0, width)))
            total = loop.carried(ir.Constant(ir.VectorType(DOUBLE, _FEW), [0.0] * _FEW))
            sums[total] = build.fadd(total, product)
    loop.end(sums)
    for number, found in enumerate(sums.values()):
        address = build.gep(loop.output, [ir.Constant(I64, number)], source_etype=DOUBLE)
        whole = build.load(address, typ=DOUBLE)
        for lane in range(_FEW):
            whole = build.fadd(whole, build.extract_element(found, ir.Constant(I32, lane)))
        build.store(whole, address)
    build.ret(ir.Constant(I64, 0))
    return loop.module


def _half(build: ir.IRBuilder, vector: Any, first: int, width: int) -> Any:
    lanes = ir.Constant(ir.VectorType(I32, width), list(range(first, first + width)))
    return build.shuffle_vector(vector, vector, lanes)


def _is_new(loop: "_ElementLoop") -> Any:
    """Which elements are worked on for the first time: of those before the end, some were before."""
    build, lanes = loop.builder, ir.Constant(vector_of(I64), list(range(WIDTH)))
    return build.icmp_signed(">=", build.add(broadcast(build, loop.place), lanes), broadcast(build, loop.index))


class _ElementLoop:
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
        carried (`Callable`):
            See `Loop.carried`.
    """

    def __init__(self, inputs: tuple[torch.dtype, ...]) -> None:
        self.module = ir.Module()
        function = ir.Function(self.module, ir.FunctionType(I64, [I64, POINTER, POINTER, POINTER]), "loop")
        self._count, addresses, factors, self.output = function.args
        self.builder = build = ir.IRBuilder(function.append_basic_block("before"))
        self._vectors = _Vectors(build, inputs, addresses, factors)
        last = build.sub(self._count, ir.Constant(I64, WIDTH))
        self._loop = Loop(build)
        self.carried = self._loop.carried
        self.index = self.carried(ir.Constant(I64, 0))
        self.place = build.select(build.icmp_signed("<", self.index, last), self.index, last)

    def value(self, element: Element) -> Any:
        """An expression's value for the elements that are worked on."""
        return self._vectors.value(element, self.place)

    def end(self, carried: dict[Any, Any]) -> None:
        """Go on with what is carried, or behind the loop."""
        following = self.builder.add(self.index, ir.Constant(I64, WIDTH))
        again = self.builder.icmp_signed("<", following, self._count)
        self._loop.end({self.index: following, **carried}, again)


class _Vectors:
    """The values of an expression for the elements from a place on. Each stored one is read once."""

    def __init__(self, builder: ir.IRBuilder, inputs: tuple[torch.dtype, ...], addresses: Any, factors: Any) -> None:
        self._builder, self._inputs, self._factors = builder, inputs, factors
        self._addresses = [
            builder.load(builder.gep(addresses, [ir.Constant(I64, k)], source_etype=POINTER), typ=POINTER)
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
                address = build.gep(self._addresses[element.number], [place], source_etype=STORED[kind])
                number = widened(build, build.load(address, typ=vector_of(STORED[kind]), align=1), kind)
                return converted(build, number, element.precision)
            case "factor":
                address = build.gep(self._factors, [ir.Constant(I64, element.number)], source_etype=DOUBLE)
                scalar = build.load(address, typ=DOUBLE)
                if element.precision == torch.float32:
                    scalar = build.fptrunc(scalar, SINGLE)
                return broadcast(build, scalar)
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
                return build.fptrunc(operands[0], vector_of(SINGLE))
            case "magnitude":
                whole = I32 if element.precision == torch.float32 else I64
                bits = build.bitcast(operands[0], vector_of(whole))
                cleared = build.and_(bits, all_lanes(whole, (1 << (whole.width - 1)) - 1))
                return build.bitcast(cleared, operands[0].type)


def _verdict(build: ir.IRBuilder, largest: Any, smallest: Any, output: torch.dtype) -> Any:
    """1 if a number is too large for the output, or (bf16) so small that fp32 has too few bits for it."""
    if output == torch.float64:
        return ir.Constant(I64, 0)
    found = build.icmp_unsigned(">=", largest, all_lanes(I32, TOO_LARGE[output]))
    if output == torch.bfloat16:
        small = build.icmp_unsigned("<", smallest, all_lanes(I32, _SMALLEST_NORMAL - 1))
        found = build.or_(found, small)
    return build.zext(any_lane(build, found), I64)
