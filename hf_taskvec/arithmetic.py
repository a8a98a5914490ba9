"""Evaluating an expression: fp64 accumulation over tiles, and one rounding.

Everything that turns terms into numbers goes through `Sum`: live edits, streamed checkpoints, saved vectors and
measures. So they agree to the last bit.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_taskvec.delta import Delta, LowRank, tile_rows
from hf_taskvec.errors import BadValueError
from hf_taskvec.tensors import Source

# Right factors of low-rank terms that are kept in fp64 while a parameter's tiles are worked through.
_FACTOR_CACHE_BYTES = 64 << 20

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Term:
    """A weighted change: one summand of an expression."""

    weight: float
    delta: Delta


class Sum:
    """`target + scale * sum(weight * delta)` for one parameter, ready to be evaluated tile by tile.

    Stored tensors that occur more than once (a base shared by many fine-tunes, or the target itself) are folded
    into one coefficient; those whose coefficient becomes 0 are not read at all.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        terms: Iterable[Term],
        target: Source | None = None,
        scale: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        coefficients: dict[Source, float] = {} if target is None else {target: 1.0}
        subtracted: dict[Source, None] = {}
        low_rank: list[tuple[float, LowRank]] = []
        self._others: list[tuple[float, Delta]] = []
        for term in terms:
            weight = scale * term.weight
            if weight == 0.0:
                continue
            parts = term.delta.parts
            if parts is not None:
                for sign, source in parts:
                    coefficients[source] = coefficients.get(source, 0.0) + sign * weight
                    if sign < 0:
                        subtracted[source] = None
            elif isinstance(term.delta, LowRank):
                low_rank.append((weight, term.delta))
            else:
                self._others.append((weight, term.delta))
        # The target and what is subtracted from it come first; see `Delta.parts`.
        first = [*([] if target is None else [target]), *(s for s in subtracted if s != target)]
        order = dict.fromkeys([*first, *coefficients])
        self._linear = [(coefficients[s], s) for s in order if coefficients[s] != 0.0]
        self._tensors: list[tuple[float, torch.Tensor]] | None = None
        self._low_rank = low_rank
        self._factors: list[tuple[float, torch.Tensor, torch.Tensor]] = []

    @property
    def reads_only(self) -> Source | None:
        """The one stored tensor that this sum is equal to (coefficient 1 and nothing else), if there is one."""
        alone = len(self._linear) == 1 and not self._low_rank and not self._others
        return self._linear[0][1] if alone and self._linear[0][0] == 1.0 else None

    def _prepare(self) -> list[tuple[float, torch.Tensor]]:
        kept = 0
        for weight, delta in self._low_rank:
            right = delta.right.read()
            kept += right.numel() * 8
            if kept <= _FACTOR_CACHE_BYTES:
                right = right.to(self.device, torch.float64)
            self._factors.append((weight * delta.scaling, delta.left.read(), right))
        self._tensors = [(coefficient, source.read()) for coefficient, source in self._linear]
        return self._tensors

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop` in fp64. `start` must be the start of a tile, for the bits to be reproducible."""
        tensors = self._prepare() if self._tensors is None else self._tensors
        if not self.shape:
            out = torch.zeros((), dtype=torch.float64, device=self.device)
        elif tensors and tensors[0][0] == 1.0:
            out = tensors[0][1][start:stop].to(self.device, torch.float64, copy=True)
            tensors = tensors[1:]
        else:
            out = torch.zeros((stop - start, *self.shape[1:]), dtype=torch.float64, device=self.device)
        for coefficient, tensor in tensors:
            rows = tensor[start:stop] if self.shape else tensor
            out.add_(rows.to(self.device, torch.float64), alpha=coefficient)
        for weight, left, right in self._factors:
            out.addmm_(
                left[start:stop].to(self.device, torch.float64),
                right.to(self.device, torch.float64),
                alpha=weight,
            )
        for weight, delta in self._others:
            delta.add_rows(out, start, stop, weight)
        return out

    def tiles(self) -> Iterator[tuple[int, int]]:
        """The row ranges to evaluate; they depend on the shape alone."""
        rows, step = (self.shape[0] if self.shape else 1), tile_rows(self.shape)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def into(self, out: torch.Tensor, name: str) -> None:
        """Evaluate the whole parameter into `out`, rounded once to its dtype."""
        for start, stop in self.tiles():
            rows = self.rows(start, stop)
            check_finite(rows, out.dtype, name)
            (out[start:stop] if self.shape else out).copy_(round_once(rows, out.dtype))


def check_finite(rows: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse NaN, infinities, and numbers that `dtype` cannot hold, naming the parameter."""
    if not rows.numel():
        return
    low, high = torch.aminmax(rows)  # NaN comes through
    largest = max(-low.item(), high.item())
    if not largest < float("inf") or low != low:
        raise not_finite(name)
    if round_once(torch.tensor([largest], dtype=torch.float64), dtype).isinf():
        raise BadValueError(
            f"{name}: the result ({largest:.3g}) is too large for {dtype_name(dtype)}. "
            "Use a smaller scale or a wider dtype, such as dtype='bfloat16' or 'float32'."
        )


def not_finite(name: str) -> BadValueError:
    """The refusal of a parameter whose numbers are not all finite."""
    return BadValueError(
        f"{name}: the weights contain NaN or infinite values. Check the checkpoints that this vector reads; "
        "a training run that diverged is the usual cause."
    )


def round_once(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 rounded to nearest even in `dtype`, once.

    torch converts fp64 to 16-bit types by way of fp32, which rounds twice: 1 + 2**-8 + 2**-40 becomes 1 in bf16
    instead of 1 + 2**-7. Only numbers whose fp32 value lies half-way between two neighbours can go wrong; those
    are first moved off the half-way point, to the fp32 neighbour on the side of the true value (rounding to odd).

    >>> import torch
    >>> round_once(torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64), torch.bfloat16).item()
    1.0078125
    """
    if dtype in (torch.float32, torch.float64):
        return rows.to(dtype)
    single = rows.float()
    bits = single.view(torch.int32)
    dropped = 16 if dtype == torch.bfloat16 else 13
    half_way = (bits & ((1 << dropped) - 1)) == 1 << (dropped - 1)
    if dtype == torch.float16:
        half_way |= single.abs() < 2.0**-14  # subnormal in fp16: the half-way points are elsewhere
    if half_way.any():
        where = half_way.nonzero(as_tuple=True)
        near, true = single[where], rows[where]
        error = true - near.double()
        even = (near.view(torch.int32) & 1) == 0
        toward = torch.where(error > 0, torch.inf, -torch.inf).to(near)
        single[where] = torch.where((error != 0) & even, torch.nextafter(near, toward), near)
    return single.to(dtype)


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
