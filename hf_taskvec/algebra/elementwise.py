"""Arithmetic on the elements of several tensors, written down once and evaluated by torch or by machine code.

An `Element` says what becomes of one element of the inputs: an expression over them and over numbers that are given
when it is evaluated. `evaluate` does it by torch, on any device, with a pass over memory for each operation;
`machine_code` in one pass for all of them, on the CPU. The operations and their order are the same, and so are the
bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Operation = Literal["input", "factor", "add", "subtract", "multiply", "divide", "above", "choose", "single", "double"]


@dataclass(frozen=True)
class Element:
    """An expression in fp64 or fp32, each operation rounded to nearest even.

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
        return Element("add", (self, other), precision=self.precision)

    def __sub__(self, other: "Element") -> "Element":
        return Element("subtract", (self, other), precision=self.precision)

    def __mul__(self, other: "Element") -> "Element":
        return Element("multiply", (self, other), precision=self.precision)

    def __truediv__(self, other: "Element") -> "Element":
        return Element("divide", (self, other), precision=self.precision)

    def __gt__(self, other: "Element") -> "Element":
        """Whether it is larger: false where one of the two is NaN."""
        return Element("above", (self, other), precision=torch.bool)

    def choose(self, yes: "Element", no: "Element") -> "Element":
        """Of a condition: the one or the other."""
        return Element("choose", (self, yes, no), precision=yes.precision)

    def single(self) -> "Element":
        """Rounded to fp32."""
        return self if self.precision == torch.float32 else Element("single", (self,), precision=torch.float32)

    def double(self) -> "Element":
        """The same number in fp64."""
        return self if self.precision == torch.float64 else Element("double", (self,))


def stored(number: int, precision: torch.dtype = torch.float64) -> Element:
    """An element of the input of that number; its dtype must have no more bits than the precision."""
    return Element("input", number=number, precision=precision)


def factor(number: int, precision: torch.dtype = torch.float64) -> Element:
    """One of the numbers that are given when it is evaluated."""
    return Element("factor", number=number, precision=precision)


_TORCH: dict[Operation, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "above": torch.gt,
    "choose": torch.where,
    "single": lambda number: number.float(),
    "double": lambda number: number.double(),
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

    def value(of: Element) -> torch.Tensor:
        if of.operation == "input":
            return inputs[of.number].to(of.precision)
        if of.operation == "factor":
            return torch.tensor(factors[of.number], dtype=of.precision, device=device)
        return _TORCH[of.operation](*map(value, of.operands))

    return value(element)
