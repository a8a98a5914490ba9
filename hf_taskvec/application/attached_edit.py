"""A task vector attached beside the weights of a live model, which stay as they are.

Forward hooks add `λ·(x L) R` to the layers' outputs, for a change `L R`. So a λ costs nothing, each row of a batch
may have its own, and quantised bases work too. The vector's matrices must be low-rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_taskvec.algebra.low_rank import are_factors
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits_live
from hf_taskvec.application.live_edit import Edit, checked_scale
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.models.layout import without_peft
from hf_taskvec.models.live_model import LiveWeight, live_weights


class AttachedEdit(Edit):
    """The vector beside the weights, as forward hooks that add its share to the layers' outputs.

    Args:
        vector (`TaskVector`):
            What to attach: low-rank changes of linear and embedding layers, and biases of linear layers.
        model (`torch.nn.Module`):
            The model to attach it to.

    """

    def __init__(self, vector: TaskVector, model: torch.nn.Module) -> None:
        weights = live_weights(model)
        check_fits_live(vector, model, weights)
        self._row_scales: torch.Tensor | None = None
        self._handles: list[Any] = []
        layers: dict[torch.nn.Module, list[tuple[str, str, tuple[Term, ...]]]] = {}
        for name in vector:
            for owner, kind in weights[name].owners:
                layers.setdefault(owner, []).append((name, kind, vector[name].terms))
            _check_attachable(name, vector[name].terms, weights[name])
        super().__init__(vector, model)
        for layer, changes in layers.items():
            hook = _hook(layer, changes, self._scale_for)
            self._handles.append(layer.register_forward_hook(hook))
        for whole in dict.fromkeys((model, without_peft(model))):  # PEFT calls one or the other
            self._handles.append(whole.register_forward_pre_hook(self._check_batch, with_kwargs=True))

    def set_row_scales(self, scales: Sequence[float]) -> None:
        """Give each row of the batch a λ of its own, until `set_scale` or another call of this method.

        Args:
            scales (`Sequence[float]`):
                One λ for each row. Beams and returned sequences of a row share its λ.

        Raises:
            `BadValueError`: If there is none, or one is not finite. A batch whose rows are not a multiple of the scales
                is refused when it is run.

        Example:
            ```python
            with vector.applied_to(model, merge=False) as edit:
                edit.set_row_scales([0.0, 0.5, 1.0])
                logits = model(tokens.repeat(3, 1)).logits
            ```

        """
        self._check_current()
        if not scales:
            raise BadValueError("set_row_scales needs at least one scale.")
        self._row_scales = torch.tensor([checked_scale(scale) for scale in scales], dtype=torch.float32)

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
            "an attached edit does not change the weights, so there is nothing to keep: saving the model would lose "
            "it. Use vector.edit(model).keep() to merge it, or vector.to_adapter(output)."
        )


def _check_rows(scales: torch.Tensor, rows: int) -> None:
    if rows % len(scales):
        raise BadValueError(
            f"{len(scales)} scales were set, but the batch has {rows} rows. Give one scale for each row."
        )


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
            f"{name}: only low-rank changes of linear and embedding layers, and biases of linear layers, can be "
            "attached. Compress the vector first (vector.compress(rank=...)), leave the parameter out "
            "(vector.filter(exclude=...)), or merge it (merge=True)."
        )


_Hook = Callable[[torch.nn.Module, tuple[Any, ...], Any], Any]


def _hook(
    layer: torch.nn.Module,
    changes: list[tuple[str, str, tuple[Term, ...]]],
    scale_for: Callable[[torch.Tensor], torch.Tensor | None],
) -> _Hook:
    """A forward hook that adds `λ x change` to a layer's output, computed in fp32.

    Args:
        layer (`torch.nn.Module`):
            A linear or an embedding layer.
        changes (`list[tuple[str, str, tuple[Term, ...]]]`):
            Name, kind (`"weight"` or `"bias"`) and change of each of its parameters that the vector changes.
        scale_for (`Callable`):
            From an output to λ; see `AttachedEdit._scale_for`.

    """
    from transformers.pytorch_utils import Conv1D

    biases, products = [], []
    for name, kind, terms in changes:
        if kind == "bias":
            bias = torch.empty(terms[0].delta.shape, dtype=torch.float32)
            Sum(terms[0].delta.shape, terms).into(bias, name)
            biases.append(bias)
            continue
        for term in terms:
            if (product := term.delta.factors) is not None:
                left, right = product.left.read().float(), product.right.read().float()
                weight = term.weight * product.scaling
                if isinstance(layer, torch.nn.Linear):  # y = x W', so the change is x R' L'
                    left, right = right.T, left.T
                products.append((left.contiguous(), right.contiguous() * weight))
    is_linear = isinstance(layer, torch.nn.Linear | Conv1D)
    factor = getattr(layer, "embed_scale", 1.0)  # Gemma multiplies its embeddings

    def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        scale = scale_for(output)
        if scale is None:
            return output
        device = output.device
        change: torch.Tensor | float = 0.0
        # The only numbers of a vector that do not come from `Sum`. They are products of the factors with activations:
        # the changed weight itself, which `Sum` would give, is never computed. fp32 is enough for them, since they are
        # added to activations, which have no more digits, and it is what keeps a λ per row cheap.
        for number, (left, right) in enumerate(products):
            left, right = products[number] = left.to(device), right.to(device)
            inner = inputs[0].float() @ left if is_linear else left[inputs[0]] * factor
            change = change + inner @ right
        for bias in biases:
            change = change + bias.to(device)
        return (output + change * scale).to(output.dtype)

    return hook
