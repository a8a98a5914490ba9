"""The logit lens (nostalgebraist 2020): what a model would say if it stopped after each of its layers.

An edit may only stop a model from saying what earlier layers still know. So the hidden states after every layer go
through the model's own final norm and head, and the true answer's tokens are looked for in what comes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_taskvec.analysis.resumed_forward import layer_states, resumed_logits
from hf_taskvec.auditing.attacks.answer_batches import (
    AnswerBatch,
    answer_batches,
    check_log_probs,
    token_log_probs,
)
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage
from hf_taskvec.evaluation.scoring.statistics import Array
from hf_taskvec.models.model_facts import evaluation_mode, input_device, rows_per_pass
from hf_taskvec.progress import progress_bar

# Logits are also copied to fp32 and exponentiated: as if each position were so many.
_COPIES = 8
# The mean log-probabilities after the last layer and of an ordinary forward pass differ by rounding, not by this.
_ROUNDING = 0.05


@dataclass(frozen=True, eq=False)
class LogitLens:
    """What each layer tells of the true answers, made by `logit_lens`.

    The first column is the embeddings' output, before the first layer; the last is the model's own output.

    Args:
        log_probs (`numpy.ndarray`):
            (passages, layers + 1): the mean log-probability of the answer's tokens.
        hits (`numpy.ndarray`):
            (passages, layers + 1): the share of the answer's tokens that come first.

    """

    log_probs: Array
    hits: Array

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.log_probs.shape[1] - 1


@torch.inference_mode()
def logit_lens(
    model: Any, passages: Sequence[TokenizedPassage], *, batch_size: int = 8, progress: bool | None = None
) -> LogitLens:
    """The true answers' log-probabilities and hit rates after every layer of a model.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A live causal model.
        passages (`Sequence[TokenizedPassage]`):
            Prompts and true answers in its tokens.
        batch_size (`int`, *optional*, defaults to 8):
            The most passages in a forward pass.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `LogitLens`: For each passage and layer.

    Raises:
        `BadValueError`: If there is no passage, the model cannot read one, or its logits are not finite.
        `UnsupportedError`: If the model has no list of layers, or does more after them than position by position.

    Example:
        >>> found = logit_lens(model, passages)  # doctest: +SKIP
        >>> found.log_probs.mean(axis=0)  # doctest: +SKIP

    """
    batches = answer_batches(model, passages, batch_size, kept_states=1)
    log_probs: list[Array] = []
    hits: list[Array] = []
    with evaluation_mode(model), progress_bar([], "logit lens", progress, total=len(passages)) as bar:
        for batch in batches:
            found = _looked_at(model, batch)
            if not log_probs:
                _check_last(model, batch, found[0][:, -1])
            log_probs.append(found[0])
            hits.append(found[1])
            bar.update(len(batch.passages))
    return LogitLens(np.concatenate(log_probs), np.concatenate(hits))


def _looked_at(model: Any, batch: AnswerBatch) -> tuple[Array, Array]:
    """Mean log-probabilities and hit rates of a batch, of (passages, layers + 1)."""
    predicting, true = batch.is_predicting, batch.true_tokens
    states = layer_states(model, batch.tokens.inputs(model), lambda hidden: hidden[predicting.to(hidden.device)])
    last, most = len(states.others) - 1, rows_per_pass(model.config, _COPIES)
    log_probs, hits = [], []
    for hidden in states.hidden:
        found, first = [], []
        for lines, tokens in zip(hidden.split(most), true.split(most), strict=True):
            # After the last layer nothing depends on other positions any more: each is a row of its own.
            ids = torch.zeros(len(lines), 1, dtype=torch.long, device=input_device(model))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            logits = resumed_logits(model, last, lines[:, None], inputs, states.others)[:, 0]
            logits = logits if logits.dtype == torch.float64 else logits.float()
            found.append(token_log_probs(logits, tokens).cpu())
            first.append(logits.argmax(-1).cpu() == tokens)
        log_probs.append(batch.means(torch.cat(found)))
        hits.append(batch.means(torch.cat(first)))
        check_log_probs(log_probs[-1], batch.passages)
    return np.array(log_probs).T, np.array(hits).T


def _check_last(model: Any, batch: AnswerBatch, last: Array) -> None:
    """Refuse a model whose own output is not what its last layer gives by way of norm and head."""
    own = np.array(batch.mean_log_probs(model(**batch.inputs(model), use_cache=False).logits))
    if np.abs(own - last).max() > _ROUNDING:
        raise UnsupportedError(
            f"{type(model).__name__} gives other log-probabilities than its last layer's hidden states do, position by "
            "position: it does something else after its layers, and the logit lens would show something else."
        )
