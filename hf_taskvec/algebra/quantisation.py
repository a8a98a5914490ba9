"""The numbers that a weight may have after quantisation: four schemes, each weight as a code and each block as a scale.

| scheme | a block, which shares one scale | codes | as in |
|---|---|---|---|
| `nf4` | 64 weights, one output's after another's | 16 quantiles of a normal distribution | bitsandbytes' 4 bits |
| `int8` | the weights of one output | 255 equal steps | bitsandbytes' 8 bits |
| `fp8` | the weights of one output | float8 (e4m3) | torchao's `Float8WeightOnlyConfig` |
| `int4` | 128 weights of one output (all, if 128 does not divide them) | 16 equal steps | its `IntxWeightOnlyConfig` |

The codes and scales are those libraries' own, element for element, as they calculate them on a CPU. (bitsandbytes on a
GPU may take the other one of two codes that are equally near.) None of the libraries is needed.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from hf_taskvec.errors import BadValueError, did_you_mean

Scheme = Literal["nf4", "int8", "fp8", "int4"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

# Dettmers et al. 2023, appendix E.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_NF4_BLOCK = 64
_INT4_GROUP = 128
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_FP8_MINUS_ZERO = 0x80
_PER_STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it


@dataclass(frozen=True)
class QuantisedBlocks:
    """Weights as they are held after quantisation.

    Args:
        scheme (`str`):
            One of `SCHEMES`.
        codes (`torch.Tensor`):
            One for each weight, a row for each block: `uint8` (a place in NF4's table, the bits of a float8) or `int8`.
        scales (`torch.Tensor`):
            One for each block: the largest absolute weight for `nf4` and `int8`, one step of the codes for the others.

    """

    scheme: Scheme
    codes: torch.Tensor
    scales: torch.Tensor

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights that the codes stand for."""
        scales = self.scales[:, None]
        match self.scheme:
            case "nf4":
                return (_nf4_values().to(scales.device)[self.codes.int()] * scales).to(dtype)
            case "int8":
                return (self.codes * scales * _PER_STEP).to(dtype)
            case "fp8":
                return (self.codes.view(torch.float8_e4m3fn).float() * scales).to(dtype)
            case "int4":
                return self.codes.to(dtype) * scales.to(dtype)

    def bin_widths(self) -> torch.Tensor:
        """For each weight the width of its bin, the range of weights that get the same code; 0 in a block of zeros."""
        scales = self.scales[:, None].float()
        match self.scheme:
            case "nf4":
                return _nf4_widths().to(scales.device)[self.codes.int()] * scales
            case "int8":
                return (scales * _PER_STEP).expand(self.codes.shape)
            case "fp8":
                return _fp8_widths().to(scales.device)[self.codes.int()] * scales
            case "int4":
                return scales.expand(self.codes.shape)


def check_scheme(scheme: Any) -> Scheme:
    """The scheme itself, if there is one of that name.

    Raises:
        `BadValueError`: If there is none.
    """
    for known in SCHEMES:
        if scheme == known:
            return known
    raise BadValueError(
        f"there is no quantisation scheme {scheme!r}.{did_you_mean(str(scheme), SCHEMES)} Use {', '.join(SCHEMES)}."
    )


def block_size(scheme: Scheme, inputs: int) -> int:
    """How many weights of a matrix with so many inputs share a scale. They lie side by side, outputs being rows.

    >>> block_size("nf4", 100), block_size("int4", 256), block_size("int4", 100)
    (64, 128, 100)
    """
    if scheme == "nf4":
        return _NF4_BLOCK
    return _INT4_GROUP if scheme == "int4" and inputs % _INT4_GROUP == 0 else inputs


def quantise(blocks: torch.Tensor, scheme: Scheme) -> QuantisedBlocks:
    """Weights as codes and scales.

    Args:
        blocks (`torch.Tensor`):
            In bf16, fp16 or fp32, a row for each block (see `block_size`). A row of `nf4` that is shorter than 64 is
            the last block of a matrix, which bitsandbytes divides by its scale instead of multiplying by the inverse.
        scheme (`str`):
            One of `SCHEMES`.

    Returns:
        `QuantisedBlocks`: The codes and scales.

    Example:
        >>> found = quantise(torch.tensor([[0.0, 0.5, -2.0, 1.9]]), "int8")
        >>> found.codes.tolist(), found.scales.tolist()
        ([[0, 32, -127, 121]], [2.0])

    """
    match scheme:
        case "nf4":
            return _nf4(blocks)
        case "int8":
            return _int8(blocks)
        case "fp8":
            return _fp8(blocks)
        case "int4":
            return _int4(blocks)


def quantised_values(matrix: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """A matrix (outputs being rows) with the weights that are left of it after quantisation, in its own dtype."""
    flat, size = matrix.reshape(-1), block_size(scheme, matrix.shape[1])
    whole = flat.numel() - flat.numel() % size
    parts = [flat[:whole].view(-1, size), flat[whole:].view(1, -1)]
    found = [quantise(part, scheme).values(matrix.dtype).flatten() for part in parts if part.numel()]
    return torch.cat([*found, flat[:0]]).view(matrix.shape)


def _nf4(blocks: torch.Tensor) -> QuantisedBlocks:
    weights = blocks.float()
    scales = weights.abs().amax(dim=1)
    divisors = scales.clamp(min=1e-38)[:, None]
    parts = weights / divisors if blocks.shape[1] < _NF4_BLOCK else weights * (1.0 / divisors)
    codes = torch.zeros(parts.shape, dtype=torch.uint8, device=parts.device)
    above = torch.empty(parts.shape, dtype=torch.bool, device=parts.device)
    for bound in _nf4_bounds().tolist():  # a third of the time that torch.bucketize takes for the same
        codes += torch.gt(parts, bound, out=above)
    return QuantisedBlocks("nf4", codes, scales)


def _int8(blocks: torch.Tensor) -> QuantisedBlocks:
    weights = blocks.half().float()  # bitsandbytes converts weights to fp16 first, whatever they were
    scales = weights.abs().amax(dim=1)
    # A row of zeros: 0 * inf is NaN, which becomes 0 as an integer there.
    codes = (weights * (127.0 / scales[:, None])).nan_to_num_(nan=0.0).round_().to(torch.int8)
    return QuantisedBlocks("int8", codes, scales)


def _fp8(blocks: torch.Tensor) -> QuantisedBlocks:
    scales = (blocks.abs().amax(dim=1) / _LARGEST_FP8).float()
    parts = (blocks.float() / scales[:, None]).clamp_(-_LARGEST_FP8, _LARGEST_FP8)
    # A row of zeros would become NaN, as it does in torchao 0.18.
    codes = parts.nan_to_num_(nan=0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantisedBlocks("fp8", codes.masked_fill_(codes == _FP8_MINUS_ZERO, 0), scales)


def _int4(blocks: torch.Tensor) -> QuantisedBlocks:
    # All of it in the dtype of the weights, as torchao does.
    scales = (blocks.abs().amax(dim=1) / 7.5).clamp(min=torch.finfo(blocks.dtype).smallest_normal)
    codes = (blocks * (1.0 / scales[:, None])).round_().clamp_(-8, 7).to(torch.int8)
    return QuantisedBlocks("int4", codes, scales)


@lru_cache(maxsize=1)
def _nf4_values() -> torch.Tensor:
    return torch.tensor(_NF4, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=1)
def _nf4_bounds() -> torch.Tensor:
    values = _nf4_values()
    return (values[:-1] + values[1:]) / 2


@lru_cache(maxsize=1)
def _nf4_widths() -> torch.Tensor:
    """The outermost bins end where weights do, at the block's largest."""
    edge = torch.ones(1, dtype=torch.float32, device="cpu")
    return torch.cat([-edge, _nf4_bounds(), edge]).diff()


@lru_cache(maxsize=1)
def _fp8_widths() -> torch.Tensor:
    """The step from one float8 to the next at each of them: of 4 bits of exponent, 0 and 1 have the same step."""
    exponents = torch.arange(256, dtype=torch.int32, device="cpu").bitwise_right_shift(3).bitwise_and(0xF).clamp(min=1)
    return torch.ldexp(torch.ones(256, dtype=torch.float32, device="cpu"), exponents - 10)
