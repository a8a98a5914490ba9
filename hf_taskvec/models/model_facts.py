"""Facts about a live model that evaluation, training and analysis all need, wrapped by PEFT or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch

from hf_taskvec.models.layout import without_peft

# The logits of one forward pass take at most so many bytes, in fp32.
_LOGITS_BYTES = 1 << 29


def context_length(config: Any) -> int | None:
    """How many tokens a model of this configuration reads at once; None for an architecture without a limit (Mamba).

    >>> from transformers import GPT2Config
    >>> context_length(GPT2Config(n_positions=64))
    64
    """
    # GPT-2's n_positions is mapped to this name.
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def vocabulary_size(config: Any) -> int:
    """How many tokens a model of this configuration tells apart."""
    return config.get_text_config().vocab_size


def rows_per_pass(config: Any, positions: int) -> int:
    """How many rows to put through a model at once: the logits of so many positions of each are kept in bounds."""
    return max(1, _LOGITS_BYTES // (4 * positions * vocabulary_size(config)))


def accepts_logits_to_keep(model: Any) -> bool:
    """Whether the model can be asked for the logits of some positions only."""
    return "logits_to_keep" in signature(without_peft(model).forward).parameters


def input_device(model: Any) -> torch.device:
    """Where a dispatched model takes its input; offloaded weights are on `meta`, their hook moves the rest."""
    device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """A block in which the model has no dropout; afterwards each module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
