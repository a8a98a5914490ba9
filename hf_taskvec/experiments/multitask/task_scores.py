"""Scores of the tasks' own models and of merged ones; λ is chosen on the validation text."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.experiments.multitask.multitask_config import MultitaskConfig
from hf_taskvec.experiments.multitask.multitask_inputs import MultitaskInputs
from hf_taskvec.experiments.multitask.results import MergedModel
from hf_taskvec.experiments.multitask.task_exchange import gather_values_by_task
from hf_taskvec.experiments.multitask.token_accuracy import token_accuracy
from hf_taskvec.merging import combine
from hf_taskvec.merging.scale_search import search_scale


def task_scores(model: Any, given: MultitaskInputs, part: Literal["validation", "test"] = "test") -> tuple[float, ...]:
    """The model's score on each task, measured by the process that has its text."""
    mine = {number: token_accuracy(model, getattr(held, part)) for number, held in given.held.items()}
    return tuple(gather_values_by_task(mine, len(given.tasks)))


def single_task_scores(model: Any, vectors: Sequence[TaskVector], given: MultitaskInputs) -> tuple[float, ...]:
    """The score of each task's own model on that task."""
    found = {}
    for number, vector in enumerate(vectors):
        if number in given.held:
            with vector.applied_to(model):
                found[number] = token_accuracy(model, given.held[number].test)
    return tuple(gather_values_by_task(found, len(vectors)))


def merged_model_scores(
    model: Any, vectors: Sequence[TaskVector], rule: str, given: MultitaskInputs, config: MultitaskConfig
) -> tuple[MergedModel, TaskVector]:
    """The vectors merged by a rule, λ found on the validation text, and the scores on the test text."""
    vector = combine(vectors, rule, **config.options(rule))
    bounds = config.bounds(rule)
    with vector.edit(model, 0.0) as edit:

        def validate(scale: float) -> float:
            edit.set_scale(scale)
            return fmean(task_scores(model, given, "validation"))

        found = search_scale(validate, bounds, method=config.search, budget=config.evaluations) if bounds else None
        scale = found.scale if found else 1.0
        edit.set_scale(scale)
        result = MergedModel(rule, scale, task_scores(model, given), found.tried if found else ())
    return result, scale * vector
