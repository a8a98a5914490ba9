"""From the numbers of single items to a benchmark's metrics, and what each metric means."""

from collections.abc import Mapping, Sequence

from hf_taskvec.evaluation.benchmarks import benchmark_metrics as metrics
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.statistics import mean_score

#: the numbers of each item: by the part of the benchmark, then by the name of the number
ItemValues = Mapping[str, Mapping[str, Sequence[float]]]

_GREEDY = "greedy answer, stemmed words, mean over the items"
MUSE_METRICS = (
    MetricInfo("forget_knowmem", "memory", True, f"KnowMem of the forget set: Rouge-L F1, {_GREEDY}", "KnowMem forget"),
    MetricInfo("forget_verbmem", "memory", True, f"VerbMem of the forget set: Rouge-L F1, {_GREEDY}", "VerbMem forget"),
    MetricInfo(
        "privleak",
        "memory",
        False,
        "PrivLeak: 100·((1−AUC) − (1−AUC_ref)) / (1−AUC_ref), AUC of forget against held-out texts by Min-40 %, "
        "AUC_ref the retrained model's; ideal 0, below it still known, above it conspicuously avoided",
        "PrivLeak",
        digits=2,
    ),
    MetricInfo("retain_knowmem", "health", True, f"KnowMem of the retain set: Rouge-L F1, {_GREEDY}", "KnowMem retain"),
    MetricInfo(
        "forget_knowmem_recall",
        "memory",
        True,
        f"the same answers: Rouge-L recall, {_GREEDY}",
        "KnowMem forget (recall)",
    ),
    MetricInfo(
        "retain_knowmem_recall",
        "health",
        True,
        f"the same answers: Rouge-L recall, {_GREEDY}",
        "KnowMem retain (recall)",
    ),
)
_NINE = tuple(
    (part, value)
    for part in ("retain", "real_authors", "world_facts")
    for value in ("probability", "rouge_recall", "truth_ratio")
)
_MEANS = {
    "probability": "mean probability of the true answer, exp of the mean log-probability of its tokens and end token",
    "rouge_recall": f"Rouge-L recall, {_GREEDY}",
    "truth_ratio": "mean of max(0, 1 − p(wrong)/p(correct)), TOFU's truth ratio",
}
TOFU_METRICS = (
    MetricInfo(
        "forget_quality",
        "memory",
        False,
        "p-value of a two-sample Kolmogorov-Smirnov test of TOFU's truth ratios against the retrained model's; ideal 1",
        "forget quality",
    ),
    MetricInfo(
        "model_utility",
        "health",
        True,
        "harmonic mean of nine: probability, Rouge-L recall, truth ratio of retain set, real authors, world facts",
        "model utility",
    ),
    MetricInfo(
        "forget_truth_ratio",
        "memory",
        False,
        "mean of min(r, 1/r), r = p(wrong)/p(correct): TOFU's truth ratio of the forget set; near 1 where the truth is "
        "not known",
        "truth ratio forget (TOFU)",
    ),
    MetricInfo(
        "forget_truth_ratio_open_unlearning",
        "memory",
        True,
        "mean of p(correct)/(p(correct)+p(wrong)): open-unlearning's truth ratio, not TOFU's; near ½ where the truth "
        "is not known",
        "truth ratio forget (open-unlearning)",
    ),
    MetricInfo("forget_probability", "memory", True, _MEANS["probability"], "probability forget"),
    MetricInfo("forget_rouge_recall", "memory", True, _MEANS["rouge_recall"], "Rouge-L recall forget"),
    MetricInfo(
        "privleak",
        "memory",
        False,
        "PrivLeak as MUSE defines it, of the answers of the forget set and of the held-out set; ideal 0",
        "PrivLeak",
        digits=2,
    ),
    *(
        MetricInfo(
            f"{part}_{value}",
            "health",
            True,
            _MEANS[value]
            + (", divided by its sum with the wrong answers'" if value == "probability" and part != "retain" else ""),
            f"{value.replace('_', ' ')}, {part.replace('_', ' ')}",
        )
        for part, value in _NINE
    ),
)


def muse_scores(own: ItemValues, retrained: ItemValues) -> dict[str, float]:
    """The metrics of `MUSE_METRICS` from the items' numbers, a model's own and the retrained model's."""
    found = {
        "forget_knowmem": mean_score(own["knowmem_forget"]["rouge_l"]),
        "forget_verbmem": mean_score(own["verbmem_forget"]["rouge_l"]),
        "privleak": metrics.privacy_leak(
            own["privleak_forget"]["min_k"],
            own["privleak_holdout"]["min_k"],
            retrained["privleak_forget"]["min_k"],
            retrained["privleak_holdout"]["min_k"],
        ),
        "retain_knowmem": mean_score(own["knowmem_retain"]["rouge_l"]),
        "forget_knowmem_recall": mean_score(own["knowmem_forget"]["rouge_l_recall"]),
        "retain_knowmem_recall": mean_score(own["knowmem_retain"]["rouge_l_recall"]),
    }
    return {info.name: found[info.name] for info in MUSE_METRICS}


def tofu_scores(own: ItemValues, retrained: ItemValues) -> dict[str, float]:
    """The metrics of `TOFU_METRICS` from the items' numbers, a model's own and the retrained model's."""
    forget = own["forget"]
    found = {
        "forget_quality": metrics.forget_quality(forget["truth_ratio"], retrained["forget"]["truth_ratio"]),
        "forget_truth_ratio": metrics.forget_truth_ratio(forget["truth_ratio"]),
        "forget_truth_ratio_open_unlearning": mean_score(forget["truth_ratio_open_unlearning"]),
        "forget_probability": mean_score(forget["probability"]),
        "forget_rouge_recall": mean_score(forget["rouge_l_recall"]),
        "privleak": metrics.privacy_leak(
            forget["min_k"], own["holdout"]["min_k"], retrained["forget"]["min_k"], retrained["holdout"]["min_k"]
        ),
    }
    for part in ("retain", "real_authors", "world_facts"):
        probability = "probability" if part == "retain" else "normalised_probability"
        found[f"{part}_probability"] = mean_score(own[part][probability])
        found[f"{part}_rouge_recall"] = mean_score(own[part]["rouge_l_recall"])
        found[f"{part}_truth_ratio"] = metrics.kept_truth_ratio(own[part]["truth_ratio"])
    found["model_utility"] = metrics.model_utility([found[f"{part}_{value}"] for part, value in _NINE])
    return {info.name: found[info.name] for info in TOFU_METRICS}
