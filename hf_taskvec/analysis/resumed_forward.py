"""A forward pass in two parts: the hidden states after each layer, and the rest of the pass from one of them on.

The rest is done by the model itself, whose layers before that point are skipped. So whatever an architecture does after
its last layer (a norm or none, a projection, a head with a bias, capped or scaled logits) needs no list here.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hf_taskvec.analysis.layer_features import (
    forward_hooks,
    hidden_states,
    layers_of,
    with_hidden_states,
    without_head,
)
from hf_taskvec.application.replaced_forward import ReplacedForward
from hf_taskvec.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class LayerStates:
    """The hidden states of one forward pass.

    Args:
        hidden (`tuple[torch.Tensor]`):
            What goes into the first layer, and what comes out of each: one more than there are layers. No final norm
            has been applied to the last.
        others (`tuple[int | None]`):
            How many values each layer gives beside its hidden states; `None` where it gives these alone, not a tuple.

    """

    hidden: tuple[torch.Tensor, ...]
    others: tuple[int | None, ...]


@torch.inference_mode()
def layer_states(
    model: Any, inputs: Mapping[str, torch.Tensor], keep: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> LayerStates:
    """The hidden states before the first layer of a decoder and after each.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A causal model in evaluation mode.
        inputs (`Mapping[str, torch.Tensor]`):
            What it takes, such as `input_ids` and `attention_mask`.
        keep (`Callable`, *optional*):
            What is kept of the states of (rows, positions, size), to bound memory; all by default.

    Returns:
        `LayerStates`: What was kept, layer by layer.

    Raises:
        `UnsupportedError`: If the model has no list of layers, or these take their hidden states by name.

    """
    hidden: list[torch.Tensor] = []
    others: list[int | None] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not args:
            raise UnsupportedError(
                f"{type(model).__name__} gives its layers their hidden states by name, so they cannot be skipped."
            )
        if not hidden:
            hidden.append(args[0] if keep is None else keep(args[0]))
        found = hidden_states(output)
        hidden.append(found if keep is None else keep(found))
        others.append(len(output) - 1 if isinstance(output, tuple) else None)

    with forward_hooks([(layer, record) for layer in layers_of(model)]):
        without_head(model)(**inputs, use_cache=False)
    return LayerStates(tuple(hidden), tuple(others))


@torch.inference_mode()
def resumed_logits(
    model: Any,
    layer: int,
    hidden: torch.Tensor,
    inputs: Mapping[str, Any],
    others: tuple[int | None, ...],
) -> torch.Tensor:
    """The logits of a forward pass that goes on from given hidden states after one layer.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A causal model in evaluation mode.
        layer (`int`):
            After which layer, from 0. This layer and those before it are not run.
        hidden (`torch.Tensor`):
            The hidden states there, of (rows, positions, size).
        inputs (`Mapping[str, Any]`):
            What the model takes, for so many rows and positions: masks and positions are made of them.
        others (`tuple[int | None]`):
            `LayerStates.others` of the same model.

    Returns:
        `torch.Tensor`: The logits.

    """
    layers = layers_of(model)

    def give(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return with_hidden_states(output, hidden)

    with ExitStack() as stack:
        for skipped, count in zip(layers[: layer + 1], others[: layer + 1], strict=True):
            stack.callback(_Skipped(skipped, count).remove)
        # By a hook, which comes after those that others may have put on the layer: the states hold their work already.
        stack.enter_context(forward_hooks([(layers[layer], give)]))
        return model(**inputs, use_cache=False).logits


class _Skipped(ReplacedForward):
    """In the place of a layer's forward: what goes in comes out."""

    def __init__(self, module: torch.nn.Module, others: int | None) -> None:
        super().__init__(module)
        self._others = others

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if self._others is None else (args[0], *[None] * self._others)
