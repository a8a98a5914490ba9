"""The features of every layer of a decoder, taken by hooks during forward passes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from hf_taskvec.analysis.token_batches import Batch, batches
from hf_taskvec.analysis.token_rows import TokenRows
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.models.layout import without_peft

#: The feature of a row: the mean over its tokens, or the one of its last token.
Feature = Literal["mean", "last"]
_Hook = Callable[[torch.nn.Module, tuple[Any, ...], Any], Any]


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The blocks of a decoder, in order."""
    inner = without_peft(model)
    count = inner.config.get_text_config().num_hidden_layers
    for module in inner.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedError(
        f"{type(inner).__name__} has no list of {count} layers, so their features cannot be told apart."
    )


@contextmanager
def forward_hooks(hooks: Sequence[tuple[torch.nn.Module, _Hook]]) -> Iterator[None]:
    """A block in which modules have these forward hooks."""
    handles = []
    try:
        handles += [module.register_forward_hook(hook) for module, hook in hooks]
        yield
    finally:
        for handle in handles:
            handle.remove()


def hidden_states(output: Any) -> torch.Tensor:
    """The hidden states in what a block gives: some architectures give a tuple."""
    return output[0] if isinstance(output, tuple) else output


def with_hidden_states(output: Any, hidden: torch.Tensor) -> Any:
    """What a block gives, with these hidden states in the place of its own."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@torch.inference_mode()
def layer_features(model: Any, rows: TokenRows, feature: Feature, batch_size: int, bar: Any) -> torch.Tensor:
    """Pooled features of every layer: (rows, layers, size), in fp32. Nothing else of a forward pass is kept."""
    found: list[torch.Tensor] = []
    for batch in batches(rows, batch_size):
        pooled: list[torch.Tensor] = []

        def keep(
            module: torch.nn.Module, inputs: tuple[Any, ...], output: Any, batch: Batch = batch, to: list = pooled
        ) -> None:
            to.append(_pooled(hidden_states(output), batch, feature))

        with forward_hooks([(layer, keep) for layer in layers_of(model)]):
            without_head(model)(**batch.inputs(model), use_cache=False)
        found.append(torch.stack(pooled, dim=1))
        bar.update(len(batch.lengths))
    return torch.cat(found)


def _pooled(hidden: torch.Tensor, batch: Batch, feature: Feature) -> torch.Tensor:
    hidden = hidden.float().cpu()
    if feature == "last":
        return hidden[torch.arange(len(hidden)), batch.lengths - 1]
    mask = batch.attention_mask[..., None]
    return (hidden * mask).sum(dim=1) / batch.lengths[:, None]


def without_head(model: Any) -> Any:
    """The model without its output layer, whose logits are not needed here."""
    inner = without_peft(model)
    return inner.base_model if inner.base_model is not inner else inner
