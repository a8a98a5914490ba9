"""A task vector attached beside the weights of a live model, which stay as they are.

`λ·(x L) R` is added to what a layer's weight gives for x, for a change `L R` (`layer_changes`). So a λ costs nothing,
each row of a batch may have its own (`row_scales`), and quantised bases work too. The vector's matrices must be
low-rank. A use of a weight that the edit would miss is refused (`watched_forward`).
"""

from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from hf_taskvec.algebra.low_rank import are_factors
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits_live
from hf_taskvec.application.layer_changes import ChangedForward, LayerChange, has_plain_forward, instead
from hf_taskvec.application.live_edit import Edit, checked_scale
from hf_taskvec.application.replaced_forward import ReplacedForward
from hf_taskvec.application.row_scales import RowScales
from hf_taskvec.application.watched_forward import WatchedForward
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.models.layout import without_peft
from hf_taskvec.models.live_model import LiveWeight, PartedWeight, live_weights
from hf_taskvec.models.sharded_weights import has_fsdp


class AttachedEdit(Edit):
    """The vector beside the weights, its share added in the layers.

    Args:
        vector (`TaskVector`):
            What to attach: low-rank changes of linear and embedding layers, and biases of linear and normalisation
            layers.
        model (`torch.nn.Module`):
            The model to attach it to.

    """

    def __init__(self, vector: TaskVector, model: torch.nn.Module) -> None:
        layers = attachable_layers(vector, model)
        self._scales = RowScales()
        changes = [LayerChange(layer, parameters, vector, self._scales) for layer, parameters in layers.items()]
        super().__init__(vector, model)
        self._attached: list[RemovableHandle | ReplacedForward] = [_attached(change) for change in changes]
        inner = without_peft(model)
        for whole in dict.fromkeys((inner, getattr(inner, "base_model", inner))):  # either may be called
            self._attached.append(WatchedForward(whole, changes, self._scales, self))

    def set_row_scales(self, scales: Sequence[float]) -> None:
        """Give each row of the batch a λ of its own, until `set_scale` or another call of this method.

        Args:
            scales (`Sequence[float]`):
                One λ for each row. Beams and returned sequences of a row share its λ.

        Raises:
            `BadValueError`: If there is none, or one is not finite. When a batch is run: if its rows are not a multiple
                of the scales, or a layer does not tell which row is whose.
            `UnsupportedError`: If the model puts positions before rows (XLNet).

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
        if len(scales) > 1 and _has_positions_first(self.model):
            raise UnsupportedError(
                f"{type(self.model).__name__} puts positions before rows, so rows cannot have a λ of their own. Use "
                "one λ for all of them (set_scale)."
            )
        self._scales.set([checked_scale(scale) for scale in scales])

    def _set(self, scale: float) -> None:
        self._scales.set([scale])

    def _restore(self) -> None:
        while self._attached:
            self._attached.pop().remove()

    def _keep(self) -> None:
        raise BadValueError(
            "an attached edit does not change the weights, so there is nothing to keep: saving the model would lose "
            "it. Use vector.edit(model).keep() to merge it, or vector.to_adapter(output)."
        )


def attachable_layers(vector: TaskVector, model: torch.nn.Module) -> dict[torch.nn.Module, list[tuple[str, str]]]:
    """The layers of a model that a vector changes: of each, kind (`"weight"` or `"bias"`) and name of its parameters.

    Args:
        vector (`TaskVector`):
            What is to be attached; its tensors are not read.
        model (`torch.nn.Module`):
            The model.

    Raises:
        `MismatchError`: If the vector does not fit the model.
        `UnsupportedError`: If a change cannot be attached.

    """
    weights = live_weights(model)
    check_fits_live(vector, model, weights)
    layers: dict[torch.nn.Module, list[tuple[str, str]]] = {}
    by_fsdp = has_fsdp(model)
    for name in vector:
        places = _places(name, vector[name].terms, weights[name])
        _check_sharding(weights[name], by_fsdp)
        for layer, kind in places:
            layers.setdefault(layer, []).append((kind, name))
    return layers


def _attached(change: LayerChange) -> RemovableHandle | ReplacedForward:
    if has_plain_forward(change.layer):
        return change.layer.register_forward_hook(change)
    return ChangedForward(change)


def _has_positions_first(model: torch.nn.Module) -> bool:
    config = getattr(without_peft(model), "config", None)
    return getattr(config, "model_type", None) == "xlnet"


def _check_sharding(weight: LiveWeight, by_fsdp: bool) -> None:
    """Refuse a layer whose outputs are parts, too; FSDP gathers a layer's weights before it is called."""
    if not weight.is_sharded:
        return
    *outer, _ = weight.sharded.placements  # of FSDP alone: over one dimension of the mesh, and copies over others
    by_fsdp = by_fsdp and all(each.is_replicate() for each in outer)
    if not by_fsdp or any("forward" in vars(owner) for owner, _ in weight.owners):
        raise UnsupportedError(
            f"{weight.name} is sharded by tensor parallelism, where a process has a part of the layer's output, to "
            f"which a change of the whole cannot be added. {instead(weight.name)}"
        )


def _places(name: str, terms: tuple[Term, ...], weight: LiveWeight) -> list[tuple[torch.nn.Module, str]]:
    """The layers that use a parameter, and as what; those alone in which a change can be added."""
    if isinstance(weight, PartedWeight):
        raise UnsupportedError(
            f"{name}: the live model holds it in one parameter with others, as {weight.attribute} of "
            f"{type(weight.module).__name__} (the experts of a layer, or projections in one piece), so it has no layer "
            f"of its own to which a change could be attached. {instead(name)}"
        )
    kinds = {owner: _kind_of_layer(owner) for owner, _ in weight.owners}
    found = [
        (owner, kind)
        for owner, kind in weight.owners
        if (kind == "weight" and are_factors(terms) and kinds[owner] in ("linear", "lookup", "own forward"))
        or (kind == "bias" and kinds[owner] in ("linear", "norm"))
    ]
    # A head may keep the bias of the linear layer inside it as its own (BERT's). The layer inside uses it.
    inside = any(kind == "bias" and kinds[owner] == "linear" for owner, kind in found)
    if len(found) == len(weight.owners) or inside:
        return found
    can_be_compressed = not are_factors(terms) and any(
        kind == "weight" and kinds[owner] in ("linear", "lookup") for owner, kind in weight.owners
    )
    compress = "Compressed it would be one (vector.compress(rank=...)). " if can_be_compressed else ""
    raise UnsupportedError(
        f"{name}: only low-rank changes of linear and embedding layers, and biases of linear and normalisation layers, "
        f"can be attached. {compress}{instead(name)}"
    )


def _kind_of_layer(layer: torch.nn.Module) -> str | None:
    """What a layer does with its weight; of one with a forward of its own (a router), that shows when it runs."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, torch.nn.Linear | Conv1D):
        return "linear"
    if isinstance(layer, torch.nn.Embedding):
        return "lookup" if layer.max_norm is None else None
    if isinstance(layer, torch.nn.LayerNorm):
        return "norm"
    return None if type(layer).__module__.startswith("torch.") else "own forward"
