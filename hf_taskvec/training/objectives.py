"""What coefficients are learned for: `ForgetObjective`, `MergeObjective`, and what an objective of one's own must have.

An objective names texts and gives one value for each block. What is made small is the sum over texts of the mean value
of a batch's blocks: a mean over blocks is the same however many processes share them.
"""

import math
import numbers
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.functional import cross_entropy

from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.models.model_facts import context_length, evaluation_mode, input_device, vocabulary_size
from hf_taskvec.progress import progress_bar
from hf_taskvec.training.token_blocks import IGNORED, read_blocks

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class TextBatch:
    """Some blocks of one of an objective's texts.

    Args:
        text (`str`):
            The name of the text.
        rows (`torch.Tensor`):
            Which of its blocks they are.
        ids (`torch.Tensor`):
            Their tokens, one row for each block, on the model's device.
        labels (`torch.Tensor`):
            The same, with −100 for what is not to be predicted.
        untouched (`torch.Tensor`, *optional*):
            What `token_losses` gives for the model without any vector, if the objective is `compared` on this text.

    """

    text: str
    rows: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor
    untouched: torch.Tensor | None = None


class Objective(Protocol):
    """What `fit_scales` makes small: a function of a model and a batch, with the texts that batches are taken from."""

    @property
    def texts(self) -> "Mapping[str, datasets.Dataset]":
        """The packed blocks of each text, as `Book.training_blocks` gives them. Each batch has some of each."""

    @property
    def compared(self) -> Collection[str]:
        """The names of those texts on which the model is compared with what it is without any vector."""

    def __call__(self, model: Any, batch: TextBatch) -> torch.Tensor:
        """One value for each block of the batch, the smaller the better, through which gradients flow."""


@dataclass(frozen=True)
class MergeObjective:
    """The mean loss on the texts of several tasks, each of which counts the same.

    Args:
        blocks (`Mapping[str, datasets.Dataset]`):
            The packed blocks of each task.

    """

    blocks: "Mapping[str, datasets.Dataset]" = field(repr=False)

    @property
    def texts(self) -> "Mapping[str, datasets.Dataset]":
        """The packed blocks of each task."""
        return self.blocks

    @property
    def compared(self) -> Collection[str]:
        """None: only the model's own losses count."""
        return ()

    def __call__(self, model: Any, batch: TextBatch) -> torch.Tensor:
        """The mean loss of each block, divided by the number of tasks."""
        return _block_means(token_losses(model, batch.ids, batch.labels), batch.labels) / len(self.blocks)


@dataclass(frozen=True)
class ForgetObjective:
    """Text that is to be forgotten is brought to the loss of text that was never seen, and other text is kept.

    A forgotten block counts by how far its loss is below the target, `max(0, target − loss)`, and for nothing above it:
    so the loss does not run away upwards, and no block counts for more than the target. A kept block counts by how far
    its loss has risen above that of the untouched model and the slack, `max(0, loss − untouched − slack)`: neither is
    there anything to gain from learning it better.

    Args:
        forget_blocks (`datasets.Dataset`):
            Packed blocks of what is to be forgotten.
        keep_blocks (`datasets.Dataset`):
            Packed blocks of what is not.
        target (`float` or `torch.Tensor`):
            The loss to be reached, in nats per token: of similar text that the model never saw. Or one for each token
            of `forget_blocks`, as `block_losses` gives them for a model that never saw this text; then each token
            counts by how far it is below its own.
        slack (`float`, *optional*, defaults to 0.02):
            How far the loss of a kept block may rise, in nats per token.
        keep_weight (`float`, *optional*, defaults to 1.0):
            How much a nat of kept text counts beside one of text to be forgotten.

    Raises:
        `BadValueError`: If a number makes no sense.
        `MismatchError`: If the targets of tokens are not as many as the tokens.

    """

    forget_blocks: "datasets.Dataset" = field(repr=False)
    keep_blocks: "datasets.Dataset" = field(repr=False)
    target: float | torch.Tensor = field(repr=False)
    slack: float = 0.02
    keep_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("slack", 0.0), ("keep_weight", 0.0)):
            _check_number(name, vars(self)[name], least)
        if not isinstance(self.target, torch.Tensor):
            _check_number("target", self.target, 0.0)
            return
        first = self.forget_blocks[:1]["input_ids"]
        expected = [len(self.forget_blocks), len(first[0]) - 1 if len(first) else 0]
        if list(self.target.shape) != expected:
            raise MismatchError(
                f"target has the shape {list(self.target.shape)}, and the tokens that are predicted in forget_blocks "
                f"{expected}. Give block_losses(model, forget_blocks), or one number."
            )
        if not bool(self.target.isfinite().all()):
            raise BadValueError("target has losses that are not finite numbers.")

    @property
    def texts(self) -> "Mapping[str, datasets.Dataset]":
        """Two texts, `forget` and `keep`."""
        return {"forget": self.forget_blocks, "keep": self.keep_blocks}

    @property
    def compared(self) -> Collection[str]:
        """The kept text, whose loss shall not rise above that of the untouched model."""
        return ("keep",)

    def __call__(self, model: Any, batch: TextBatch) -> torch.Tensor:
        """How far each block is from what it should be, in nats per token."""
        losses = token_losses(model, batch.ids, batch.labels)
        if batch.text == "keep":
            assert batch.untouched is not None
            risen = _block_means(losses - batch.untouched.to(losses), batch.labels) - self.slack
            return self.keep_weight * risen.clamp_min(0.0)
        if isinstance(self.target, torch.Tensor):
            return _block_means((self.target[batch.rows].to(losses) - losses).clamp_min(0.0), batch.labels)
        return (self.target - _block_means(losses, batch.labels)).clamp_min(0.0)


def token_losses(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each token but the first, in nats: one row for each block; 0 where the label is −100.

    Args:
        model (`PreTrainedModel`):
            A causal language model.
        ids (`torch.Tensor`):
            Tokens, one row for each block, on the model's device.
        labels (`torch.Tensor`):
            The same, with −100 for what is not to be predicted.

    Returns:
        `torch.Tensor`: The losses, through which gradients flow.

    """
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    following = labels[:, 1:]
    losses = cross_entropy(logits.transpose(1, 2), following, ignore_index=IGNORED, reduction="none")
    return losses.view(following.shape)


def block_losses(
    model: Any, blocks: "datasets.Dataset", *, batch_size: int = 8, progress: bool | None = None
) -> torch.Tensor:
    """The loss of every token of packed blocks.

    Of a model that never saw the text, these are the target of a `ForgetObjective`.

    Args:
        model (`PreTrainedModel`):
            A causal language model. It is left as it is.
        blocks (`datasets.Dataset`):
            Rows of `input_ids` of one length, as `Book.training_blocks` gives them.
        batch_size (`int`, *optional*, defaults to 8):
            How many blocks are read at once.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `torch.Tensor`: In nats, one row for each block, for each token but the first; 0 where the label is −100.

    Raises:
        `BadValueError`: If there are no blocks.
        `MismatchError`: If the model cannot read them.

    """
    read = read_blocks(blocks, vocabulary_size(model.config), context_length(model.config))
    device, found = input_device(model), []
    with evaluation_mode(model), torch.no_grad():
        for rows in progress_bar(torch.arange(len(read)).split(batch_size), "Losses", progress):
            found.append(token_losses(model, read.ids[rows].to(device), read.labels[rows].to(device)).cpu())
    return torch.cat(found)


def _block_means(losses: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the predicted tokens of each block."""
    counts = (labels[:, 1:] != IGNORED).sum(dim=1).clamp_min(1)
    return losses.masked_fill(labels[:, 1:] == IGNORED, 0.0).sum(dim=1) / counts


def _check_number(name: str, value: Any, least: float) -> None:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or float(value) < least:
        raise BadValueError(f"{name}={value!r} must be a number of at least {least:g}.")
