"""Sums of stored tensors as elementwise expressions: which tensors, with which numbers, in which order.

The order defines the result to the last bit, in fp64: the changes of weights such as 0.3 first, each the exact
difference of its tensors times its weight, added from the left; then what is folded, the target among it; then what was
computed.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_taskvec.algebra.elementwise import Element, evaluate, factor, stored
from hf_taskvec.algebra.machine_code import COMPILED_DTYPES, WIDTH, MachineCode, can_compile, compiled, machine_code
from hf_taskvec.algebra.sources import Readable, rows_of

#: coefficient and stored tensor, in the order in which they are added
Weighted = Sequence[tuple[float, Readable]]

# Loading the compiler takes a tenth of a second, and an expression some hundredths: for less than this many elements
# torch is sooner done.
LEAST = 1 << 16


@dataclass(frozen=True, eq=False)
class Formula:
    """An elementwise expression with the tensors that it reads.

    Args:
        element (`Element`):
            The expression.
        tensors (`tuple` of `Readable`):
            Its inputs.
        factors (`tuple` of `float`):
            Its numbers.
    """

    element: Element
    tensors: tuple[Readable, ...]
    factors: tuple[float, ...]
    _codes: dict[tuple[torch.dtype, torch.dtype | None], MachineCode] = field(default_factory=dict, repr=False)

    def write(self, out: torch.Tensor, start: int, stop: int, computed: torch.Tensor | None = None) -> bool:
        """Write rows `start:stop` by machine code, rounded once to the dtype of `out`.

        Args:
            out (`torch.Tensor`):
                Where to; memory that none of the tensors shares.
            start (`int`):
                The first row.
            stop (`int`):
                The row after the last.
            computed (`torch.Tensor`, *optional*):
                Of the size of `out`: is added last.

        Returns:
            `bool`: Whether that was done. If not, `rows` tells what is to be written.
        """
        code = self._code(out, computed)
        if code is None:
            return False
        factors = (ctypes.c_double * len(self.factors))(*self.factors)
        return code(out, self._inputs(start, stop, computed), factors)

    def rows(self, start: int, stop: int, computed: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Rows `start:stop`, by torch, in the expression's precision."""
        inputs = [each.to(device) for each in self._inputs(start, stop, computed)]
        return evaluate(self._with(computed), inputs, self.factors)

    def _inputs(self, start: int, stop: int, computed: torch.Tensor | None) -> list[torch.Tensor]:
        rows = [rows_of(each, start, stop, number) for number, each in enumerate(self.tensors)]
        return rows if computed is None else [*rows, computed]

    def _with(self, computed: torch.Tensor | None) -> Element:
        if computed is None:
            return self.element
        more = stored(len(self.tensors))
        return self.element + more if self.tensors else more

    def _code(self, out: torch.Tensor, computed: torch.Tensor | None) -> MachineCode | None:
        """The machine code, if there can be some and it is worth its while."""
        if out.device.type != "cpu" or out.numel() < WIDTH or not out.is_contiguous():
            return None
        key = (out.dtype, None if computed is None else computed.dtype)
        if key not in self._codes:
            inputs = self.tensors if computed is None else (*self.tensors, computed)
            dtypes = tuple(each.dtype for each in inputs)
            if not {out.dtype, *dtypes} <= set(COMPILED_DTYPES) or any(each.device.type != "cpu" for each in inputs):
                return None
            form = (self._with(computed), dtypes, out.dtype)
            if (out.numel() < LEAST and form not in compiled) or not can_compile():
                return None
            self._codes[key] = machine_code(*form)
        return self._codes[key]


def formula(folded: Weighted, scaled: Sequence[tuple[float, Weighted]] = ()) -> Formula:
    """`sum(weight * change) + folded`, where each change and what is folded are sums of stored tensors themselves.

    Args:
        folded (`Sequence` of pairs of a coefficient and a tensor):
            What is added up with its own coefficients.
        scaled (`Sequence` of pairs of a weight and such a sequence, *optional*):
            Changes that are added up before they are multiplied by their weight.

    Returns:
        `Formula`: Of the whole sum; of 0 if there is nothing to add.
    """
    inputs: dict[int, tuple[int, Readable]] = {}
    factors: list[float] = []

    def times(weight: float, element: Element) -> Element:
        if weight == 1.0:
            return element
        factors.append(weight)
        return factor(len(factors) - 1) * element

    def combined(tensors: Weighted) -> Element:
        # Where all but the last cancel, as in `base - base + tuned`, the last is what is left, -0.0 included: `0.0 +
        # -0.0` is 0.0, but `-0.0 - 0.0` is -0.0. So with several tensors the first is negated by the next, others are
        # subtracted, and all that is subtracted from the last. No other bit changes.
        terms = [(c, stored(inputs.setdefault(id(t), (len(inputs), t))[0])) for c, t in tensors]
        if [coefficient for coefficient, _ in terms] == [-1.0, 1.0]:
            return terms[1][1] - terms[0][1]
        total, last = times(*terms[0]), len(terms) - 1
        for number, (coefficient, element) in enumerate(terms[1:], 1):
            if last == 1:
                total = total + times(coefficient, element)
            elif 1 < number < last:
                total = total - times(coefficient, element)
            else:
                total = times(coefficient if number == last else -coefficient, element) - total
        return total

    changes = [times(weight, combined(parts)) for weight, parts in scaled]
    changes += [combined(folded)] if folded else []
    whole = changes[0] if changes else factor(0)
    for change in changes[1:]:
        whole = whole + change
    return Formula(whole, tuple(tensor for _, tensor in inputs.values()), tuple(factors))
