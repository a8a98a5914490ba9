"""Adding rows of stored tensors: the one loop behind every change that is a sum of stored tensors."""

from collections.abc import Sequence

import torch

from hf_taskvec.algebra.scratch import Slot, buffer

#: coefficient and stored tensor, in the order in which they are added
Weighted = Sequence[tuple[float, torch.Tensor]]


def combine_rows(tensors: Weighted, out: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Write the sum of coefficient x rows `start:stop` of each tensor to `out`, in the dtype of `out`."""
    if not tensors:
        return out.zero_()
    if [coefficient for coefficient, _ in tensors] == [-1.0, 1.0]:
        tensors = tensors[::-1]  # -b + t is t - b to the last bit, and one pass less
    (coefficient, first), *rest = tensors
    out.copy_(_rows(first, start, stop))
    if coefficient != 1.0:
        out.mul_(coefficient)
    return add_rows_of(rest, out, start, stop)


def add_rows_of(tensors: Weighted, out: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Add coefficient x rows `start:stop` of each tensor to `out`, one after the other.

    Where all but the last cancel, as in `base - base + tuned`, the last is what is left, -0.0 included: `0.0 + -0.0` is
    0.0, but `-0.0 - 0.0` is -0.0. So with several tensors `out` is negated by the first of them, the next are
    subtracted, and all that is subtracted from the last. No other bit changes.
    """
    last = len(tensors) - 1
    for number, (coefficient, tensor) in enumerate(tensors):
        rows = buffer(Slot.CONVERTED, tuple(out.shape), out.dtype, out.device).copy_(_rows(tensor, start, stop))
        if last == 0:
            out.add_(rows, alpha=coefficient)
        elif 0 < number < last:
            out.sub_(rows, alpha=coefficient)
        else:
            factor = coefficient if number else -coefficient
            torch.sub(rows if factor == 1.0 else rows.mul_(factor), out, out=out)
    return out


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop] if tensor.ndim else tensor
