"""An edited weight back to the format that it was stored in.

A block keeps its scale as long as that reaches all of its edited weights, and gets the scale that its largest weight
needs where it does not. Codes are the nearest ones; a weight that the edit leaves alone, in a block that keeps its
scale, keeps its code. What GPTQ and AWQ did to choose other codes than the nearest, from texts, is not done again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_taskvec.algebra.sums import Sum
from hf_taskvec.algebra.tiles import TILE
from hf_taskvec.quantised.bit_fields import nearest_fp4
from hf_taskvec.quantised.packed_weight import Opened, PackedWeight, ScaledWeight, Scales, StoredPiece
from hf_taskvec.quantised.scaled_matrix import EXPONENTS

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Requantised:
    """What was left of an edit when the edited weight was stored in fewer bits again.

    Args:
        format (`str`):
            What the format is called.
        weights (`int`):
            How many weights there are.
        edited (`int`):
            How many of them the edit changes.
        undone (`int`):
            How many of those are afterwards what they were without the edit.
        error (`float`):
            ‖stored − exact‖ / ‖edit‖: how far storing moves the weights, beside how far the edit does. 0 without one.
        share (`float`):
            The share of the edit that survives: ⟨stored − before, edit⟩ / ‖edit‖². 1 without one.
    """

    format: str
    weights: int
    edited: int
    undone: int
    error: float
    share: float

    def to_dict(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class EditTally:
    """Counts over the rows of one weight as they are stored."""

    def __init__(self, weight: PackedWeight) -> None:
        self._format = weight.format_name
        self._weights = self._edited = self._undone = 0
        self._error = self._edit = self._along = 0.0

    def add(self, before: torch.Tensor, exact: torch.Tensor, after: torch.Tensor) -> None:
        """Rows without the edit, with it, and as they are stored."""
        flat = (each.flatten().split(TILE) for each in (before, exact, after))  # an expert is one row, and large
        for some in zip(*flat, strict=True):
            self._add(*some)

    def _add(self, before: torch.Tensor, exact: torch.Tensor, after: torch.Tensor) -> None:
        before, after = before.double(), after.double()
        edit = exact.double().sub_(before)
        edited = edit != 0
        self._weights += edited.numel()
        self._edited += int(edited.count_nonzero())
        moved = after.sub_(before)
        self._undone += int((edited & (moved == 0)).count_nonzero())
        self._edit += edit.square().sum().item()
        self._along += (moved * edit).sum().item()
        self._error += moved.sub_(edit).square_().sum().item()

    def result(self) -> Requantised:
        """What they come to."""
        error, share = 0.0, 1.0
        if self._edit:
            error, share = (self._error / self._edit) ** 0.5, self._along / self._edit
        return Requantised(self._format, self._weights, self._edited, self._undone, error, share)


def requantise(weight: ScaledWeight, edited: Sum, tally: EditTally | None = None) -> Iterator[StoredPiece]:
    """What is to be stored of an edited weight, in its own format, some rows at a time.

    Args:
        weight (`ScaledWeight`):
            The weight as it is stored.
        edited (`Sum`):
            The weight with its edit.
        tally (`EditTally`, *optional*):
            Is told of all rows.

    Returns:
        `Iterator` of `StoredPiece`: To be used before the next is made.

    Raises:
        `BadValueError`: If an edited weight is not finite.
    """
    opened = weight.readable().opened
    shared = _shared_scales(weight, opened, edited) if weight.is_whole else None
    for start, stop in weight.runs():
        rows, before = _exact_rows(edited, start, stop, weight.name), weight.unpack(opened, start, stop)
        stored, own = weight.scales(opened, start, stop), weight.codes(opened, start, stop)
        made: list[list[StoredPiece]] = []
        for first, last in weight.parts_of_rows(start, stop):
            laid, was = (weight.outputs_first(each)[..., first:last, :].contiguous() for each in (rows, before))
            of_part = stored.of_outputs(weight, first, last)
            found = shared or _scales_for(weight, of_part, laid)
            codes = _nearest_codes(weight, laid, found)
            # The nearest code may be another one, where a weight's dtype holds less than code and scale.
            alone = (laid == was) & weight.grid.spread(_is_kept(of_part, found), tuple(laid.shape))
            codes = torch.where(alone, own[..., first:last, :], codes)
            if tally is not None:
                stands_for = weight.values(codes.clone(), found)
                tally.add(weight.outputs_first(was), weight.outputs_first(laid), stands_for)
            made.append(list(weight.pieces(codes, found, start)))
        yield from _joined(made)


def _exact_rows(edited: Sum, start: int, stop: int, name: str) -> torch.Tensor:
    """Rows of the edited weight in fp32, in memory of their own."""
    size = (stop - start, *edited.shape[1:])
    return edited.rounded(start, stop, torch.float32, name, torch.empty(size, dtype=torch.float32, device="cpu"))


def _shared_scales(weight: ScaledWeight, opened: Opened, edited: Sum) -> Scales:
    """The scales of a matrix whose rows share them, for which all of it is looked at first."""
    stored = weight.scales(opened, 0, weight.size[0])
    low = high = torch.zeros_like(stored.scales)
    for start, stop in weight.runs():
        rows = _exact_rows(edited, start, stop, weight.name)
        grid = weight.grid._replace(rows=len(rows))
        lower, higher = grid.extremes(rows, low.shape[-1])
        low, high = torch.minimum(low, lower), torch.maximum(high, higher)
    return _chosen(weight, stored, low, high)


def _joined(parts: list[list[StoredPiece]]) -> Iterator[StoredPiece]:
    """The pieces of some experts, of those of parts of their outputs."""
    for pieces in zip(*parts, strict=True):
        yield pieces[0] if len(parts) == 1 else pieces[0]._replace(elements=torch.cat([e.elements for e in pieces], 1))


def _is_kept(stored: Scales, found: Scales) -> torch.Tensor:
    """Which blocks have the scales, and zeros, that they had."""
    kept = stored.scales == found.scales
    return kept if stored.zeros is None or found.zeros is None else kept & (stored.zeros == found.zeros)


def _scales_for(weight: ScaledWeight, stored: Scales, rows: torch.Tensor) -> Scales:
    low, high = weight.grid.extremes(rows, stored.scales.shape[-1])
    return _chosen(weight, stored, low, high)


def _chosen(weight: ScaledWeight, stored: Scales, low: torch.Tensor, high: torch.Tensor) -> Scales:
    """The stored scale of a block where it reaches the block's weights, else the one that they need."""
    levels, scales = weight.levels, weight.in_use(stored.scales)
    zeros = torch.zeros_like(stored.scales) if stored.zeros is None else stored.zeros
    largest = torch.maximum(-low, high)
    ends = (low / scales).round(), (high / scales).round()  # which a negative scale exchanges
    lowest, highest = torch.minimum(*ends), torch.maximum(*ends)
    if levels.floats is not None:
        # The next number after the largest code would be half as far again as the last step.
        reached = (largest / scales.abs()) <= levels.high * (1 + levels.half_step)
        fresh, fresh_zeros = largest / levels.high, zeros
    elif stored.zeros is None:
        reached = (lowest >= levels.low) & (highest <= levels.high)
        fresh, fresh_zeros = largest / ((levels.high - levels.low) / 2), zeros
    else:
        reached = (lowest + zeros >= levels.low) & (highest + zeros <= levels.high)
        fresh = (high - low) / (levels.high - levels.low)
        fresh_zeros = (levels.low - low / fresh.clamp(min=_SMALLEST)).round_().clamp_(levels.low, levels.high)
    reached |= largest == 0
    if weight.scales_dtype in EXPONENTS:
        fresh = torch.exp2(fresh.clamp(min=_SMALLEST).log2().ceil_())
    else:
        fresh = fresh.to(weight.scales_dtype).float()
    chosen = torch.where(reached, stored.scales, fresh)
    return Scales(chosen, None if stored.zeros is None else torch.where(reached, zeros, fresh_zeros))


def _nearest_codes(weight: ScaledWeight, rows: torch.Tensor, found: Scales) -> torch.Tensor:
    """The codes of rows, in fp32; `rows` is left as it is."""
    grid, levels, size = weight.grid, weight.levels, tuple(rows.shape)
    parts = (rows / grid.spread(weight.in_use(found.scales), size)).nan_to_num_(nan=0.0)
    if levels.floats == torch.uint8:
        return nearest_fp4(parts)
    if levels.floats is not None:
        return parts.clamp_(levels.low, levels.high).to(levels.floats).float()
    parts.round_()
    if found.zeros is not None:
        parts.add_(grid.spread(found.zeros, size))
    return parts.clamp_(levels.low, levels.high)
