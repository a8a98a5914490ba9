"""Arithmetic on the elements of several tensors, written down once and evaluated by torch or by machine code.

An `Element` says what becomes of one element of the inputs: an expression over them and over numbers that are given
when it is evaluated. `evaluate` does it by torch, on any device, with a pass over memory for each operation;
`machine_code` in one pass for all of them, on the CPU. The operations and their order are the same, and so are the
bits.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Operation = Literal[
    "input", "factor", "add", "subtract", "multiply", "divide", "magnitude", "above", "choose", "single"
]


@dataclass(frozen=True, eq=False)
class Element:
    """An expression in fp64 or fp32, each operation rounded to nearest even.

    There is one object for each expression, so that two that are the same are found to be so at once: they are made by
    `stored`, `factor` and operators.

    Args:
        operation (`str`):
            What is done.
        operands (`tuple` of `Element`, *optional*):
            With what, in the same precision.
        number (`int`, *optional*, defaults to 0):
            Of the input or the factor that is read.
        precision (`torch.dtype`, *optional*, defaults to `torch.float64`):
            What it gives; `torch.bool` for a condition.

    Example:
        >>> base, tuned = stored(0), stored(1)
        >>> moved = base + factor(0) * (tuned - base)
        >>> evaluate(moved, [torch.tensor([1.0]), torch.tensor([3.0])], [0.5])
        tensor([2.], dtype=torch.float64)

    """

    operation: Operation
    operands: tuple["Element", ...] = ()
    number: int = 0
    precision: torch.dtype = torch.float64

    def __add__(self, other: "Element") -> "Element":
        return _element("add", (self, other), 0, self.precision)

    def __sub__(self, other: "Element") -> "Element":
        return _element("subtract", (self, other), 0, self.precision)

    def __mul__(self, other: "Element") -> "Element":
        return _element("multiply", (self, other), 0, self.precision)

    def __truediv__(self, other: "Element") -> "Element":
        return _element("divide", (self, other), 0, self.precision)

    def __gt__(self, other: "Element") -> "Element":
        """Whether it is larger: false where one of the two is NaN."""
        return _element("above", (self, other), 0, torch.bool)

    def __abs__(self) -> "Element":
        return _element("magnitude", (self,), 0, self.precision)

    def choose(self, yes: "Element", no: "Element") -> "Element":
        """Of a condition: the one or the other."""
        return _element("choose", (self, yes, no), 0, yes.precision)

    def single(self) -> "Element":
        """Rounded to fp32."""
        return self if self.precision == torch.float32 else _element("single", (self,), 0, torch.float32)


_element = functools.cache(Element)


def stored(number: int, precision: torch.dtype = torch.float64) -> Element:
    """An element of the input of that number."""
    return _element("input", (), number, precision)


def factor(number: int, precision: torch.dtype = torch.float64) -> Element:
    """One of the numbers that are given when it is evaluated."""
    return _element("factor", (), number, precision)


def in_single(element: Element) -> Element:
    """The same operations on the same inputs and factors, in fp32."""
    return _element(element.operation, tuple(map(in_single, element.operands)), element.number, torch.float32)


def is_pair(element: Element) -> bool:
    """Whether it is the sum or the difference of two inputs, each of which a factor may be multiplied by."""

    def is_summand(one: Element) -> bool:
        is_product = one.operation == "multiply" and one.operands[0].operation == "factor"
        return (one.operands[1] if is_product else one).operation == "input"

    return element.operation in ("add", "subtract") and all(map(is_summand, element.operands))


_TORCH: dict[Operation, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "magnitude": torch.abs,
    "above": torch.gt,
    "choose": torch.where,
    "single": lambda number: number.float(),
}


def evaluate(element: Element, inputs: Sequence[torch.Tensor], factors: Sequence[float]) -> torch.Tensor:
    """What an expression gives, by torch.

    Args:
        element (`Element`):
            The expression.
        inputs (`Sequence[torch.Tensor]`):
            Of one shape, on one device.
        factors (`Sequence[float]`):
            Its numbers.

    Returns:
        `torch.Tensor`: In the precision of the expression.
    """
    device = inputs[0].device
    known: dict[Element, torch.Tensor] = {}

    def value(of: Element) -> torch.Tensor:
        if of not in known:
            if of.operation == "input":
                known[of] = inputs[of.number].to(of.precision)
            elif of.operation == "factor":
                known[of] = torch.tensor(factors[of.number], dtype=of.precision, device=device)
            else:
                known[of] = _TORCH[of.operation](*map(value, of.operands))
        return known[of]

    return value(element)
