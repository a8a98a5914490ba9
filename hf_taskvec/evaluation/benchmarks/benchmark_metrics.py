"""The benchmarks' metrics: of an answer, of a set of answers, and of a model beside the retrained one.

Each says whose definition it is. MUSE: Shi et al. 2024, arXiv 2407.06460, and github.com/swj0419/muse_bench. TOFU:
Maini et al. 2024, arXiv 2401.06121, and github.com/locuslab/tofu. "open-unlearning" is
github.com/locuslab/open-unlearning at commit d3d7cf9.
"""

import math
from collections.abc import Sequence

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.ks_test import ks_p_value
from hf_taskvec.evaluation.scoring.metrics import loss
from hf_taskvec.evaluation.scoring.rouge import rouge_l
from hf_taskvec.evaluation.scoring.statistics import auc, mean_score, priv_leak

# open-unlearning adds it to denominators. It decides what becomes of a model that gives every answer a probability
# below it, so it is part of the definition.
_GUARD = 1e-10
#: where an answer to a few-shot question is cut off: what follows is the next question that the model makes up
STOP_TEXTS = ("\n\n", "\nQuestion", "Question:")


# Of one answer.


def verbmem(output: str, answer: str) -> float:
    """MUSE's verbatim memorisation: Rouge-L F1 of the greedy continuation, of stemmed words, from 0 to 1.

    MUSE compares words as they are and reports percent; open-unlearning compares stems.
    """
    return rouge_l(output, answer, stemmer=True).fmeasure


def knowmem(output: str, answer: str) -> float:
    r"""MUSE's knowledge memorisation: Rouge-L F1 of the answer, of stemmed words, from 0 to 1.

    Both MUSE's code (`mean_rougeL`) and open-unlearning's (`rougeL_f1`) take the F1; the recall is reported beside it.
    MUSE compares words as they are and reports percent. The output is cut off where it goes on to another question.

    >>> knowmem("Paris\n\nQuestion: Who?", "Paris")
    1.0
    """
    return rouge_l(before_stop(output), answer, stemmer=True).fmeasure


def answer_recall(output: str, answer: str) -> float:
    """TOFU's Rouge: Rouge-L recall of the answer, of stemmed words (open-unlearning has the same)."""
    return rouge_l(output, answer, stemmer=True).recall


def before_stop(output: str) -> str:
    """The output up to where it goes on to another question."""
    for stop in STOP_TEXTS:
        output = output.split(stop)[0]
    return output.strip()


def answer_probability(log_probs: Sequence[float]) -> float:
    """TOFU's probability `p(answer | question)^(1/tokens)`: the exponential of the mean log-probability.

    The token that ends the answer is one of them, as in TOFU's and open-unlearning's code.
    """
    return math.exp(-loss(log_probs))


def normalised_probability(correct: float, wrong: Sequence[float]) -> float:
    """TOFU's probability of a fact (real authors, world facts): `p(correct) / (p(correct) + Σ p(wrong))`.

    Args:
        correct (`float`):
            The probability of the answer, by `answer_probability`.
        wrong (`Sequence[float]`):
            Those of the wrong answers.
    """
    return correct / (correct + math.fsum(wrong) + _GUARD)


def tofu_truth_ratio(correct: float, wrong: Sequence[float]) -> float:
    """TOFU's truth ratio, `p(wrong) / p(correct)`: 0 where the truth is known, near 1 where it is not.

    `p(wrong)` is the geometric mean over the wrong answers, as in open-unlearning and in the script that makes TOFU's
    tables; its paper, eq. (1), has the arithmetic mean. `open_unlearning_truth_ratio` is another number of that name.

    Args:
        correct (`float`):
            The probability of the paraphrased answer (of the answer, where there is no paraphrase).
        wrong (`Sequence[float]`):
            Those of the wrong answers.

    >>> round(tofu_truth_ratio(0.5, [0.25, 0.25]), 6), round(open_unlearning_truth_ratio(0.5, [0.25, 0.25]), 6)
    (0.5, 0.666667)
    """
    return _wrong(wrong) / (correct + _GUARD)


def open_unlearning_truth_ratio(correct: float, wrong: Sequence[float]) -> float:
    """open-unlearning's truth ratio, `p(correct) / (p(correct) + p(wrong))`: 1 where the truth is known, ½ where not.

    open-unlearning judges metrics with it; TOFU's tables are made with `tofu_truth_ratio`, of the same arguments.
    """
    return correct / (correct + _wrong(wrong) + _GUARD)


def _wrong(probabilities: Sequence[float]) -> float:
    """The geometric mean; 0 if one of them is."""
    if min(probabilities) <= 0:
        return 0.0
    return math.exp(math.fsum(map(math.log, probabilities)) / len(probabilities))


# Of a set of answers.


def forget_truth_ratio(ratios: Sequence[float]) -> float:
    """How close the truth ratios of what is to be forgotten are to 1: the mean of `min(r, 1/r)` (TOFU's tables).

    Args:
        ratios (`Sequence[float]`):
            By `tofu_truth_ratio`.
    """
    return mean_score([min(ratio, 1 / (ratio + _GUARD)) for ratio in ratios])


def kept_truth_ratio(ratios: Sequence[float]) -> float:
    """How far the truth ratios of what is to be kept are below 1: the mean of `max(0, 1 − r)` (TOFU's tables).

    Args:
        ratios (`Sequence[float]`):
            By `tofu_truth_ratio`.
    """
    return mean_score([max(0.0, 1 - ratio) for ratio in ratios])


def model_utility(values: Sequence[float]) -> float:
    """TOFU's utility: the harmonic mean of nine values, 0 if one of them is.

    They are probability, Rouge-L recall and truth ratio of the retain set, the real authors and the world facts.

    >>> model_utility([0.5] * 9)
    0.5
    """
    if len(values) != 9:
        raise BadValueError(f"model utility is the harmonic mean of nine values, not of {len(values)}")
    return 0.0 if min(values) <= 0 else len(values) / math.fsum(1 / value for value in values)


# Of a model beside the retrained one.


def forget_quality(ratios: Sequence[float], retrained: Sequence[float]) -> float:
    """TOFU's forget quality: the p-value of "these truth ratios are distributed as the retrained model's".

    A two-sample Kolmogorov-Smirnov test; 1 is ideal. A high value means only that the test sees no difference.

    Args:
        ratios (`Sequence[float]`):
            Of the forget set under the model in question, by `tofu_truth_ratio`.
        retrained (`Sequence[float]`):
            The same under the model that never saw it.
    """
    return ks_p_value(ratios, retrained)


def privacy_leak(
    forget: Sequence[float],
    holdout: Sequence[float],
    retrained_forget: Sequence[float],
    retrained_holdout: Sequence[float],
) -> float:
    """MUSE's PrivLeak in percent, by Min-40 %: 0 is ideal, below it the text is still known, above it avoided.

    Args:
        forget (`Sequence[float]`):
            Min-K % of each text of the forget set under the model in question.
        holdout (`Sequence[float]`):
            The same of text that no model was trained on.
        retrained_forget (`Sequence[float]`):
            As `forget`, under the model that never saw it.
        retrained_holdout (`Sequence[float]`):
            As `holdout`, under that model.

    Raises:
        `BadValueError`: If the retrained model tells all forget texts from all held-out ones: its AUC is 1, which
            leaves nothing to divide by.
    """
    reference = auc(retrained_forget, retrained_holdout)
    found = priv_leak(auc(forget, holdout), reference)
    if found is None:
        raise BadValueError(
            "PrivLeak divides by 1 − AUC of the retrained model, whose AUC is 1: it finds every forget text more "
            "likely than every held-out one. Give a retrained model that never saw the forget set"
        )
    return found
