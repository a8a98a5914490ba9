"""Sums of stored tensors as elementwise expressions: which tensors, with which numbers, in which order.

The order defines the result to the last bit, in fp64: the changes of weights such as 0.3 first, each the exact
difference of its tensors times its weight, added from the left; then what is folded, the target among it; then what was
computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hf_taskvec.algebra.elementwise import Element, evaluate, factor, in_single, is_pair, stored
from hf_taskvec.algebra.machine_code import (
    COMPILED_DTYPES,
    WIDTH,
    MachineCode,
    Use,
    can_compile,
    compiled,
    machine_code,
)
from hf_taskvec.algebra.sources import Readable, rows_of

#: coefficient and stored tensor, in the order in which they are added
Weighted = Sequence[tuple[float, Readable]]
#: the weights of changes, and what they are sums of
Scaled = Sequence[tuple[float, Weighted]]

# Loading the compiler takes a tenth of a second, and an expression some hundredths: for less than this many elements
# torch is sooner done.
LEAST = 1 << 16

# Expressions of which all inner products are made in one pass: of more, the sums do not stay near a core.
MOST_PRODUCTS = 8


@dataclass(frozen=True, eq=False)
class Formula:
    """An elementwise expression with the tensors that it reads.

    Args:
        element (`Element`):
            The expression.
        tensors (`tuple` of `Readable` or `None`):
            Its inputs; `None` for what is made tile by tile and given when it is used.
        factors (`tuple` of `float`):
            Its numbers.
    """

    element: Element
    tensors: tuple[Readable | None, ...]
    factors: tuple[float, ...]
    _codes: dict[tuple[object, ...], MachineCode] = field(default_factory=dict, repr=False)

    def write(self, out: torch.Tensor, start: int, stop: int, made: Sequence[torch.Tensor] = ()) -> bool:
        """Write rows `start:stop` by machine code, rounded once to the dtype of `out`.

        Args:
            out (`torch.Tensor`):
                Where to; memory that none of the tensors shares.
            start (`int`):
                The first row.
            stop (`int`):
                The row after the last.
            made (`Sequence[torch.Tensor]`, *optional*):
                The inputs that are made, of the size of `out`.

        Returns:
            `bool`: Whether that was done. If not, `rows` tells what is to be written.
        """
        if out.device.type != "cpu" or not out.is_contiguous():
            return False
        inputs = self._inputs(start, stop, made)
        element = self._in_single if self._is_exact_in_single(inputs, out.dtype) else self.element
        code = self._code(out.numel(), inputs, out.dtype, (element,))
        return code is not None and code(out.numel(), inputs, self.factors, out)

    def count(self, histogram: torch.Tensor, start: int, stop: int, made: Sequence[torch.Tensor] = ()) -> bool:
        """Count the magnitudes of rows `start:stop` by machine code: see `code_generation.histogram_loop`."""
        inputs = self._inputs(start, stop, made)
        code = self._code(inputs[0].numel(), inputs, "histogram", (self.element,))
        return code is not None and code(inputs[0].numel(), inputs, self.factors, histogram)

    def products(self, others: Sequence[Element], start: int, stop: int) -> torch.Tensor | None:
        """All inner products of this expression and others over the same tensors, rows `start:stop`.

        They are made by machine code however few elements there are, so that the last digits do not hang on that.

        Returns:
            `torch.Tensor`: Of them with each other, in fp64; `None` if torch has to do it.
        """
        inputs, size = self._inputs(start, stop, ()), 1 + len(others)
        elements = (self.element, *others)
        code = self._code(inputs[0].numel(), inputs, "products", elements) if size <= MOST_PRODUCTS else None
        if code is None:
            return None
        found = torch.zeros(size * (size + 1) // 2, dtype=torch.float64, device="cpu")
        code(inputs[0].numel(), inputs, self.factors, found)
        result = torch.empty(size, size, dtype=torch.float64, device="cpu")
        rows, columns = torch.tril_indices(size, size, device="cpu")
        result[rows, columns] = result[columns, rows] = found
        return result

    def rows(
        self, start: int, stop: int, made: Sequence[torch.Tensor] = (), device: torch.device | None = None
    ) -> torch.Tensor:
        """Rows `start:stop`, by torch, in the expression's precision."""
        inputs = [each if device is None else each.to(device) for each in self._inputs(start, stop, made)]
        return evaluate(self.element, inputs, self.factors)

    def _inputs(self, start: int, stop: int, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = iter(made)
        return [
            next(given) if each is None else rows_of(each, start, stop, number)
            for number, each in enumerate(self.tensors)
        ]

    def _is_exact_in_single(self, inputs: Sequence[torch.Tensor], output: torch.dtype) -> bool:
        """Whether fp32, rounded to bf16, has the bits of fp64 that is rounded once.

        It has for two bf16 numbers, each times 1, 2 or 4: fp32 holds their sum exactly if their exponents are less than
        16 apart, and otherwise it is so near to the larger one that both round to that. (What is too large or too small
        for that is left to torch in either case.)
        """
        return self._is_pair and {output, *(each.dtype for each in inputs)} == {torch.bfloat16}

    @cached_property
    def _is_pair(self) -> bool:
        return is_pair(self.element) and all(abs(each) in (1.0, 2.0, 4.0) for each in self.factors)

    @cached_property
    def _in_single(self) -> Element:
        return in_single(self.element)

    def _code(
        self, count: int, inputs: Sequence[torch.Tensor], use: Use, elements: tuple[Element, ...]
    ) -> MachineCode | None:
        """The machine code, if there can be some and it is worth its while."""
        if count < WIDTH:
            return None
        dtypes = tuple(each.dtype for each in inputs)
        key = (use, dtypes, elements)
        if key not in self._codes:
            stored_as = {use, *dtypes} if isinstance(use, torch.dtype) else {*dtypes}
            if not stored_as <= set(COMPILED_DTYPES) or any(each.device.type != "cpu" for each in inputs):
                return None
            is_cheap = use == "products" or count >= LEAST or (elements, dtypes, use) in compiled
            if not is_cheap or not can_compile():
                return None
            self._codes[key] = machine_code(elements, dtypes, use)
        return self._codes[key]


class FormulaBuilder:
    """Collects the tensors and numbers of an expression while it is written down.

    Args:
        precision (`torch.dtype`, *optional*, defaults to `torch.float64`):
            In which it is computed.
    """

    def __init__(self, precision: torch.dtype = torch.float64) -> None:
        self.precision = precision
        self._numbers: dict[tuple[object, ...], int] = {}
        self._tensors: list[Readable | None] = []
        self._factors: list[float] = []

    def tensor(self, tensor: Readable) -> Element:
        """An element of a tensor, which is read once however often it occurs."""
        memory: tuple[object, ...] = (tensor,)
        if isinstance(tensor, torch.Tensor):
            memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if memory not in self._numbers:
            self._numbers[memory] = len(self._tensors)
            self._tensors.append(tensor)
        return stored(self._numbers[memory], self.precision)

    def made(self) -> Element:
        """An element of something that is made tile by tile."""
        self._tensors.append(None)
        return stored(len(self._tensors) - 1, self.precision)

    def number(self, value: float, precision: torch.dtype | None = None) -> Element:
        """A number."""
        if value not in self._factors:
            self._factors.append(value)
        return factor(self._factors.index(value), precision or self.precision)

    def times(self, weight: float, element: Element) -> Element:
        """A product, or the element itself if the weight is 1."""
        return element if weight == 1.0 else self.number(weight) * element

    def combined(self, tensors: Weighted) -> Element:
        """The sum of coefficient x tensor.

        Where all but the last cancel, as in `base - base + tuned`, the last is what is left, -0.0 included: `0.0 +
        -0.0` is 0.0, but `-0.0 - 0.0` is -0.0. So with several tensors the first is negated by the next, others are
        subtracted, and all that is subtracted from the last. No other bit changes. What is subtracted itself (`base -
        tuned`, in parts) has no sign to be kept: there they are added from the left.
        """
        terms = [(coefficient, self.tensor(tensor)) for coefficient, tensor in tensors]
        if [coefficient for coefficient, _ in terms] == [-1.0, 1.0]:
            return terms[1][1] - terms[0][1]
        total, last = self.times(*terms[0]), len(terms) - 1
        for number, (coefficient, element) in enumerate(terms[1:], 1):
            if last == 1 or terms[last][0] < 0.0:
                total = total + self.times(coefficient, element)
            elif 1 < number < last:
                total = total - self.times(coefficient, element)
            else:
                total = self.times(coefficient if number == last else -coefficient, element) - total
        return total

    def sum(self, folded: Weighted, scaled: Scaled = ()) -> Element:
        """`sum(weight * change) + folded`, where each change and what is folded are sums of tensors themselves."""
        changes = [self.times(weight, self.combined(parts)) for weight, parts in scaled]
        changes += [self.combined(folded)] if folded else []
        whole, *others = changes or [self.number(0.0)]
        for change in others:
            whole = whole + change
        return whole

    def formula(self, element: Element) -> Formula:
        """What was written down."""
        return Formula(element, tuple(self._tensors), tuple(self._factors))


def sum_formula(folded: Weighted, scaled: Scaled = ()) -> Formula:
    """The formula of `sum(weight * change) + folded`; see `FormulaBuilder.sum`."""
    build = FormulaBuilder()
    return build.formula(build.sum(folded, scaled))
