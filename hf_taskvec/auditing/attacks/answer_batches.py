"""Passages in batches, with the positions at which a model predicts the tokens of their answers.

Rows are padded on the right, so that each position is its own index in any causal architecture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_taskvec.analysis.argument_checks import check_batch_size, check_model
from hf_taskvec.analysis.layer_features import layers_of
from hf_taskvec.analysis.token_batches import Batch, make_batch
from hf_taskvec.analysis.token_rows import check_rows
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage
from hf_taskvec.models.model_facts import accepts_logits_to_keep, rows_per_pass

# The hidden states of all layers that are kept for one batch take at most so many bytes, in fp32.
_STATES_BYTES = 1 << 29


@dataclass(frozen=True, eq=False)
class AnswerBatch:
    """Some passages, padded on the right.

    Args:
        passages (`tuple[TokenizedPassage]`):
            The passages, in their order.
        tokens (`Batch`):
            Prompt and answer of each.

    """

    passages: tuple[TokenizedPassage, ...]
    tokens: Batch

    @property
    def part(self) -> slice:
        """Which of all passages these are."""
        return slice(self.tokens.first, self.tokens.first + len(self.passages))

    @property
    def spans(self) -> list[slice]:
        """The positions of each row whose next token is one of its answer's."""
        starts = (len(passage.prompt_ids) - 1 for passage in self.passages)
        return [slice(start, start + len(p.answer_ids)) for start, p in zip(starts, self.passages, strict=True)]

    @property
    def is_predicting(self) -> torch.Tensor:
        """The same positions as a mask of (rows, positions)."""
        mask = torch.zeros(self.tokens.input_ids.shape, dtype=torch.bool)
        for row, span in enumerate(self.spans):
            mask[row, span] = True
        return mask

    @property
    def true_tokens(self) -> torch.Tensor:
        """The tokens of all answers, one passage after the other."""
        return torch.tensor([token for passage in self.passages for token in passage.answer_ids])

    def inputs(self, model: Any) -> dict[str, Any]:
        """What the model takes; if it can, it leaves out logits that come before every answer."""
        inputs: dict[str, Any] = self.tokens.inputs(model)
        if accepts_logits_to_keep(model):
            inputs["logits_to_keep"] = self.tokens.input_ids.shape[1] - min(span.start for span in self.spans)
        return inputs

    def answer_logits(self, logits: torch.Tensor) -> Iterator[torch.Tensor]:
        """For each passage the logits that predict its answer, in fp32 or better, of what a model gave for `inputs`."""
        left_out = self.tokens.input_ids.shape[1] - logits.shape[1]
        for row, span in enumerate(self.spans):
            found = logits[row, span.start - left_out : span.stop - left_out]
            yield found if found.dtype == torch.float64 else found.float()

    def means(self, values: torch.Tensor) -> list[float]:
        """The mean over each passage's answer of values in the order of `true_tokens`."""
        lengths = [len(passage.answer_ids) for passage in self.passages]
        return [part.double().mean().item() for part in values.cpu().split(lengths)]

    def mean_log_probs(self, logits: torch.Tensor) -> list[float]:
        """The mean log-probability of each passage's answer, of what a model gave for `inputs`."""
        found = [
            token_log_probs(part, torch.tensor(passage.answer_ids)).double().mean().item()
            for part, passage in zip(self.answer_logits(logits), self.passages, strict=True)
        ]
        check_log_probs(found, self.passages)
        return found


def answer_batches(
    model: Any, passages: Sequence[TokenizedPassage], batch_size: int, kept_states: int = 0
) -> list[AnswerBatch]:
    """All passages in batches, in their order.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A live causal model, which is to read them.
        passages (`Sequence[TokenizedPassage]`):
            The passages in its tokens.
        batch_size (`int`):
            The most rows in a batch; long passages and large vocabularies make batches smaller.
        kept_states (`int`, *optional*, defaults to 0):
            Of how many models the hidden states of all layers are to be kept at once, for a whole batch.

    Raises:
        `BadValueError`: If there is no passage, one has no prompt or no answer, or the model cannot read it.

    """
    check_model(model)
    check_batch_size(batch_size)
    if not passages:
        raise BadValueError("there are no passages: give at least one.")
    for passage in passages:
        for name, ids in (("prompt", passage.prompt_ids), ("answer", passage.answer_ids)):
            if not ids:
                raise BadValueError(f"passage {passage.text.id} has no token in its {name}: leave it out.")
    rows = [[*passage.prompt_ids, *passage.answer_ids] for passage in passages]
    check_rows(rows, model, "a passage")
    width = max(map(len, rows))
    size = min(batch_size, rows_per_pass(model.config, width))
    if kept_states:
        layer_bytes = 4 * width * model.config.get_text_config().hidden_size
        row_bytes = kept_states * layer_bytes * (len(layers_of(model)) + 1)
        size = max(1, min(size, _STATES_BYTES // row_bytes))
    return [
        AnswerBatch(tuple(passages[first : first + size]), make_batch(rows[first : first + size], first))
        for first in range(0, len(rows), size)
    ]


def token_log_probs(logits: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """The log-probability of the true token of each line of logits."""
    return logits.gather(-1, true.to(logits.device)[:, None])[:, 0] - logits.logsumexp(-1)


def check_log_probs(values: Sequence[float], passages: Sequence[TokenizedPassage]) -> None:
    """Refuse what broken weights give, by the name of the first passage."""
    for value, passage in zip(values, passages, strict=True):
        if not np.isfinite(value):
            raise BadValueError(
                f"the model's logits are NaN or infinite at passage {passage.text.id}: its weights are broken (or too "
                "large for float16)."
            )
