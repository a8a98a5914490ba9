"""Reports of the version before: read as what they said, under the rule that they were made by.

They knew one metric, ± a margin, and no relative forgetting. `UnlearningReport.rechoose` judges their passages anew.
"""

import math
from dataclasses import asdict
from typing import Any

from hf_taskvec.errors import CorruptFileError
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.metrics import METRICS

EARLIER_VERSION = 3


def upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """A report of version 3 in the fields of today. What it lacks is left for `typed` to miss.

    Raises:
        `CorruptFileError`, `BadValueError`: If a field is not what it was in that version.
    """
    made = dict(content)
    made["metrics"] = [asdict(METRICS[name].info) for name in _measured(content)]
    made["passages"] = [_passage(each) for each in _objects(content, "passages")]
    made["membership"] = [{**each, "priv_leak": None} for each in _objects(content, "membership")]
    made["reference_membership"] = []
    if isinstance(content.get("choice"), dict):
        forget = [book.get("name") for book in _objects(content, "books") if book.get("role") == "forget"]
        made["choice"] = _choice(content["choice"], forget)
    return made


def _objects(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = content.get(name)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise CorruptFileError(f"{name!r} is no list of objects.")
    return found


def _measured(content: dict[str, Any]) -> list[str]:
    """The names of the metrics, with the loss, which perplexities tell."""
    names = [str(info.get("name")) for info in _objects(content, "metrics")]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise CorruptFileError(f"there was no metric {unknown[0][:60]!r}.")
    if "perplexity" in names:
        names.insert(names.index("perplexity"), "loss")
    return names


def _passage(passage: dict[str, Any]) -> dict[str, Any]:
    return {**passage, **{part: [_values(each) for each in _objects(passage, part)] for part in ("at", "references")}}


def _values(at: dict[str, Any]) -> dict[str, Any]:
    values = at.get("values")
    if not isinstance(values, dict) or not isinstance(values.get("perplexity"), float | int):
        return at
    return {**at, "values": {**values, "loss": math.log(max(values["perplexity"], 1e-300))}}


def _choice(choice: dict[str, Any], forget: list[Any]) -> dict[str, Any]:
    metric, margin = choice.get("metric"), choice.get("margin")
    defaults = asdict(Criteria())
    criteria = {**defaults, "metrics": [metric], "rule": "margin", "margin": margin}
    criteria |= {name: choice.get(name) for name in ("retain_bound", "certain")}
    reference = choice.get("reference")
    candidates = [_candidate(each, metric) for each in _objects(choice, "candidates")]
    confirmation = choice.get("confirmation")
    before = next((each.get("forget") for each in candidates if each.get("scale") == 0), None)
    verdict = None
    if isinstance(confirmation, dict):
        verdict = _verdict(confirmation, metric, margin, ", ".join(map(str, forget)), before)
    return {
        "scale": choice.get("scale"),
        "reason": choice.get("reason"),
        "criteria": criteria,
        "never_seen": {
            "source": "assumed" if choice.get("target_from") == "held_out" else choice.get("target_from"),
            "name": reference,
            "contradiction": None,
        },
        "candidates": candidates,
        "nearest": None,
        "verdict": verdict,
        "tests": confirmation.get("tests", []) if isinstance(confirmation, dict) else [],
        "pareto": choice.get("pareto"),
    }


def _candidate(candidate: dict[str, Any], metric: Any) -> dict[str, Any]:
    worst = candidate.get("worst_retain")
    more = {"relative": {}, "retained": {str(metric): worst}, "membership": None, "shortfall": 0.0}
    return {**candidate, **more}


def _verdict(confirmation: dict[str, Any], metric: Any, margin: Any, book: str, before: Any) -> dict[str, Any]:
    passed = confirmation.get("as_if_never_seen") is True
    losses = confirmation.get("retain_losses")
    words = "is" if passed else "is not shown to be"
    return {
        "outcome": "as_if_never_seen" if passed else "cannot_tell",
        "sentence": f"the book {words} as if never seen, by {metric} alone (difference within ±{margin})",
        "metrics": [
            {
                "book": book,
                "metric": metric,
                "passages": 0,
                "before": before,
                "after": confirmation.get("forget"),
                "never": confirmation.get("target"),
                "gap": None,
                "difference": confirmation.get("difference"),
                "relative": None,
                "outcome": "forgotten" if passed else "unsure",
                "needed": None,
            }
        ],
        "membership": [],
        "retained": [
            {"book": name, "metric": metric, "lost": lost, "outcome": "unsure"}
            for name, lost in (losses.items() if isinstance(losses, dict) else ())
        ],
        "kept": "unsure",
    }
