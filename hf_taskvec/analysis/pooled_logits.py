"""The outputs of a language model that are compared: its logits, pooled to one or some samples for each row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hf_taskvec.analysis.token_batches import Batch, batches, make_batch
from hf_taskvec.analysis.token_rows import TokenRows
from hf_taskvec.errors import BadValueError
from hf_taskvec.models.model_facts import accepts_logits_to_keep, rows_per_pass

#: One sample for each row: the logits after its last token (`last`) or their mean over its tokens (`mean`); or one for
#: each of some positions of each row, drawn at random (`sample`).
Pooling = Literal["last", "mean", "sample"]


@dataclass(frozen=True)
class SamplePooling:
    """How samples are made of a row's logits."""

    how: Pooling
    positions: int
    seed: int
    batch_size: int

    def count(self, row: Sequence[int]) -> int:
        """The number of samples of a row."""
        return min(self.positions, len(row)) if self.how == "sample" else 1

    def chosen(self, number: int, length: int) -> torch.Tensor:
        """The positions of a row that are pooled, whatever other rows are in the batch."""
        if self.how == "last":
            return torch.tensor([length - 1])
        if self.how == "mean":
            return torch.arange(length)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return torch.randperm(length, generator=generator)[: self.positions].sort().values


def pooled_logits(
    model: Any, rows: TokenRows, first: int, pool: SamplePooling, bar: Any, *, log: bool = False
) -> torch.Tensor:
    """The pooled logits of some rows, or with `log` the logarithms of their probabilities; a line a sample, in fp32."""
    skips = accepts_logits_to_keep(model)
    found = []
    for batch in batches(rows, pool.batch_size, first):
        most = rows_per_pass(model.config, batch.input_ids.shape[1])
        for start in range(0, len(batch.lengths), most):
            part = rows[batch.first - first :][start : min(start + most, len(batch.lengths))]
            found.append(_pooled(model, make_batch(part, batch.first + start), pool, skips, log))
        bar.update(len(batch.lengths))
    result = torch.cat(found)
    if not bool(result.isfinite().all()):
        raise BadValueError(
            "the model's logits are NaN or infinite: its weights are broken (or too large for float16)."
        )
    return result


@torch.inference_mode()
def _pooled(model: Any, batch: Batch, pool: SamplePooling, skips: bool, log: bool) -> torch.Tensor:
    chosen = [pool.chosen(batch.first + i, int(length)) for i, length in enumerate(batch.lengths)]
    asked = torch.cat(chosen).unique()  # no other positions go through the output layer
    inputs = batch.inputs(model)
    keep = {"logits_to_keep": asked.to(inputs["input_ids"].device)} if skips else {}
    logits = model(**inputs, use_cache=False, **keep).logits
    place = {int(position): i for i, position in enumerate(asked)} if skips else None
    samples = []
    for i, positions in enumerate(chosen):
        index = positions if place is None else torch.tensor([place[int(p)] for p in positions])
        own = logits[i, index.to(logits.device)].float()
        if log:
            own = own.log_softmax(dim=-1)
        samples.append(own.mean(dim=0, keepdim=True) if pool.how == "mean" else own)
    return torch.cat(samples).cpu()
