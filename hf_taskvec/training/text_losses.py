"""What a training run makes small: losses of texts, and what a run's objective has to offer.

A loss is a function of what the model says of a micro-batch, its tokens and its labels, and gives a *sum*; the loop
divides by how many there are in the whole batch, so processes and micro-batches may share it in any way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from hf_taskvec.training.settings import ComputePrecision
from hf_taskvec.training.token_blocks import IGNORED, TokenBlocks
from hf_taskvec.training.trained_model import TrainingBase

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: logits (or hidden states), tokens and labels of a micro-batch -> the loss, summed
SummedLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TextLoss:
    """A loss of a text, and how it counts.

    Args:
        summed (`Callable`):
            From what the model says, the tokens and the labels of a micro-batch to the sum of its losses.
        unit (`"target"`, `"token"` or `"block"`, *optional*, defaults to `"target"`):
            What the loss is a mean over: the predicted tokens, all tokens, or the blocks.
        weight (`float`, *optional*, defaults to 1.0):
            How much that mean counts.
        layer (`int`, *optional*):
            Reads the hidden states after this layer (from 0) instead of the logits.
    """

    summed: SummedLoss
    unit: Literal["target", "token", "block"] = "target"
    weight: float = 1.0
    layer: int | None = None

    def count(self, blocks: TokenBlocks, rows: torch.Tensor) -> int:
        """How many units these rows have; at least 1, to divide by."""
        if self.unit == "target":
            return max(1, blocks.targets(rows))
        return max(1, rows.numel() * (blocks.length if self.unit == "token" else 1))

    def of(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """What the model says of some tokens, as this loss reads it."""
        if self.layer is None:
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
            return logits
        return states_after(model, ids, self.layer)


@dataclass(frozen=True)
class SecondText:
    """A text of which each step takes a batch, beside that of the text that is learnt."""

    blocks: TokenBlocks
    loss: TextLoss


class RunObjective(Protocol):
    """What a run learns from beside its blocks, opened and checked; no weight is loaded yet."""

    @property
    def configs(self) -> "list[PreTrainedConfig]":
        """Of the other models that are loaded."""

    @property
    def key(self) -> list[Any]:
        """What a run is known by; nothing for the plain loss."""

    def to_json(self) -> dict[str, Any]:
        """The same for a record."""

    def load(self, precision: ComputePrecision, device: torch.device) -> tuple[TextLoss, SecondText | None]:
        """The loss of the run's blocks, and the second text."""


def states_after(model: Any, ids: torch.Tensor, layer: int) -> torch.Tensor:
    """A model's hidden states after a layer (from 0)."""
    found: torch.Tensor = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[layer + 1]
    return found


def frozen_model(opened: TrainingBase, precision: ComputePrecision, device: torch.device) -> Any:
    """A model that nothing is learnt by, on its device; bf16 passes need no more than bf16 weights."""
    model: Any = opened.load(torch.bfloat16 if precision == "bf16" else torch.float32)
    return model.to(device).eval().requires_grad_(False)


# The losses.


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of the labels, each predicted from the tokens before it."""
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def block_next_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same, summed over each block by itself."""
    losses = cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], ignore_index=IGNORED, reduction="none"
    )
    return losses.sum(dim=1)


def divergence(logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ model) of the next token's distribution, summed where a label counts."""
    model, teacher = (log_softmax(each[:, :-1].float(), dim=-1) for each in (logits, teacher_logits))
    each_token = kl_div(model, teacher, reduction="none", log_target=True).sum(dim=-1)
    return each_token.masked_fill(labels[:, 1:] == IGNORED, 0.0).sum()


NEXT_TOKEN = TextLoss(next_token_loss)
