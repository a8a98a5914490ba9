"""Batches of token rows, and the loss of a model over them.

Rows are padded on the right: each position is then its own index, in any causal architecture.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_taskvec.analysis.token_rows import TokenRows
from hf_taskvec.models.model_facts import input_device


@dataclass(frozen=True)
class Batch:
    """Some rows, padded on the right. `first` is the number of the first of them."""

    first: int
    lengths: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def labels(self) -> torch.Tensor:
        """The tokens to predict; padding is not."""
        return self.input_ids.masked_fill(self.attention_mask == 0, -100)

    def inputs(self, model: Any) -> dict[str, torch.Tensor]:
        """What the model takes, on the device where it takes it."""
        device = input_device(model)
        return {"input_ids": self.input_ids.to(device), "attention_mask": self.attention_mask.to(device)}


def make_batch(rows: TokenRows, first: int = 0) -> Batch:
    """Some rows as one batch; `first` is the number of the first of them."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return Batch(first, lengths, ids, mask)


def batches(rows: TokenRows, batch_size: int, first: int = 0) -> Iterator[Batch]:
    """All rows in batches, in their order; `first` is the number of the first row."""
    for start in range(0, len(rows), batch_size):
        yield make_batch(rows[start : start + batch_size], first + start)


def summed_loss(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """The cross-entropy of a batch's next tokens added up (in fp32 or better), and how many they are."""
    logits = model(**batch.inputs(model), use_cache=False).logits[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    labels = batch.labels[:, 1:].to(logits.device)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, int((labels != -100).sum())


def mean_loss(model: Any, rows: TokenRows, batch_size: int) -> float:
    """The mean cross-entropy of a model's next tokens over all rows, in nats."""
    total, count = 0.0, 0
    for batch in batches(rows, batch_size):
        with torch.inference_mode():
            loss, tokens = summed_loss(model, batch)
        total += loss.item()
        count += tokens
    return total / count


def row_losses(model: Any, rows: TokenRows, batch_size: int) -> torch.Tensor:
    """The mean cross-entropy of each row's next tokens, in nats and fp64; the model is in evaluation mode already."""
    found = []
    for batch in batches(rows, batch_size):
        with torch.inference_mode():
            logits = model(**batch.inputs(model), use_cache=False).logits[:, :-1]
            labels = batch.labels[:, 1:].to(logits.device)
            losses = torch.nn.functional.cross_entropy(
                logits.float().transpose(1, 2), labels, ignore_index=-100, reduction="none"
            ).double()
            found.append((losses.sum(dim=1) / (labels != -100).sum(dim=1)).cpu())
    return torch.cat(found)
