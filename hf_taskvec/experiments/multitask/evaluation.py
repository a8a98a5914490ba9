"""Scores of the tasks' own models and of merged ones; λ is chosen on the validation text."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.experiments.multitask.config import MultitaskConfig
from hf_taskvec.experiments.multitask.inputs import Materials
from hf_taskvec.experiments.multitask.results import Merged
from hf_taskvec.experiments.multitask.task_exchange import gather_by_task
from hf_taskvec.experiments.multitask.token_accuracy import accuracy
from hf_taskvec.merging import combine
from hf_taskvec.merging.scale_search import search_scale


def scores(model: Any, given: Materials, part: Literal["validation", "test"] = "test") -> tuple[float, ...]:
    """The model's score on each task, measured by the process that has its text."""
    mine = {number: accuracy(model, getattr(held, part)) for number, held in given.held.items()}
    return tuple(gather_by_task(mine, len(given.tasks)))


def single_scores(model: Any, vectors: Sequence[TaskVector], given: Materials) -> tuple[float, ...]:
    """The score of each task's own model on that task."""
    found = {}
    for number, vector in enumerate(vectors):
        if number in given.held:
            with vector.applied_to(model):
                found[number] = accuracy(model, given.held[number].test)
    return tuple(gather_by_task(found, len(vectors)))


def merged_scores(
    model: Any, vectors: Sequence[TaskVector], rule: str, given: Materials, config: MultitaskConfig
) -> tuple[Merged, TaskVector]:
    """The vectors merged by a rule, λ found on the validation text, and the scores on the test text."""
    vector = combine(vectors, rule, **config.options(rule))
    bounds = config.bounds(rule)
    with vector.edit(model, 0.0) as edit:

        def validate(scale: float) -> float:
            edit.set_scale(scale)
            return fmean(scores(model, given, "validation"))

        found = search_scale(validate, bounds, method=config.search, budget=config.evaluations) if bounds else None
        scale = found.scale if found else 1.0
        edit.set_scale(scale)
        result = Merged(rule, scale, scores(model, given), found.tried if found else ())
    return result, scale * vector
