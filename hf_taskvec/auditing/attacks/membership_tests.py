"""Membership tests: can one tell from a model's loss which passages it was trained on?

Each test gives a passage a score of its true answer, higher for text that looks more like training text. A model that
never saw a book cannot tell the book's seen passages from its held-out ones (AUC near ½, unless they differ in
themselves); a model that knows it can; and one that was pushed away from it can too, the other way round. So an edited
model is compared with the reference on the same passages, not with ½.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from hf_taskvec.auditing.attacks.answer_batches import answer_batches, check_log_probs, token_log_probs
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage
from hf_taskvec.evaluation.scoring.metrics import MIN_K, min_k
from hf_taskvec.evaluation.scoring.statistics import Array, Draws, Interval, auc_difference, auc_interval, priv_leak
from hf_taskvec.models.model_facts import evaluation_mode
from hf_taskvec.progress import progress_bar

MembershipTest = Literal["loss", "zlib", "min_k", "min_k_plus_plus", "reference"]
# Of a distribution all on one token the variance is 0; open-unlearning takes at least this.
_LEAST_VARIANCE = 1e-6


@dataclass(frozen=True, eq=False)
class MembershipScores:
    """Scores of passages, higher for text that looks more like training text. Made by `membership_scores`.

    Args:
        loss (`numpy.ndarray`):
            The mean log-probability of the answer's tokens: the negative loss (Yeom et al. 2018).
        zlib (`numpy.ndarray`):
            The answer's log-probability for each byte of its text as zlib compresses it: repetitive text is likely to
            any model. (Carlini et al. 2021 divide the mean over tokens instead, which also ranks by length.)
        min_k (`numpy.ndarray`):
            Min-K %: the mean log-probability of the 40 % least likely tokens (Shi et al., arXiv 2310.16789).
        min_k_plus_plus (`numpy.ndarray`):
            Min-K %++: the same of z-scores, of a token's log-probability among those of all tokens as the model itself
            would draw them (Zhang et al., arXiv 2404.02936).
        reference (`numpy.ndarray`, *optional*):
            `loss` minus another model's, made by `against`.

    """

    loss: Array
    zlib: Array
    min_k: Array
    min_k_plus_plus: Array
    reference: Array | None = None

    def against(self, other: "MembershipScores") -> "MembershipScores":
        """These scores with the reference test: `loss` minus that of another model on the same passages.

        Raises:
            `BadValueError`: If the other model has scores of another number of passages.

        """
        if len(self.loss) != len(other.loss):
            raise BadValueError(
                f"{len(self.loss)} passages were scored with one model and {len(other.loss)} with the other: the "
                "reference test needs the same passages for both."
            )
        return replace(self, reference=self.loss - other.loss)

    @property
    def by_test(self) -> dict[MembershipTest, Array]:
        """The scores by the name of the test; without `reference` if no other model was given."""
        found: dict[MembershipTest, Array] = {
            "loss": self.loss,
            "zlib": self.zlib,
            "min_k": self.min_k,
            "min_k_plus_plus": self.min_k_plus_plus,
        }
        return found if self.reference is None else {**found, "reference": self.reference}


@dataclass(frozen=True)
class MembershipComparison:
    """How well two models tell seen passages from held-out ones by one test.

    Args:
        auc (`Interval`):
            Of the model in question: 1 if every seen passage scores above every held-out one.
        reference_auc (`Interval`):
            Of the model that never saw them.
        difference (`Interval`):
            `auc − reference_auc`, paired: both models see the same resampled passages.
        priv_leak (`float`, *optional*):
            MUSE's PrivLeak in percent; `None` if the reference's AUC is 1.

    """

    auc: Interval
    reference_auc: Interval
    difference: Interval
    priv_leak: float | None


@torch.inference_mode()
def membership_scores(
    model: Any, passages: Sequence[TokenizedPassage], *, batch_size: int = 8, progress: bool | None = None
) -> MembershipScores:
    """The membership scores of passages under a model.

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
        `MembershipScores`: One score of each test for each passage; `against` adds the reference test.

    Raises:
        `BadValueError`: If there is no passage, the model cannot read one, or its logits are not finite.

    Example:
        >>> known = membership_scores(model, passages)  # doctest: +SKIP
        >>> known.against(membership_scores(reference, passages)).by_test  # doctest: +SKIP

    """
    batches = answer_batches(model, passages, batch_size)
    rows: list[tuple[float, float, float, float]] = []
    with evaluation_mode(model), progress_bar([], "membership tests", progress, total=len(passages)) as bar:
        for batch in batches:
            logits = model(**batch.inputs(model), use_cache=False).logits
            for passage, part in zip(batch.passages, batch.answer_logits(logits), strict=True):
                rows.append(_scores(passage, part))
                check_log_probs([rows[-1][0]], [passage])
            bar.update(len(batch.passages))
    return MembershipScores(*np.array(rows).T)


def membership_aucs(seen: MembershipScores, held_out: MembershipScores, draws: Draws) -> dict[MembershipTest, Interval]:
    """How well each test tells a model's seen passages from its held-out ones.

    Args:
        seen (`MembershipScores`):
            Of passages that may have been trained on.
        held_out (`MembershipScores`):
            Of passages of the same book that were not.
        draws (`Draws`):
            How often the passages are drawn anew, the level of the intervals, and the seed.

    Returns:
        `dict[str, Interval]`: The AUC by the name of the test, of the tests that both have.

    """
    return {
        test: auc_interval(above, below, draws.resamples, draws.level, draws.seed)
        for test, (above, below) in _pairs(seen, held_out).items()
    }


def compare_membership(
    seen: MembershipScores,
    held_out: MembershipScores,
    reference_seen: MembershipScores,
    reference_held_out: MembershipScores,
    draws: Draws,
) -> dict[MembershipTest, MembershipComparison]:
    """Whether a model tells seen from held-out passages any better than a model that never saw them.

    Args:
        seen (`MembershipScores`):
            Of passages that may have been trained on, under the model in question.
        held_out (`MembershipScores`):
            Of passages of the same book that were not.
        reference_seen (`MembershipScores`):
            Of the same seen passages under the model that never saw the book.
        reference_held_out (`MembershipScores`):
            Of the same held-out passages under it.
        draws (`Draws`):
            How often the passages are drawn anew, the level of the intervals, and the seed.

    Returns:
        `dict[str, MembershipComparison]`: By the name of the test, of the tests that all four have.

    Raises:
        `BadValueError`: If the two models have scores of different numbers of passages.

    """
    own, other = membership_aucs(seen, held_out, draws), membership_aucs(reference_seen, reference_held_out, draws)
    pairs, reference_pairs = _pairs(seen, held_out), _pairs(reference_seen, reference_held_out)
    return {
        test: MembershipComparison(
            own[test],
            other[test],
            auc_difference(*pairs[test], *reference_pairs[test], draws),
            priv_leak(own[test].value, other[test].value),
        )
        for test in own
        if test in other
    }


def _pairs(seen: MembershipScores, held_out: MembershipScores) -> Mapping[MembershipTest, tuple[Array, Array]]:
    below = held_out.by_test
    return {test: (scores, below[test]) for test, scores in seen.by_test.items() if test in below}


def _scores(passage: TokenizedPassage, logits: torch.Tensor) -> tuple[float, float, float, float]:
    """Loss, zlib, Min-K % and Min-K %++ of one passage, from the logits that predict its answer."""
    log_probs = token_log_probs(logits, torch.tensor(passage.answer_ids)).double()
    compressed = len(zlib.compress(passage.text.answer.encode()))
    every = logits.log_softmax(-1)
    probabilities = every.exp()
    every = every.masked_fill(probabilities == 0, 0.0)  # tokens that are never drawn: 0 · −∞
    mean = (probabilities * every).sum(-1)
    variance = (probabilities * (every - mean[:, None]).square()).sum(-1)
    z_scores = (log_probs - mean.double()) / variance.double().clamp(min=_LEAST_VARIANCE).sqrt()
    return (
        log_probs.mean().item(),
        log_probs.sum().item() / compressed,
        min_k(log_probs.tolist(), MIN_K),
        min_k(z_scores.tolist(), MIN_K),
    )
