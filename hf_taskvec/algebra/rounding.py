"""Numbers of a dtype: rounding to it once, what it cannot hold, and its name."""

import torch

from hf_taskvec.algebra.scratch import Slot, buffer
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.errors import BadValueError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# The last bits of an fp64 number, which fp32 does not have.
_BELOW_SINGLE = (1 << 29) - 1


@kept_subnormals()
def round_once(
    rows: torch.Tensor, dtype: torch.dtype, name: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """fp64 rounded to nearest even in `dtype`, once (into `out`); with a name, what `dtype` cannot hold is refused.

    torch converts fp64 to 16-bit types by way of fp32, which rounds twice: 1 + 2**-8 + 2**-40 becomes 1 in bf16
    instead of 1 + 2**-7. So the bits below fp32's last one are first folded into that one (rounding to odd, Boldo and
    Melquiond 2008): the step to fp32 is then exact, and the step to 16 bits still depends on which side of a
    half-way point the number lies.

    >>> import torch
    >>> round_once(torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64), torch.bfloat16).item()
    1.0078125
    """
    result = torch.empty(rows.shape, dtype=dtype, device=rows.device) if out is None else out
    if dtype in (torch.float32, torch.float64):
        if name is not None:
            check_finite(rows, dtype, name)
        return result.copy_(rows)
    size = tuple(rows.shape)
    bits = rows.view(torch.int64)
    odd = torch.bitwise_and(
        bits, _BELOW_SINGLE, out=buffer(Slot.CONVERTED, size, torch.float64, rows.device).view(torch.int64)
    )
    odd.add_(_BELOW_SINGLE).bitwise_or_(bits).bitwise_and_(~_BELOW_SINGLE)
    single = buffer(Slot.CONVERTED, size, torch.float32, rows.device).copy_(odd.view(torch.float64))
    result.copy_(single)
    if dtype == torch.bfloat16 and _has_subnormal(single, result):
        # Below 2**-126 fp32 is subnormal too, and has fewer bits; bf16's numbers there are the multiples of 2**-133.
        tiny = rows.abs() < 2.0**-126
        result[tiny] = (rows[tiny] * 2.0**133).round_().mul_(2.0**-133).to(dtype)
    if name is not None and not result.sum().isfinite():
        check_finite(rows, dtype, name)  # rounds itself, and so writes over `single`
    return result


def _has_subnormal(single: torch.Tensor, half: torch.Tensor) -> bool:
    """Whether any number is subnormal in fp32: first a glance at the 16-bit numbers, where zeros count too.

    Writes over `single`: fresh memory for each step would take longer than all of them.
    """
    if not half.numel():
        return False
    glance = buffer(Slot.CONVERTED, tuple(half.shape), torch.int16, half.device)
    if torch.bitwise_and(half.view(torch.int16), 0x7FFF, out=glance).amin() >= 0x0080:
        return False
    magnitude = single.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    return bool(magnitude.sub_(1).bitwise_and_(0x7FFFFFFF).amin() < 0x007FFFFF)  # 0 becomes the largest


def check_finite(rows: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse NaN, infinities, and numbers that `dtype` cannot hold, naming the parameter."""
    if not rows.numel():
        return
    low, high = (each.item() for each in torch.aminmax(rows))  # NaN comes through
    limit = torch.finfo(dtype).max
    if -limit <= low and high <= limit:
        return
    largest = max(-low, high)
    if not largest < float("inf") or low != low:
        raise not_finite(name)
    if round_once(torch.tensor([largest], dtype=torch.float64, device="cpu"), dtype).isinf():
        raise BadValueError(
            f"{name}: the result ({largest:.3g}) is too large for {dtype_name(dtype)}. "
            "Use a smaller scale or a wider dtype, such as dtype='bfloat16' or 'float32'."
        )


def not_finite(name: str) -> BadValueError:
    """The refusal of a parameter whose numbers are not all finite."""
    return BadValueError(
        f"{name}: the weights contain NaN or infinite values. Check the checkpoints that they come from; "
        "a training run that diverged is the usual cause."
    )


def dtype_name(dtype: torch.dtype) -> str:
    """`"bfloat16"` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating dtype from its name (`"bfloat16"`) or itself."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in FLOATS:
        names = ", ".join(dtype_name(known) for known in FLOATS)
        raise BadValueError(f"dtype {dtype!r} is not a floating dtype that weights are stored in. Use one of: {names}.")
    return found
