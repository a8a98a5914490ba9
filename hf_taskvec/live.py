"""Live models: their parameters under canonical names."""

from typing import Any

import torch

from hf_taskvec.checkpoint import Checkpoint, canonical_tensors
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.names import is_peft_model, layout_of_model, unwrapped
from hf_taskvec.tensors import InMemory, Source


def live_checkpoint(model: torch.nn.Module) -> Checkpoint:
    """A live model's own tensors under canonical names: not copies, so for immediate use only.

    Offloaded weights are brought to the CPU. Of a PEFT-wrapped model these are the base model's weights.
    """
    from transformers.core_model_loading import revert_weight_conversion

    inner: Any = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
    what = f"live {type(inner).__name__}"
    layout = layout_of_model(inner)
    state = _weights(inner, what)
    if layout.renamed or layout.fused:
        state = revert_weight_conversion(inner, state)
    stored: dict[str, Source] = {name: InMemory(tensor) for name, tensor in state.items()}
    placed = layout.place(stored, what)
    tensors = canonical_tensors(placed, stored, layout, what)
    config = inner.config.to_dict() if layout.architecture else {}
    return Checkpoint(name=what, tensors=tensors, layout=layout, config=config)


def _weights(model: torch.nn.Module, what: str) -> dict[str, torch.Tensor]:
    """The parameters on the CPU (no copy if they are there), named as without PEFT's wrappers."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    state = model.state_dict()
    if any(state[name].is_meta for name in names):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        state = get_state_dict_offloaded_model(model)
    weights = {}
    for name in names:
        tensor = state[name].detach()
        if type(tensor).__name__ == "DTensor":
            raise UnsupportedError(
                f"{what}: {name} is sharded over processes. Gather the weights first, e.g. with "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)."
            )
        plain = unwrapped(name)
        if plain is not None:
            weights[plain] = tensor.cpu()
    return weights
