"""A task vector on a live model: merged into its weights in place, or attached beside them.

A merged edit writes `original + λ·τ` into the weights, always from the untouched original, and restores it bit for bit.
An attached edit leaves the weights alone and adds `λ·(x A) B` to the layers' outputs: a λ costs nothing, each row of a
batch may have its own, and quantised bases work too. It needs a vector whose matrices are low-rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from hf_taskvec.algebra.low_rank import are_factors
from hf_taskvec.algebra.rounding import FLOATS
from hf_taskvec.algebra.sources import Source
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.errors import BadValueError, ChangedSourceError, UnsupportedError, some
from hf_taskvec.models.checkpoint import Checkpoint, open_checkpoint
from hf_taskvec.models.layout import is_peft_model, layout_of_model
from hf_taskvec.models.live_model import LiveWeight, live_weights

# The edits on each model that are not over, in the order in which they were made. Weak, so that nothing is kept alive.
_edits: "WeakKeyDictionary[torch.nn.Module, list[ref[Edit]]]" = WeakKeyDictionary()


class Edit:
    """A vector on a live model, at a scale that can be moved. Ends with `restore` or `keep`, or with its `with` block."""

    def __init__(self, vector: TaskVector, model: torch.nn.Module) -> None:
        self.vector, self.model = vector, model
        self.scale = 0.0
        self._is_over = False
        self._stack().append(ref(self))

    @property
    def _inner(self) -> torch.nn.Module:
        """The model itself, without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model  # type: ignore[operator]

    def _stack(self) -> "list[ref[Edit]]":
        stack = _edits.setdefault(self._inner, [])
        stack[:] = [each for each in stack if each() is not None]
        return stack

    @property
    def fingerprint(self) -> str:
        """Tells this edit from any other: the digest of its expression and of what that reads."""
        return self.vector.fingerprint

    def set_scale(self, scale: float) -> None:
        """Move to another λ, from the untouched original."""
        self._check_current()
        before, after = self.scale, _number(scale)
        try:
            self._set(after)
        except BaseException:
            self._set(before)  # never leave it half-way
            raise
        self.scale = after

    def restore(self) -> None:
        """End the edit: the model is as it was before, bit for bit."""
        if not self._is_over:
            self._check_current()
            self._restore()
            self._end()

    def keep(self) -> None:
        """End the edit, leaving the model as it is now."""
        self._check_current()
        self._keep()
        self._end()

    def _check_current(self) -> None:
        if self._is_over:
            raise BadValueError("this edit is over: it was restored or kept. Make a new one with vector.edit(model).")
        if self._stack()[-1]() is not self:
            raise BadValueError("another edit was made on this model after this one. Restore or keep that one first.")

    def _end(self) -> None:
        self._is_over = True
        self._stack().remove(ref(self))

    def __enter__(self) -> "Edit":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            self._end_newer()
        self.restore()

    def _end_newer(self) -> None:
        """Restore the edits that were made after this one and are still open, the last one first."""
        while (newest := self._stack()[-1]()) is not self:
            assert newest is not None
            newest.restore()

    def _set(self, scale: float) -> None:
        raise AssertionError

    def _restore(self) -> None:
        raise AssertionError

    def _keep(self) -> None:
        raise AssertionError


class MergedEdit(Edit):
    """The vector merged into the weights. Holds one copy of the changed weights, or none if they can be re-read."""

    def __init__(self, vector: TaskVector, model: torch.nn.Module, original: str | Path | None = None) -> None:
        weights = live_weights(model)
        _check_fits_live(vector, model, weights)
        for name in vector:
            _check_writable(weights[name])
        self._weights = {name: weights[name] for name in vector}
        stored = open_checkpoint(original) if original is not None else None
        self._originals: dict[str, Source] = {
            name: weight.original() if stored is None else _same(stored, name, weight)
            for name, weight in self._weights.items()
        }
        super().__init__(vector, model)

    def __getattr__(self, name: str) -> Any:
        # Not a method that raises: whoever asks whether an edit can do it (the evaluation's sweep) must hear no.
        if name == "set_row_scales":
            raise AttributeError("a merged edit has one λ for the whole model. For one λ per row use merge=False.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _set(self, scale: float) -> None:
        for name, weight in self._weights.items():
            original = self._originals[name]
            if scale == 0.0:
                weight.restore(original)
                continue
            target = torch.empty(original.shape, dtype=original.dtype) if weight.is_offloaded else weight.value()
            whole = Sum(original.shape, self.vector[name].terms, original, scale, device=target.device)
            whole.into(target, name)
            if weight.is_offloaded:
                weight.write(target)

    def _restore(self) -> None:
        for name, weight in self._weights.items():
            weight.restore(self._originals[name])

    def _keep(self) -> None:
        self._originals.clear()


class AttachedEdit(Edit):
    """The vector beside the weights, as forward hooks that add its share to the layers' outputs."""

    def __init__(self, vector: TaskVector, model: torch.nn.Module) -> None:
        weights = live_weights(model)
        _check_fits_live(vector, model, weights)
        self._row_scales: torch.Tensor | None = None
        self._handles: list[Any] = []
        layers: dict[torch.nn.Module, list[tuple[str, tuple[Term, ...]]]] = {}
        for name in vector:
            for owner, kind in weights[name].owners:
                layers.setdefault(owner, []).append((kind, vector[name].terms))
            _check_attachable(name, vector[name].terms, weights[name])
        super().__init__(vector, model)
        for layer, changes in layers.items():
            hook = _hook(layer, changes, self._scale_for)
            self._handles.append(layer.register_forward_hook(hook))
        for whole in dict.fromkeys((self.model, self._inner)):  # PEFT calls one or the other
            self._handles.append(whole.register_forward_pre_hook(self._check_batch, with_kwargs=True))

    def set_row_scales(self, scales: Sequence[float]) -> None:
        """One λ for each row of the batch. Beams and returned sequences of a row share its λ."""
        self._check_current()
        if not scales:
            raise BadValueError("set_row_scales needs at least one scale.")
        self._row_scales = torch.tensor([_number(scale) for scale in scales], dtype=torch.float32)

    def _set(self, scale: float) -> None:
        self._row_scales = torch.tensor([scale], dtype=torch.float32)

    def _scale_for(self, output: torch.Tensor) -> torch.Tensor | None:
        """λ for each row of a layer's output, shaped to be multiplied with it; None if it is 0 throughout."""
        scales = self._row_scales
        if scales is None or not scales.any():
            return None
        _check_rows(scales, output.shape[0])
        if len(scales) > 1:  # some layers flatten batch and positions into one axis, in this order
            scales = scales.repeat_interleave(output.shape[0] // len(scales))
        return scales.to(output.device).view(-1, *[1] * (output.ndim - 1))

    def _check_batch(self, model: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Refuse a batch that does not fit the scales, while its rows can still be told from its positions."""
        given = (*inputs, named.get("input_ids"), named.get("inputs_embeds"))
        batch = next((each for each in given if isinstance(each, torch.Tensor)), None)
        if batch is not None and self._row_scales is not None:
            _check_rows(self._row_scales, batch.shape[0])

    def _restore(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self) -> None:
        raise BadValueError(
            "an attached edit does not change the weights, so there is nothing to keep: saving the model would lose it. "
            "Use vector.edit(model).keep() to merge it, or vector.to_adapter(folder)."
        )


def _check_rows(scales: torch.Tensor, rows: int) -> None:
    if rows % len(scales):
        raise BadValueError(
            f"{len(scales)} scales were set, but the batch has {rows} rows. Give one scale for each row."
        )


def edit(
    vector: TaskVector,
    model: torch.nn.Module,
    scale: float = 1.0,
    merge: bool = True,
    original: str | Path | None = None,
) -> Edit:
    """See `TaskVector.edit`."""
    if not isinstance(model, torch.nn.Module):
        raise BadValueError("edit() changes a live model. To write a checkpoint use apply(base, save_to=...).")
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"):
        raise UnsupportedError(
            f"the model is wrapped by {type(model).__name__}, on which edits are not tested. Edit the model inside "
            "(model.module, or model._orig_mod of a compiled one)."
        )
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise UnsupportedError(
            "the model was compiled in place, with model.compile(), on which edits are not tested. Edit it before it is "
            "compiled, or load it again."
        )
    if not merge and original is not None:
        raise BadValueError("original= is for merged edits: an attached edit does not touch the weights.")
    new: Edit = MergedEdit(vector, model, original) if merge else AttachedEdit(vector, model)
    try:
        new.set_scale(scale)
    except BaseException:
        new.restore()
        raise
    return new


@contextmanager
def applied_to(
    vector: TaskVector,
    model: torch.nn.Module,
    scale: float = 1.0,
    merge: bool = True,
    original: str | Path | None = None,
) -> Iterator[Edit]:
    """See `TaskVector.applied_to`."""
    with edit(vector, model, scale, merge, original) as new:
        yield new


# Whether it can be done.


def _number(scale: float) -> float:
    value = float(scale)
    if not abs(value) < float("inf"):
        raise BadValueError(f"a model cannot be edited at a scale of {value}.")
    return value


def _check_fits_live(vector: TaskVector, model: torch.nn.Module, weights: dict[str, LiveWeight]) -> None:
    layout = layout_of_model(model)
    fused = [name for name in vector if name in layout.shapes and name not in weights]
    if fused:
        raise UnsupportedError(
            f"{some(fused)}: the live {layout.architecture} holds its experts fused, and cannot be edited in place. Use "
            "vector.apply(base, save_to=...) and load the result."
        )
    shadowed = [name for name in vector if name in weights and weights[name].is_shadowed]
    if shadowed:
        raise UnsupportedError(
            f"{some(shadowed)}: PEFT trains a copy of it (modules_to_save or trained tokens), and the model uses the copy, so "
            "an edit of the base would do nothing. Edit the plain model, or merge the adapter first."
        )
    shapes: dict[str, Source] = {name: weight.as_source() for name, weight in weights.items()}
    check_fits(vector, Checkpoint(f"the live {type(model).__name__}", shapes, layout))


def _check_writable(weight: LiveWeight) -> None:
    if weight.dtype not in FLOATS or weight.is_quantised:
        raise UnsupportedError(
            f"{weight.name} is quantised ({weight.dtype}), so a change cannot be merged into it without losing what is smaller "
            "than a quantisation step. Attach a low-rank vector instead: vector.edit(model, merge=False)."
        )


def _same(stored: Checkpoint, name: str, weight: LiveWeight) -> Source:
    """The stored original of a live weight, after making sure that it is just that."""
    if name not in stored.tensors or not torch.equal(stored.tensors[name].read(), weight.value().detach().cpu()):
        raise ChangedSourceError(
            f"{name}: {stored.where} is not what the live model was loaded from. Leave out original=, and the edit keeps a "
            "copy in memory."
        )
    return stored.tensors[name]


def _check_attachable(name: str, terms: tuple[Term, ...], weight: LiveWeight) -> None:
    from transformers.pytorch_utils import Conv1D

    for owner, kind in weight.owners:
        linear = isinstance(owner, torch.nn.Linear | Conv1D)
        low_rank = are_factors(terms)
        if kind == "weight" and low_rank and (linear or isinstance(owner, torch.nn.Embedding)):
            continue
        if kind == "bias" and linear:
            continue
        raise UnsupportedError(
            f"{name}: only low-rank changes of linear and embedding layers, and biases of linear layers, can be attached. "
            "Compress the vector first (vector.compress(rank=...)), leave the parameter out (vector.filter(exclude=...)), "
            "or merge it (merge=True)."
        )


# Attaching.

_Hook = Callable[[torch.nn.Module, tuple[Any, ...], Any], Any]


def _hook(
    layer: torch.nn.Module,
    changes: list[tuple[str, tuple[Term, ...]]],
    scale_for: Callable[[torch.Tensor], torch.Tensor | None],
) -> _Hook:
    """A forward hook that adds `λ x change` to a layer's output, computed in fp32."""
    from transformers.pytorch_utils import Conv1D

    biases, products = [], []
    for kind, terms in changes:
        for term in terms:
            if (product := term.delta.factors) is not None:
                left, right = product.left.read().float(), product.right.read().float()
                weight = term.weight * product.scaling
                if isinstance(layer, torch.nn.Linear):  # y = x W', so the change is x R' L'
                    left, right = right.T, left.T
                products.append((left.contiguous(), right.contiguous() * weight))
        if kind == "bias":
            bias = torch.zeros(terms[0].delta.shape, dtype=torch.float64)
            for term in terms:
                term.delta.add_rows(bias, 0, bias.shape[0], term.weight)
            biases.append(bias.float())
    is_linear = isinstance(layer, torch.nn.Linear | Conv1D)
    factor = getattr(layer, "embed_scale", 1.0)  # Gemma multiplies its embeddings

    def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        scale = scale_for(output)
        if scale is None:
            return output
        device = output.device
        change: torch.Tensor | float = 0.0
        for number, (left, right) in enumerate(products):
            left, right = products[number] = left.to(device), right.to(device)
            inner = inputs[0].float() @ left if is_linear else left[inputs[0]] * factor
            change = change + inner @ right
        for bias in biases:
            change = change + bias.to(device)
        return (output + change * scale).to(output.dtype)

    return hook
