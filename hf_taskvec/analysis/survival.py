"""How much of an edit is left when the edited model is quantised, told from the weights alone.

Quantising a model moves each weight to one of a few numbers. An edit that moves a weight by less than the distance
between them may be undone by that: the edited and the untouched weight get the same code. Zhang et al. (2024,
arXiv 2410.16454) got forgotten knowledge back in this way. Weights are compared as codes, without a forward pass.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_taskvec.algebra.parameter_names import layer_of
from hf_taskvec.algebra.quantisation import Scheme, block_size, check_scheme, quantise
from hf_taskvec.algebra.sources import Source, numel, rows_of
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.algebra.tiles import TILE, tiles_of_shape
from hf_taskvec.analysis.argument_checks import check_vectors
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.extraction.from_finetuned import open_model
from hf_taskvec.models.quantised_layers import weights_to_quantise, why_not_quantised
from hf_taskvec.progress import progress_bar
from hf_taskvec.threads import workers

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Elements of edited weights that a thread holds at a time, over all λ.
_HELD = 16 * TILE
# A histogram of ratios: 32 bins for each power of 2, from 2**-48 to 2**16. So a median is right to 1.6 %.
_LOWEST, _OCTAVES, _PER_OCTAVE = -48, 64, 32


@dataclass(frozen=True)
class WeightSurvival:
    """What quantisation leaves of an edit, over some weights.

    Args:
        weights (`int`):
            How many weights there are.
        edited (`int`):
            How many of them the edit changes before quantisation.
        recoded (`int`):
            How many have another code after quantisation than without the edit. Weights that were not edited are among
            them where the edit changed the scale that they share.
        undone (`int`):
            How many of the edited weights have the same code as without the edit.
        bin_ratio (`float`, *optional*):
            The median over the edited weights of `|change| / width of the weight's bin`, right to 1.6 %; None without
            edited weights. A weight that lies anywhere in its bin leaves it with about this probability.

    """

    weights: int
    edited: int
    recoded: int
    undone: int
    bin_ratio: float | None

    @property
    def share(self) -> float:
        """The share of the weights whose code the edit changes."""
        return self.recoded / self.weights if self.weights else 0.0

    @property
    def undone_share(self) -> float | None:
        """The share of the edited weights that quantisation takes back to the code that they had; None without any."""
        return self.undone / self.edited if self.edited else None

    def to_dict(self) -> dict[str, Any]:
        """The counts and shares, for JSON."""
        return {
            "weights": self.weights,
            "edited": self.edited,
            "recoded": self.recoded,
            "undone": self.undone,
            "share": self.share,
            "undone_share": self.undone_share,
            "bin_ratio": self.bin_ratio,
        }


@dataclass(frozen=True)
class Survival:
    """What quantisation leaves of an edit at one λ; made by `TaskVector.survival` and `survival_by_scale`.

    Only codes are compared. The scales of blocks move with their largest weights, so a weight with the same code is not
    always the same number.

    Args:
        scheme (`str`):
            The quantisation.
        scale (`float`):
            λ.
        total (`WeightSurvival`):
            Over all weights that are quantised.
        by_layer (`Mapping[int | None, WeightSurvival]`):
            Over those of each layer; None stands for what is in no layer.
        by_weight (`Mapping[str, WeightSurvival]`):
            Of each matrix.
        not_counted (`Mapping[str, str]`):
            The parameters that are not quantised, each with the reason. What the edit changes of them stays.

    """

    scheme: Scheme
    scale: float
    total: WeightSurvival
    by_layer: Mapping[int | None, WeightSurvival]
    by_weight: Mapping[str, WeightSurvival]
    not_counted: Mapping[str, str]

    @property
    def share(self) -> float:
        """The share of the quantised weights whose code the edit changes."""
        return self.total.share

    @property
    def undone_share(self) -> float | None:
        """The share of the edited weights that quantisation takes back to the code that they had; None without any."""
        return self.total.undone_share

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON; what is in no layer is under `"outside"`."""
        layers = {"outside" if layer is None else str(layer): each for layer, each in self.by_layer.items()}
        return {
            "scheme": self.scheme,
            "scale": self.scale,
            "total": self.total.to_dict(),
            "by_layer": {layer: each.to_dict() for layer, each in layers.items()},
            "by_weight": {name: each.to_dict() for name, each in self.by_weight.items()},
            "not_counted": dict(self.not_counted),
        }

    def __str__(self) -> str:
        total, at = self.total, f"{self.scheme} at λ = {self.scale:g}"
        if total.undone_share is None or total.bin_ratio is None:
            return f"{at}: the edit changes none of the {total.weights:,} weights that are quantised"
        return (
            f"{at}: {total.share:.2%} of {total.weights:,} weights get another code; {total.undone_share:.2%} of the "
            f"{total.edited:,} edited ones keep theirs; the median change is {total.bin_ratio:.3g} of a bin"
        )


def survival_by_scale(
    vector: TaskVector,
    base: str | Path | torch.nn.Module,
    scales: Sequence[float],
    scheme: Scheme = "nf4",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> list[Survival]:
    """What quantisation leaves of `base + λ * vector` for each λ, in one pass over the base.

    The weights are those that `TaskVector.apply` would write, in the dtype of the base; the codes are those that
    bitsandbytes (or torchao) would give them, see `algebra.quantisation`. Counted are the weights that transformers
    lets bitsandbytes quantise: linear layers, but not the output head. What the vector does not change is not read.
    A thread holds a few tiles; of weights that are stored transposed, as GPT-2's, a whole one.

    Args:
        vector (`TaskVector`):
            The edit.
        base (`str`, `Path` or `torch.nn.Module`):
            The model that is edited: a Hub id, a folder, or a live model.
        scales (`Sequence[float]`):
            The values of λ, as for a sweep.
        scheme (`str`, *optional*, defaults to `"nf4"`):
            `"nf4"`, `"int8"`, `"fp8"` or `"int4"`.
        revision (`str`, *optional*):
            A branch, tag or commit, for Hub ids.
        token (`str` or `bool`, *optional*):
            For Hub ids, as in transformers.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `list[Survival]`: One for each λ, in their order.

    Raises:
        `BadValueError`: If there is no such scheme, no λ, or a result is not finite.
        `MismatchError`: If the vector does not fit the base.
        `UnsupportedError`: If the architecture of the base is not known, or its weights are in fp64 or quantised.

    Example:
        >>> found = survival_by_scale(vector, base, [-0.2, -0.4, -0.6, -0.8, -1.0])  # doctest: +SKIP
        >>> next((each.scale for each in found if each.share >= 0.01), None)  # the first to survive  # doctest: +SKIP

    """
    check_vectors(vector)
    check_scheme(scheme)
    if not scales:
        raise BadValueError("no λ was given: scales needs at least one number.")
    edits = [vector * scale for scale in scales]  # refuses NaN and infinities
    model = open_model(base, revision, token)
    check_fits(vector, model, may_grow=True)
    counted = weights_to_quantise(model)
    names = [name for name in model.tensors if name in counted]
    tasks = [
        _Matrix(name, model.tensors[name], name in model.layout.conv1d, tuple(e.terms_of(name) for e in edits), scheme)
        for name in names
    ]
    found = [_Tallies() for _ in scales]
    with workers() as run:
        for name, tallies in zip(names, progress_bar(run(_tally, tasks), "Codes", progress, len(tasks)), strict=True):
            for each, tally in zip(found, tallies, strict=True):
                each.add(name, tally)
    others = {name: why_not_quantised(model, name) for name in model.tensors if name not in counted}
    return [each.result(scheme, scale, others) for each, scale in zip(found, scales, strict=True)]


def survival(
    vector: TaskVector,
    base: str | Path | torch.nn.Module,
    scheme: Scheme = "nf4",
    *,
    scale: float = 1.0,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Survival:
    """See `TaskVector.survival`."""
    return survival_by_scale(vector, base, [scale], scheme, revision=revision, token=token, progress=progress)[0]


@dataclass(frozen=True)
class _Matrix:
    """A weight to measure, and its change at each λ."""

    name: str
    source: Source
    transposed: bool
    edits: tuple[tuple[Term, ...], ...]
    scheme: Scheme

    @property
    def inputs(self) -> int:
        return self.source.shape[0 if self.transposed else 1]


class _Tally:
    """Counts over some weights at one λ, which can be added up."""

    def __init__(self, weights: int = 0) -> None:
        self.weights, self.edited, self.recoded, self.undone = weights, 0, 0, 0
        self.ratios: torch.Tensor | None = None

    def add(self, other: "_Tally") -> None:
        self.weights += other.weights
        self.edited += other.edited
        self.recoded += other.recoded
        self.undone += other.undone
        if other.ratios is not None:
            self.ratios = other.ratios.clone() if self.ratios is None else self.ratios.add_(other.ratios)

    def result(self) -> WeightSurvival:
        return WeightSurvival(self.weights, self.edited, self.recoded, self.undone, _median(self.ratios))


class _Tallies:
    """The tallies at one λ: added up over all and over each layer as they come, and not kept."""

    def __init__(self) -> None:
        self.total = _Tally()
        self.by_layer: dict[int | None, _Tally] = {}
        self.by_weight: dict[str, WeightSurvival] = {}

    def add(self, name: str, tally: _Tally) -> None:
        self.total.add(tally)
        self.by_layer.setdefault(layer_of(name), _Tally()).add(tally)
        self.by_weight[name] = tally.result()

    def result(self, scheme: Scheme, scale: float, not_counted: Mapping[str, str]) -> Survival:
        layers = {layer: each.result() for layer, each in self.by_layer.items()}
        return Survival(scheme, float(scale), self.total.result(), layers, self.by_weight, not_counted)


def _tally(matrix: _Matrix) -> list[_Tally]:
    """The counts of one matrix at each λ."""
    if matrix.source.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{matrix.name} is stored as {matrix.source.dtype}, which is quantised from bf16, fp16 or fp32 only. "
            "Save the model in one of them."
        )
    weights = numel(matrix.source.shape)
    tallies = [_Tally(weights) for _ in matrix.edits]
    left = [number for number, terms in enumerate(matrix.edits) if terms]
    at_once = max(1, _HELD // (weights if matrix.transposed else TILE))
    size = block_size(matrix.scheme, matrix.inputs)
    for first in range(0, len(left), at_once):
        group = left[first : first + at_once]
        for blocks in _whole_blocks(_pieces(matrix, [matrix.edits[number] for number in group]), size):
            _count(blocks, matrix.scheme, [tallies[number] for number in group])
    return tallies


def _pieces(matrix: _Matrix, edits: Sequence[tuple[Term, ...]]) -> Iterator[torch.Tensor]:
    """The weights in runs, one output's after another's: those of the base, and below them those of each edit."""
    source, shape, name = matrix.source, matrix.source.shape, matrix.name
    sums = [Sum(shape, terms, source) for terms in edits]
    if matrix.transposed:
        stored = source.read()
        whole = torch.empty(len(sums), *shape, dtype=source.dtype, device="cpu")
        for out, each in zip(whole, sums, strict=True):
            each.into(out, name)
        step = max(1, TILE // max(1, shape[0]))
        for outputs in range(0, shape[1], step):
            columns = slice(outputs, outputs + step)
            yield torch.cat([stored[None, :, columns], whole[:, :, columns]]).transpose(1, 2).flatten(1)
        return
    opened = source.readable()
    for start, stop in tiles_of_shape(shape):
        rows = torch.empty(1 + len(sums), stop - start, *shape[1:], dtype=source.dtype, device="cpu")
        rows[0] = rows_of(opened, start, stop)
        for out, each in zip(rows[1:], sums, strict=True):
            out.copy_(each.rounded(start, stop, source.dtype, name))
        yield rows.flatten(1)


def _whole_blocks(pieces: Iterator[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """The same weights in whole blocks, `[base and edits, blocks, size]`; the very last may be shorter."""
    rest: torch.Tensor | None = None
    for piece in pieces:
        joined = piece if rest is None else torch.cat([rest, piece], dim=1)
        whole = joined.shape[1] - joined.shape[1] % size
        yield joined[:, :whole].unflatten(1, (-1, size))
        rest = joined[:, whole:] if whole < joined.shape[1] else None
    if rest is not None:
        yield rest[:, None]


def _count(blocks: torch.Tensor, scheme: Scheme, tallies: Sequence[_Tally]) -> None:
    if not blocks.numel():
        return
    base, *edits = blocks
    before = quantise(base, scheme)
    weights = base.float()
    widths = before.bin_widths().clamp(min=1e-38)  # in a block of zeros every change is far beyond its bin
    for edit, tally in zip(edits, tallies, strict=True):
        edited, recoded = edit != base, quantise(edit, scheme).codes != before.codes
        count = int(edited.count_nonzero())
        tally.edited += count
        tally.recoded += int(recoded.count_nonzero())
        tally.undone += int(torch.gt(edited, recoded).count_nonzero())
        ratios = _histogram((edit.float() - weights).abs_().div_(widths).view(-1))
        ratios[0] -= base.numel() - count  # those that were not edited
        tally.ratios = ratios if tally.ratios is None else tally.ratios.add_(ratios)


def _histogram(ratios: torch.Tensor) -> torch.Tensor:
    """How many ratios are in each bin: the first bits of an fp32 number tell its power of 2 and its part of that.

    Writes over them. 0 is in the first bin.
    """
    bins = ratios.view(torch.int32).bitwise_right_shift_(23 - (_PER_OCTAVE.bit_length() - 1))
    bins = bins.sub_((127 + _LOWEST) * _PER_OCTAVE).clamp_(0, _OCTAVES * _PER_OCTAVE - 1)
    return torch.bincount(bins, minlength=_OCTAVES * _PER_OCTAVE)


def _median(histogram: torch.Tensor | None) -> float | None:
    """The middle of the bin that the median is in."""
    if histogram is None or not (count := int(histogram.sum())):
        return None
    place = int(torch.searchsorted(histogram.cumsum(0), math.ceil(count / 2)))
    octave, part = divmod(place, _PER_OCTAVE)
    return math.ldexp(1 + (part + 0.5) / _PER_OCTAVE, octave + _LOWEST)
