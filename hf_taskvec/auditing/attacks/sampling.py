"""Sampling, leak@k: the best of k samples, where greedy decoding shows only the one most probable continuation.

Li et al. 2025 (arXiv 2511.04934) draw at temperature 1 from the whole vocabulary. The expected best of j samples is
estimated for every j up to k from the same k samples, without bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking.batch_plan import Row
from hf_taskvec.evaluation.asking.batched_asking import ask
from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages
from hf_taskvec.evaluation.asking.scalable_edits import NoEdit
from hf_taskvec.evaluation.scoring.metrics import score_text
from hf_taskvec.evaluation.texts.passages import Passage
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.training.token_blocks import mixed_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Sampled rows need no likelihood, so more of them fit than the harness begins with on a CPU: measured with two small
# models, sampling is a third to four fifths faster with 64 than with 16, and no faster with 128.
BATCH_SIZE = 64


@dataclass(frozen=True, eq=False)
class LeakAtK:
    """The scores of all samples of each passage, and what follows from them for fewer samples.

    Args:
        ids (`tuple[str]`):
            Of the passages.
        scores (`numpy.ndarray`):
            Rouge-L of each sample by the protocol's scorer: passages × samples.
    """

    ids: tuple[str, ...]
    scores: "NDArray[np.float64]"

    @property
    def expected_best(self) -> "NDArray[np.float64]":
        """leak@j of each passage for every j: passages × samples, column j − 1 for the best of j."""
        return expected_best(self.scores)

    def leak_at(self, samples: int) -> float:
        """The mean over passages of the expected best of so many samples."""
        most = self.scores.shape[1]
        if not 1 <= samples <= most:
            raise BadValueError(f"leak@{samples} cannot be told from {most} samples of each passage: draw more.")
        return float(self.expected_best[:, samples - 1].mean())


def leak_at_k(
    model: Any,
    passages: Sequence[Passage],
    protocol: Protocol,
    tokenizer: Any,
    *,
    samples: int = 16,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    store: FinishedPassages | None = None,
    batch_size: int | None = BATCH_SIZE,
    progress: bool | None = None,
) -> LeakAtK:
    """Several samples of what a model says after each prompt, scored against the true continuation.

    A sample depends on the model, the passage, the seed and its number alone: another batch size, number of processes
    or order of passages gives the same, and more samples have the fewer ones at their beginning. Models that are asked
    with the same seed get the same noise, which pairs their samples.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The model that is asked, as it is.
        passages (`Sequence[Passage]`):
            What is asked.
        protocol (`Protocol`):
            How it is scored, and for how long it is generated; its temperature and seed are not used.
        tokenizer (`PreTrainedTokenizerBase`):
            Of the model.
        samples (`int`, *optional*, defaults to 16):
            k, how many to draw of each passage.
        seed (`int`, *optional*, defaults to 0):
            Of the draws.
        temperature (`float`, *optional*, defaults to 1.0):
            Above 0.
        top_p (`float`, *optional*, defaults to 1.0):
            The nucleus that is sampled from.
        store (`FinishedPassages`, *optional*):
            Keeps what is finished, so that an interrupted attack continues; in memory only without it.
        batch_size (`int`, *optional*, defaults to 64):
            Rows in one batch, halved if memory runs out; with `None` as many as the harness begins with.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `LeakAtK`: The scores of all samples, and leak@j for every j up to k.

    Raises:
        `BadValueError`: If there is nothing to draw, or a passage does not fit into the model's context.

    """
    if samples < 1 or not passages:
        raise BadValueError(f"samples={samples} of {len(passages)} passages: there must be at least one of each.")
    if temperature <= 0:
        raise BadValueError(f"temperature={temperature!r} must be above 0: all samples of 0 would be the greedy one.")
    decoding = replace(protocol.decoding, temperature=temperature, top_p=top_p)
    kept = FinishedPassages(None) if store is None else store
    columns = []
    for number in range(samples):
        # Mixed, so that two seeds share no sample.
        drawn = replace(protocol, decoding=decoding, seed=mixed_seed(seed, number))
        asked = ask(
            model,
            NoEdit(),
            [0.0],
            passages=passages,
            protocol=drawn,
            tokenizer=tokenizer,
            store=kept,
            batch_size=batch_size,
            likelihood=False,
            label=f"sample {number + 1} of {samples}",
            progress=progress,
        )
        texts = [asked.work.rows[Row(0.0, index)].text for index in range(len(passages))]
        columns.append([_score(text, each, protocol) for text, each in zip(texts, passages, strict=True)])
    return LeakAtK(tuple(passage.id for passage in passages), np.array(columns).T)


def _score(text: str, passage: Passage, protocol: Protocol) -> float:
    return score_text(text, passage.answer, protocol).fmeasure * protocol.score_factor


def expected_best(scores: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """The expected best of j samples for every j up to k, from the scores of k samples; without bias.

    Of all `C(k, j)` ways to choose j of the k samples, the i-th smallest one is the best in `C(i − 1, j − 1)`, so its
    score has the weight `C(i − 1, j − 1) / C(k, j)`.

    Args:
        scores (`numpy.ndarray`):
            Rows of k scores each.

    Returns:
        `numpy.ndarray`: Of the same shape; column j − 1 has the expected best of j. The first is the mean, the last
        the maximum.

    Raises:
        `BadValueError`: If the scores are no matrix, or have no columns.

    Example:
        >>> expected_best(np.array([[0.0, 0.5, 1.0]])).round(3).tolist()
        [[0.5, 0.833, 1.0]]

    """
    if scores.ndim != 2 or not scores.shape[1]:
        raise BadValueError(f"scores of the shape {scores.shape} must be rows of at least one sample each.")
    k = scores.shape[1]
    fewer = np.arange(k)  # j − 1, for each column
    weights = np.empty((k, k))
    weights[-1] = (fewer + 1) / k  # C(k − 1, j − 1) / C(k, j)
    for i in range(k - 1, 0, -1):  # and C(i − 1, j − 1) = C(i, j − 1) · (i − (j − 1)) / i, without large numbers
        weights[i - 1] = weights[i] * np.maximum(i - fewer, 0) / i
    return np.sort(scores, axis=1) @ weights
