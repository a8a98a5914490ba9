"""Unlearning depth (UDS, Lee et al. 2026, arXiv 2605.24614): how deep inside a model the knowledge is gone.

The untouched model reads a passage with another model's hidden states in the place of its own after one layer ℓ, and
goes on from there. What the answer loses by the states of a model that never saw the book, d1(ℓ), is what that layer
knows; what it loses by the edited model's, d2(ℓ), is how much of that the edit took away:

    UDS = Σ_ℓ d1·clip(d2/d1, 0, 1) / Σ_ℓ d1     over the layers with d1 > 0.05 (nats a token)

for each passage, then the mean over passages, as the authors' code does. 0: all of it can still be read from the edited
model's states; 1: no more than from those of a model that never saw the book.

**A variant for books**, in two points. The original scores the tokens of a named entity; a passage of a book has none,
so all tokens of the answer are scored. And the last layer's states are taken before the final norm, where they are put
back; `output_hidden_states`, which the original uses, gives them after it.

**Which positions are replaced**: those that predict a scored token, from the prompt's last to the answer's last but
one, as in the original. The prompt's other positions keep the untouched model's states, so that later layers may still
look things up there: what is asked is whether the answer is known *where it is spoken*. Replacing the prompt as well
would make the edited model's reading of the prompt count as forgetting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_taskvec.analysis.argument_checks import check_model, is_finite_number
from hf_taskvec.analysis.resumed_forward import LayerStates, layer_states, resumed_logits
from hf_taskvec.auditing.attacks.answer_batches import AnswerBatch, answer_batches
from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage
from hf_taskvec.evaluation.scoring.statistics import Array
from hf_taskvec.models.layout import without_peft
from hf_taskvec.models.model_facts import evaluation_mode, vocabulary_size
from hf_taskvec.progress import progress_bar

# A layer counts if the reference's states cost the answer more than this, in nats a token (as in the original).
THRESHOLD = 0.05


@dataclass(frozen=True)
class DepthChecks:
    """Scores that are known beforehand, measured on the passage that counts most.

    Args:
        untouched (`float`):
            With the untouched model as the edited one: 0, or the machinery is wrong.
        reference (`float`):
            With the reference as the edited one: 1.

    """

    untouched: float
    reference: float


@dataclass(frozen=True, eq=False)
class UnlearningDepth:
    """How deep inside the edited model the passages are gone, made by `unlearning_depth`.

    Args:
        score (`float`, *optional*):
            The mean of `passage_scores` over the passages that have one, 0 to 1; `None` if there is none.
        reason (`str`, *optional*):
            Why there is no score.
        reference_drops (`numpy.ndarray`):
            d1 of (passages, layers): what the reference's states cost the answer, in nats a token.
        edited_drops (`numpy.ndarray`):
            d2 of (passages, layers): what the edited model's states cost it.
        numerators (`numpy.ndarray`):
            For each passage Σ d1·clip(d2/d1, 0, 1) over the layers that count.
        denominators (`numpy.ndarray`):
            For each passage Σ d1 over the layers that count; 0 if none does.
        checks (`DepthChecks`, *optional*):
            The two scores that are known beforehand; `None` without a score.
        threshold (`float`):
            Above which d1 a layer counts, in nats a token.

    """

    score: float | None
    reason: str | None
    reference_drops: Array
    edited_drops: Array
    numerators: Array
    denominators: Array
    checks: DepthChecks | None
    threshold: float

    @property
    def passage_scores(self) -> Array:
        """The score of each passage; NaN for one of which no layer knows anything."""
        counts = self.denominators > 0
        return np.where(counts, self.numerators / np.where(counts, self.denominators, 1.0), np.nan)

    @property
    def layer_reference_drops(self) -> Array:
        """d1 of each layer, the mean over all passages."""
        return self.reference_drops.mean(axis=0)

    @property
    def layer_edited_drops(self) -> Array:
        """d2 of each layer, the mean over all passages."""
        return self.edited_drops.mean(axis=0)

    @property
    def score_of_means(self) -> float | None:
        """The score of the layers' mean drops; `None` if no mean d1 is above the threshold.

        A single passage's d1 is above the threshold now and then by chance, also where nothing is known; the mean of
        many is not.
        """
        numerator, denominator = _sums(self.layer_reference_drops, self.layer_edited_drops, self.threshold)
        return float(numerator / denominator) if denominator > 0 else None


@torch.inference_mode()
def unlearning_depth(
    *,
    edited: Any,
    untouched: Any,
    reference: Any,
    passages: Sequence[TokenizedPassage],
    threshold: float = THRESHOLD,
    batch_size: int = 8,
    progress: bool | None = None,
) -> UnlearningDepth:
    """How deep inside an edited model the knowledge of passages is gone: the variant of UDS for books.

    Args:
        edited (`PreTrainedModel` or `PeftModel`):
            The live model that should have forgotten.
        untouched (`PreTrainedModel` or `PeftModel`):
            The model that knows the passages, and goes on from the others' states.
        reference (`PreTrainedModel` or `PeftModel`):
            A model that never saw them.
        passages (`Sequence[TokenizedPassage]`):
            Prompts and true answers in the models' tokens.
        threshold (`float`, *optional*, defaults to 0.05):
            A layer counts for a passage if d1 is above it, in nats a token.
        batch_size (`int`, *optional*, defaults to 8):
            The most passages in a forward pass.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `UnlearningDepth`: The score, and what it is made of for each passage and layer.

    Raises:
        `MismatchError`: If the models differ in architecture, layers, size or vocabulary.
        `BadValueError`: If there is no passage, a model cannot read one, or its logits are not finite.
        `UnsupportedError`: If the models have no list of layers.

    Example:
        >>> found = unlearning_depth(edited=a, untouched=b, reference=c, passages=passages)  # doctest: +SKIP
        >>> found.score, found.layer_edited_drops  # doctest: +SKIP

    """
    if not is_finite_number(threshold) or threshold < 0:
        raise BadValueError(f"threshold={threshold!r} must be a number of nats, 0 or more.")
    for role, model in (("edited", edited), ("reference", reference)):
        _check_same_shape(untouched, model, role)
    # The untouched model's states at all positions, and another's at the answer's.
    batches = answer_batches(untouched, passages, batch_size, kept_states=2)
    by_reference, by_edited = [], []
    with (
        evaluation_mode(untouched),
        evaluation_mode(edited),
        evaluation_mode(reference),
        progress_bar([], "unlearning depth", progress, total=len(passages)) as bar,
    ):
        for batch in batches:
            d1, d2 = _drops(untouched, (reference, edited), batch)
            by_reference.append(d1)
            by_edited.append(d2)
            bar.update(len(batch.passages))
        d1, d2 = np.concatenate(by_reference), np.concatenate(by_edited)
        numerators, denominators = _sums(d1, d2, threshold)
        counts = denominators > 0
        if not counts.any():
            reason = (
                f"no layer counts for any passage: the reference's hidden states cost the answers at most "
                f"{d1.max():.3g} nats a token in the untouched model, which is not above {threshold:g}. It does not "
                "know these passages better than the reference does."
            )
            return UnlearningDepth(None, reason, d1, d2, numerators, denominators, None, threshold)
        score = math.fsum(numerators[counts] / denominators[counts]) / int(counts.sum())
        checks = _checks(untouched, reference, passages[int(denominators.argmax())], threshold)
    return UnlearningDepth(score, None, d1, d2, numerators, denominators, checks, threshold)


def _drops(untouched: Any, sources: Sequence[Any], batch: AnswerBatch) -> list[Array]:
    """For each source what its states cost the answers in the untouched model, of (passages, layers)."""
    inputs, predicting = batch.inputs(untouched), batch.is_predicting
    own = layer_states(untouched, batch.tokens.inputs(untouched))
    layers = len(own.others)

    def score(layer: int, hidden: torch.Tensor) -> Array:
        return np.array(batch.mean_log_probs(resumed_logits(untouched, layer, hidden, inputs, own.others)))

    before = score(layers - 1, own.hidden[-1])
    found = []
    for source in sources:
        other = layer_states(source, batch.tokens.inputs(source), lambda hidden: hidden[predicting.to(hidden.device)])
        patched = (_patched(own, other, layer, predicting) for layer in range(layers))
        found.append(np.stack([before - score(layer, hidden) for layer, hidden in enumerate(patched)], axis=1))
    return found


def _patched(own: LayerStates, other: LayerStates, layer: int, predicting: torch.Tensor) -> torch.Tensor:
    """The states after a layer, with another model's at the positions that predict the answers."""
    hidden = own.hidden[layer + 1].clone()
    hidden[predicting.to(hidden.device)] = other.hidden[layer + 1].to(hidden)
    return hidden


def _sums(d1: Array, d2: Array, threshold: float) -> tuple[Array, Array]:
    """Numerators and denominators, of drops whose last axis is the layers."""
    counts = d1 > threshold
    # clip(d2, 0, d1) is d1·clip(d2/d1, 0, 1) without the division.
    return np.where(counts, np.clip(d2, 0, d1), 0.0).sum(axis=-1), np.where(counts, d1, 0.0).sum(axis=-1)


def _checks(untouched: Any, reference: Any, passage: TokenizedPassage, threshold: float) -> DepthChecks:
    """The two scores that are known beforehand, of one passage that has a score."""
    (batch,) = answer_batches(untouched, [passage], 1)
    d1, unchanged, same = _drops(untouched, (reference, untouched, reference), batch)

    def score(d2: Array) -> float:
        numerator, denominator = _sums(d1, d2, threshold)
        return float(numerator[0] / denominator[0])

    return DepthChecks(score(unchanged), score(same))


def _check_same_shape(untouched: Any, model: Any, role: str) -> None:
    """Refuse a model whose hidden states mean nothing in the untouched one."""
    for each in (untouched, model):
        check_model(each)
    for what, is_, should in zip(
        ("architecture", "number of layers", "hidden size", "vocabulary size"),
        _shape(model),
        _shape(untouched),
        strict=True,
    ):
        if is_ != should:
            raise MismatchError(
                f"the {role} model's {what} is {is_}, the untouched model's {should}: hidden states cannot be moved "
                "from one to the other. Use models that were made from the same base."
            )


def _shape(model: Any) -> tuple[str, int, int, int]:
    inner = without_peft(model)
    config = inner.config.get_text_config()
    return type(inner).__name__, config.num_hidden_layers, config.hidden_size, vocabulary_size(inner.config)
