"""`.eval_results/*.yaml`: scores on data sets of the Hub, in the form in which it puts them into leaderboards.

`model-index`, in the card, holds what books say, which are no data sets of the Hub. Here stands what has one: lm-eval's
tasks in a report, and the named benchmarks.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import yaml

from hf_taskvec.hub_names import HUB_ID

if TYPE_CHECKING:
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

_FOLDER = ".eval_results"


class HubScore(NamedTuple):
    """A score on a data set of the Hub."""

    dataset: str
    task: str
    value: float
    notes: str


class HubScores(Protocol):
    """What has scores on data sets of the Hub, such as a `BenchmarkReport`."""

    @property
    def benchmark(self) -> str:
        """What the scores are of."""

    def hub_scores(self) -> Sequence[tuple[str, str, float, str]]:
        """Data set, task, value and a note of each."""


def eval_result_files(
    report: "UnlearningReport | None", scale: float | None, benchmarks: Sequence[HubScores]
) -> dict[str, bytes]:
    """The files, by their paths in the repository.

    Args:
        report (`UnlearningReport`, *optional*):
            Of the sweep that chose the edit.
        scale (`float`, *optional*):
            The λ of what is pushed, if the report has it.
        benchmarks (`Sequence[HubScores]`):
            Of the very model that is pushed.

    Returns:
        `dict[str, bytes]`: None, if no score is on a data set of the Hub.
    """
    found = {"hf_taskvec": list(_of_tasks(report, scale))} if report is not None and scale is not None else {}
    for each in benchmarks:
        name = re.sub(r"[^a-z0-9]+", "-", each.benchmark.lower())
        found[name] = [HubScore(*score) for score in each.hub_scores()]
    return {f"{_FOLDER}/{name}.yaml": _yaml(scores) for name, scores in found.items() if scores}


def _of_tasks(report: "UnlearningReport", scale: float) -> Iterator[HubScore]:
    for score in report.utility:
        if score.scale == scale and HUB_ID.fullmatch(score.dataset):
            notes = f"lm-evaluation-harness, {score.n} documents" if score.n else "lm-evaluation-harness"
            yield HubScore(score.dataset, score.metric, score.value.value, notes)


def _yaml(scores: Sequence[HubScore]) -> bytes:
    entries: list[dict[str, Any]] = [
        {"dataset": {"id": each.dataset, "task_id": each.task}, "value": round(each.value, 6), "notes": each.notes}
        for each in scores
    ]
    return yaml.safe_dump(entries, sort_keys=False, allow_unicode=True).encode()
