"""What is measured on each passage. Every metric is a small function with a direction and a definition.

`memory` metrics say how much of the book is still there; `health` metrics tell forgetting from breaking.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.scoring.rouge import RougeScore, pypi_rouge_l, rouge_l
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.evaluation.texts.word_tokens import ngrams, words
from hf_taskvec.plugins import plugin, plugin_names

if TYPE_CHECKING:
    from hf_taskvec.evaluation.asking.batched_asking import Asked

MetricKind = Literal["memory", "health"]
# MUSE and open-unlearning take the 40 % least likely tokens for Min-K %.
MIN_K = 0.4


@dataclass(frozen=True)
class AnsweredPassage:
    """All that one passage gave: the texts, and the model's view of the true continuation.

    Args:
        output, answer (`str`):
            Generated and true continuation.
        log_probs (`tuple[float]`):
            Of each token of the answer, given the true text before it.
        hits (`tuple[bool]`):
            Whether that token was the model's first choice.
    """

    output: str
    answer: str
    log_probs: tuple[float, ...]
    hits: tuple[bool, ...]


@dataclass(frozen=True)
class MetricInfo:
    """What a metric means, and which way is up.

    Args:
        name (`str`):
            What scores are found under.
        kind (`"memory"` or `"health"`):
            Whether it says that the book is still there, or that the model still works.
        higher (`bool`):
            Whether a higher value means more of that.
        definition (`str`):
            What is measured, in a sentence without its full stop.
        title (`str`, *optional*):
            What tables call it; its name without one.
        geometric (`bool`, *optional*, defaults to `False`):
            Averaged in the logarithm.
        digits (`int`, *optional*, defaults to 4):
            After the point, in tables.
        likelihood (`bool`, *optional*, defaults to `False`):
            Needs the log-probabilities of the true continuation.
        nats (`bool`, *optional*, defaults to `False`):
            A logarithm of a probability: it has no zero, so no share of it can be lost, but one of the probability can.
    """

    name: str
    kind: MetricKind
    higher: bool
    definition: str
    title: str = ""
    geometric: bool = False
    digits: int = 4
    likelihood: bool = False
    nats: bool = False


@dataclass(frozen=True)
class Metric(MetricInfo):
    """A metric, and the function that computes it from one passage.

    Those of Rouge-L have no `compute`: `measure` takes all three from one comparison of the texts. One of your own is
    `Metric("name", "memory", True, "what it measures", compute=lambda passage, protocol: ...)`; `sweep(own_metrics=…)`
    takes it.
    """

    compute: Callable[[AnsweredPassage, Protocol], float] | None = None

    @property
    def info(self) -> MetricInfo:
        """What it means, without the function."""
        return MetricInfo(**{each.name: getattr(self, each.name) for each in fields(MetricInfo)})


def score_text(output: str, answer: str, protocol: Protocol) -> RougeScore:
    """Precision, recall and F1 by the protocol's scorer, before its `score_factor`."""
    if protocol.scorer == "pypi_rouge_l":
        return pypi_rouge_l(output, answer)
    return rouge_l(output, answer, stemmer=protocol.scorer == "rouge_l_stemmed")


def loss(log_probs: Sequence[float]) -> float:
    """The mean negative log-likelihood."""
    return -math.fsum(log_probs) / len(log_probs) + 0.0  # + 0.0: there is no −0


def perplexity(log_probs: Sequence[float]) -> float:
    """The exponential of the loss, kept finite (JSON knows no infinity)."""
    return math.exp(min(loss(log_probs), 709.0))


def distinct(output: str, n: int) -> float:
    """The share of the n-grams of words that are different ones; 0 for a text with fewer than n words."""
    found = words(output)
    grams = list(ngrams(found, n))
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(output: str, n: int = 4) -> float:
    """The share of the n-grams that repeat an earlier one; 0 for a text with fewer than n words."""
    return 1 - distinct(output, n) if len(words(output)) >= n else 0.0


def longest_run(output: str, answer: str) -> int:
    """The most words in a row that stand in both texts, wherever they stand."""
    left, right = words(output), words(answer)

    def shared(n: int) -> bool:
        return not set(ngrams(left, n)).isdisjoint(ngrams(right, n))

    # A shared run of n words holds shared runs of every smaller length: bisect.
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if shared(middle) else (low, middle - 1)
    return low


def extraction_strength(hits: Sequence[bool]) -> float:
    """1 − k/n for the shortest prefix k of the answer after which the model gets all the rest right.

    As in open-unlearning, k never exceeds n − 1: an answer that is not extracted at all scores 1/n, not 0.
    """
    k = len(hits)
    while k > 0 and hits[k - 1]:
        k -= 1
    return 1 - min(k, len(hits) - 1) / len(hits)


def exact_memorisation(hits: Sequence[bool]) -> float:
    """The share of the answer's tokens that the model, given the true ones before, puts first."""
    return sum(hits) / len(hits)


def min_k(log_probs: Sequence[float], share: float = MIN_K) -> float:
    """The mean log-probability of the least likely tokens: high for text that the model knows."""
    lowest = sorted(log_probs)[: max(1, int(len(log_probs) * share))]
    return math.fsum(lowest) / len(lowest)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "rouge_l",
            "memory",
            True,
            "F1 of the longest common subsequence of words, by the protocol's scorer",
            "Rouge-L (F1)",
        ),
        Metric(
            "rouge_l_precision",
            "memory",
            True,
            "the share of the generated words in that subsequence",
            "Rouge-L precision",
        ),
        Metric(
            "rouge_l_recall",
            "memory",
            True,
            "the share of the true words in that subsequence",
            "Rouge-L recall",
        ),
        Metric(
            "loss",
            "memory",
            False,
            "mean negative log-likelihood of the true continuation's tokens, given the prompt, in nats a token",
            "Loss of the true continuation",
            compute=lambda o, p: loss(o.log_probs),
            digits=3,
            likelihood=True,
            nats=True,
        ),
        Metric(
            "perplexity",
            "memory",
            False,
            "exp of that loss; geometric mean over passages. On retained books it measures health",
            "Perplexity of the true continuation",
            compute=lambda o, p: perplexity(o.log_probs),
            geometric=True,
            digits=2,
            likelihood=True,
        ),
        Metric(
            "repetition",
            "health",
            False,
            "the share of the output's 4-grams of words that repeat an earlier one",
            "Repeated 4-grams",
            compute=lambda o, p: repetition(o.output),
        ),
        Metric(
            "distinct_2",
            "health",
            True,
            "different bigrams of words in the output, as a share of all",
            "Distinct bigrams",
            compute=lambda o, p: distinct(o.output, 2),
        ),
        Metric(
            "empty",
            "health",
            False,
            "1 if the output has no word, else 0",
            "Empty outputs",
            compute=lambda o, p: float(not words(o.output)),
        ),
        Metric(
            "longest_run",
            "memory",
            True,
            "the most words in a row that output and true continuation share",
            "Longest verbatim run (words)",
            compute=lambda o, p: float(longest_run(o.output, o.answer)),
            digits=2,
        ),
        Metric(
            "extraction_strength",
            "memory",
            True,
            "1 − k/n, k the shortest true prefix of the continuation after which every token is the model's "
            "first choice (k ≤ n − 1, as in open-unlearning)",
            "Extraction strength",
            compute=lambda o, p: extraction_strength(o.hits),
            likelihood=True,
        ),
        Metric(
            "exact_memorisation",
            "memory",
            True,
            "the share of the true continuation's tokens that are the model's first choice",
            "Exact memorisation",
            compute=lambda o, p: exact_memorisation(o.hits),
            likelihood=True,
        ),
        Metric(
            "min_k",
            "memory",
            True,
            f"Min-K %: mean log-probability of the {MIN_K:.0%} least likely tokens of the true continuation",
            "Min-K % (log-probability)",
            compute=lambda o, p: min_k(o.log_probs),
            likelihood=True,
            nats=True,
        ),
    )
}
# What has to agree before a book counts as forgotten: generating it, and predicting it in three ways.
PRIMARY = ("rouge_l", "loss", "extraction_strength", "exact_memorisation")


def own_metric(metric: "Metric | str") -> Metric:
    """A metric besides ours: itself, or the one that another package adds under a name.

    Raises:
        `MissingNameError`: If no package adds that name.
    """
    if isinstance(metric, Metric):
        return metric
    if metric not in plugin_names("metrics"):
        known = plugin_names("metrics")
        told = f"They add {', '.join(known)}." if known else "None of them adds any."
        raise MissingNameError(
            f"own_metrics: no installed package adds a metric {metric!r}.{did_you_mean(str(metric), known)} {told}"
        )
    found: Metric = plugin(
        "metrics",
        metric,
        lambda each: isinstance(each, Metric) and each.name == metric,
        f"a Metric of the name {metric!r}",
    )
    return found


def measure(answered: AnsweredPassage, protocol: Protocol, own: Sequence[Metric] = ()) -> dict[str, float]:
    """Every metric of one passage, `own` ones too; without log-probabilities, those that need none."""
    score = score_text(answered.output, answered.answer, protocol)
    # One comparison of the texts, which is the costly part, serves all three.
    found: dict[str, float] = {
        "rouge_l": protocol.score_factor * score.fmeasure,
        "rouge_l_precision": protocol.score_factor * score.precision,
        "rouge_l_recall": protocol.score_factor * score.recall,
    }
    for metric in (*METRICS.values(), *own):
        if metric.compute is not None and (answered.log_probs or not metric.likelihood):
            value = found[metric.name] = float(metric.compute(answered, protocol))
            if not math.isfinite(value) or (metric.geometric and value <= 0):
                above = " above 0, as it is averaged in the logarithm" if metric.geometric else ""
                raise BadValueError(
                    f"metric {metric.name!r} is {value} on the answer {answered.output[:40]!r}: its function "
                    f"must give a finite number{above}"
                )
    return found


def measure_answers(
    asked: "Asked", scale: float, protocol: Protocol, own: Sequence[Metric] = (), *, likelihood: bool = True
) -> list[tuple[str, dict[str, float]]]:
    """What a model answered at one λ: for each passage that it was asked, the text and every metric of it.

    Args:
        asked (`Asked`):
            The passages and the answers.
        scale (`float`):
            λ, one of those that were asked for.
        protocol (`Protocol`):
            How it was asked.
        own (`Sequence[Metric]`, *optional*):
            Metrics besides `METRICS`.
        likelihood (`bool`, *optional*, defaults to `True`):
            Also the metrics that need log-probabilities. Without it they are left out, even if the store knows them.
    """
    from hf_taskvec.evaluation.asking.batch_plan import Row

    found = []
    for number, passage in enumerate(asked.passages):
        answer = asked.work.rows[Row(scale, number)]
        views = (answer.log_probs, answer.hits) if likelihood else ((), ())
        answered = AnsweredPassage(answer.text, passage.text.answer, *views)
        found.append((answer.text, measure(answered, protocol, own)))
    return found
