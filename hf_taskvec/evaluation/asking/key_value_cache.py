"""A key-value cache that is allocated once, for a whole batch's continuation.

transformers' growing cache copies the whole past at every generated token, which on a CPU can take a third of
the time. This one is told how long the text will be and writes each token into its place; attention reads the
very tensors that it would read otherwise.
"""

from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer


def preallocated_cache(model: Any, length: int) -> Cache | None:
    """A cache for texts of up to `length` tokens, or `None` if the model needs a kind of its own.

    Sliding windows, linear attention and other special layers keep what transformers makes for them.
    """
    if not model._supports_default_dynamic_cache():
        return None
    usual = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not usual.layers or any(type(layer) is not DynamicLayer for layer in usual.layers):
        return None
    return Cache(layers=[_PreallocatedLayer(length) for _ in usual.layers])


class _PreallocatedLayer(DynamicLayer):
    """transformers' growing layer, as views of memory that is there from the start."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._buffers = [
            states.new_empty((*states.shape[:-2], self.length, states.shape[-1]))
            for states in (key_states, value_states)
        ]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        end = past + key_states.shape[-2]
        if end > self.length:  # more than was announced: grow as usual
            return super().update(key_states, value_states, *args, **kwargs)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., past:end, :] = states
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values
