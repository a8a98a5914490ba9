"""Which layers of a model are quantised: those that transformers replaces when it loads a model with bitsandbytes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_taskvec.errors import UnsupportedError
from hf_taskvec.models.checkpoint import Checkpoint
from hf_taskvec.models.meta_models import build_meta_model, most_parameters

if TYPE_CHECKING:
    import torch


def layers_to_quantise(model: Any) -> "dict[str, torch.nn.Module]":
    """The linear layers (GPT-2's `Conv1D` among them) that transformers lets bitsandbytes quantise, by their names.

    The rule is transformers' own (`quantizers.base.get_keys_to_not_convert` and `integrations.bitsandbytes`): all but
    the output head, what is tied to another weight, the last module, and what the model class keeps in fp32.
    Embeddings, norms, biases and experts that are stored in one tensor are no linear layers.

    Args:
        model (`PreTrainedModel`):
            Live, or on the meta device.

    Returns:
        `dict[str, torch.nn.Module]`: The layers, in the model's order.
    """
    import torch
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]
    return {
        name: module
        for name, module in model.named_modules()
        if (type(module) is torch.nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
    }


def weights_to_quantise(model: Checkpoint) -> frozenset[str]:
    """The canonical names of the weights of `layers_to_quantise`, told from the model's config.

    Raises:
        `UnsupportedError`: If the model's architecture is not known.
    """
    if not model.layout.architecture:
        raise UnsupportedError(
            f"{model.where} has no config of an architecture that transformers knows, so which of its weights are "
            "linear layers, and would be quantised, cannot be told. Give a model with its config.json."
        )
    config: Mapping[str, Any] = {key: value for key, value in model.config.items() if key != "quantization_config"}
    shapes = {name: source.shape for name, source in model.tensors.items()}
    layers = layers_to_quantise(build_meta_model(config, most_parameters(config, shapes)))
    return frozenset(model.layout.canonical(f"{name}.weight") for name in layers) & model.tensors.keys()


def why_not_quantised(model: Checkpoint, name: str) -> str:
    """Why a weight is none of `weights_to_quantise`, in a few words."""
    layout = model.layout
    if name in layout.embeddings:
        return "embedding"
    if name in layout.vocabulary or name in layout.head:
        return "output head"
    if name in layout.restructured_stored:
        return "not stored as the model holds it"
    return "bias, norm or the like" if len(model.tensors[name].shape) < 2 else "no linear layer"
