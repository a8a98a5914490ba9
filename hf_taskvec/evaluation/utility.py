"""What an edit costs in abilities that no book measures: lm-evaluation-harness's tasks at each λ, or any other score.

lm-eval is imported when its tasks are asked, and not before.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean
from hf_taskvec.evaluation.asking.scalable_edits import ScalableEdit
from hf_taskvec.evaluation.reporting.report_parts import UtilityScore
from hf_taskvec.evaluation.scoring.statistics import Draws, Interval
from hf_taskvec.progress import progress_bar

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

#: what `sweep(utility=…)` takes: names of lm-eval's tasks, or a function of a live model
Utility = Sequence[str] | Callable[[Any], Mapping[str, float]]


class Measured(NamedTuple):
    """A score, what it is the mean of, one value a document (nothing, if nobody knows), and the data set."""

    value: float
    documents: tuple[float, ...] = ()
    dataset: str = ""


@dataclass(frozen=True)
class LmEvalMetric:
    """lm-eval's tasks as a function of a live model; made by `lm_eval_metric`, whose arguments these are."""

    tasks: tuple[str, ...]
    tokenizer: Any = None
    limit: int | float | None = None
    batch_size: int | str = 8
    task_manager: "TaskManager | None" = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: Any) -> dict[str, float]:
        """Each task's metrics, as numbers."""
        return {name: found.value for name, found in self.measure(model).items()}

    def measure(self, model: Any) -> dict[str, Measured]:
        """Each task's metrics by names such as `"arc_easy/acc"`, with their values of single documents.

        Args:
            model (`PreTrainedModel`):
                A live model, asked as it is.

        Returns:
            `dict[str, Measured]`: What lm-eval reports, without its own estimates of the error.
        """
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        lm = HFLM(model, tokenizer=self.tokenizer, batch_size=self.batch_size)
        # Errors are drawn from the documents, paired over λ; lm-eval's own would start processes for some metrics.
        quietly = {"log_samples": True, "bootstrap_iters": 0, **self.options}
        found = lm_eval.simple_evaluate(
            lm, tasks=list(self.tasks), limit=self.limit, task_manager=self._tasks, **quietly
        )
        if found is None:
            raise UnsupportedError("lm-eval gives results in the main process alone: score λ in one process.")
        return {
            f"{task}/{name.removesuffix(',none')}": Measured(
                float(value),
                _documents(found, task, name, float(value)),
                str(found["configs"].get(task, {}).get("dataset_path") or ""),
            )
            for task, values in found["results"].items()
            for name, value in values.items()
            if isinstance(value, Real) and not isinstance(value, bool) and "_stderr" not in name and "," in name
        }

    @cached_property
    def _tasks(self) -> "TaskManager":
        """Where tasks are found: made once, since lm-eval reads some ten thousand files for it."""
        from lm_eval.tasks import TaskManager

        return self.task_manager if self.task_manager is not None else TaskManager()

    def check_names(self) -> None:
        """Refuse a task that lm-eval does not know, which it would say when it is asked.

        Raises:
            `MissingNameError`: If there is none of that name, nor such a YAML.
        """
        known = self._tasks.all_tasks  # groups and tags among them
        for name in self.tasks:
            if name not in known and not Path(name).is_file():
                raise MissingNameError(
                    f"lm-eval has no task {name!r}.{did_you_mean(name, known)} `lm-eval ls tasks` lists them"
                )


def lm_eval_metric(
    tasks: Sequence[str],
    tokenizer: Any = None,
    *,
    limit: int | float | None = None,
    batch_size: int | str = 8,
    task_manager: "TaskManager | None" = None,
    **options: Any,
) -> LmEvalMetric:
    """lm-eval's tasks as a metric for `sweep` and `score_scales`: what an edit costs that no book measures.

    Args:
        tasks (`Sequence[str]`):
            Names of lm-eval's tasks, such as `"arc_easy"` and `"lambada_openai"`.
        tokenizer (`PreTrainedTokenizerBase` or `str`, *optional*):
            The model's; by default it is found by the model's own name.
        limit (`int` or `float`, *optional*):
            So many documents of each task, or such a share of them.
        batch_size (`int` or `str`, *optional*, defaults to 8):
            As in lm-eval.
        task_manager (`lm_eval.tasks.TaskManager`, *optional*):
            Where tasks of your own are found.
        **options:
            More of `lm_eval.simple_evaluate`, such as `num_fewshot`.

    Returns:
        `Callable`: From a live model to `{"arc_easy/acc": 0.61, …}`: each task's metrics, without their errors.

    Raises:
        `UnsupportedError`: If lm-eval is not installed.
        `BadValueError`: If no task is named, or lm-eval's cache is asked for, which does not know λ.

    Example:
        ```python
        metric = lm_eval_metric(["arc_easy"], tokenizer, limit=200)
        report = sweep(model, vector, [0, -0.5, -1], books, utility=metric)
        score_scales(model, vector, [0, -0.5, -1], metric).of("arc_easy/acc")
        ```

    """
    check_lm_eval()
    if not tasks or isinstance(tasks, str) or not all(isinstance(task, str) for task in tasks):
        raise BadValueError(f"tasks={tasks!r}: give a list of names of lm-eval's tasks.")
    if options.get("use_cache") is not None:
        raise BadValueError(
            "use_cache: lm-eval's cache does not know λ, so all of them would get the answers of the first. The model "
            "type taskvec has a cache that does: TaskVectorLM(model, vector=…, scale=…)."
        )
    return LmEvalMetric(tuple(tasks), tokenizer, limit, batch_size, task_manager, options)


def check_lm_eval() -> None:
    """Say how lm-eval is installed, if it is not.

    Raises:
        `UnsupportedError`: If it is not.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UnsupportedError("this needs lm-evaluation-harness: pip install 'hf-taskvec[lm-eval]'") from None


def utility_metric(utility: Any, tokenizer: Any, batch_size: int | None) -> Callable[[Any], Mapping[str, Any]]:
    """What `sweep(utility=…)` was given, as a function of a live model.

    Args:
        utility (names of tasks, or a function):
            As `sweep` takes it.
        tokenizer (`PreTrainedTokenizerBase`):
            For tasks that are named.
        batch_size (`int`, *optional*):
            The same.

    Raises:
        `UnsupportedError`: If tasks are named and lm-eval is not installed.
        `MissingNameError`: If lm-eval has no such task.
        `BadValueError`: If it is neither.
    """
    if not callable(utility):
        utility = lm_eval_metric(utility, tokenizer, batch_size=batch_size or 8)
    if not isinstance(utility, LmEvalMetric):
        return utility
    utility.check_names()  # before the books are asked
    return utility.measure


def utility_scores(
    metric: Callable[[Any], Mapping[str, Any]],
    model: Any,
    edit: ScalableEdit,
    scales: Sequence[float],
    references: Mapping[str, Any],
    draws: Draws,
    progress: bool | None = None,
) -> tuple[UtilityScore, ...]:
    """What a function of a model says at each λ and of each reference, compared with λ=0 on the same documents.

    Args:
        metric (`Callable`):
            From a live model to scores by name: numbers, or `Measured`.
        model (`PreTrainedModel`):
            The model that the edit is on.
        edit (an edit):
            What λ scales; it stands at the last λ afterwards.
        scales (`Sequence[float]`):
            The values of λ, 0 first.
        references (`Mapping[str, model]`):
            Models to compare with.
        draws (`Draws`):
            How intervals are drawn.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `tuple[UtilityScore, ...]`: By metric, then by λ, then by reference.

    Raises:
        `BadValueError`: If the function does not give the same names each time.
    """
    found: dict[float | str, dict[str, Measured]] = {}
    with progress_bar([*scales, *references], "Utility", progress) as bar:
        for where in bar:
            if isinstance(where, str):
                found[where] = _asked(metric, references[where], where)
            else:
                edit.set_scale(where)
                found[where] = _asked(metric, model, where)
    untouched = found[scales[0]]
    for where, values in found.items():
        if values.keys() != untouched.keys():
            raise BadValueError(
                f"utility gave {sorted(values)} at {_at(where)} and {sorted(untouched)} of the untouched model. It "
                "must give the same names each time."
            )
    return tuple(
        UtilityScore(
            name,
            None if isinstance(where, str) else where,
            where if isinstance(where, str) else None,
            len(values[name].documents),
            *_intervals(values[name], untouched[name], draws),
            values[name].dataset,
        )
        for name in untouched
        for where, values in found.items()
    )


def _at(where: float | str) -> str:
    return where if isinstance(where, str) else f"λ={where:g}"


def _asked(metric: Callable[[Any], Mapping[str, Any]], model: Any, where: float | str) -> dict[str, Measured]:
    with _as_it_was(model):
        found = metric(model)
    if not isinstance(found, Mapping) or not found:
        raise BadValueError(
            f"utility must give scores by name, as in {{'arc_easy/acc': 0.61}}; {_at(where)} gave {found!r}"
        )
    named = {str(name): each if isinstance(each, Measured) else Measured(float(each)) for name, each in found.items()}
    if wrong := [name for name, each in named.items() if not np.isfinite(each.value)]:
        raise BadValueError(f"utility: {wrong[0]!r} is no finite number at {_at(where)}.")
    return named


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Leave a model in its mode and all random numbers where they were: lm-eval sets both."""
    import torch

    training, state, numbers = model.training, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.train(training)
        random.setstate(state)
        np.random.set_state(numbers)


def _documents(found: Mapping[str, Any], task: str, name: str, value: float) -> tuple[float, ...]:
    """The values that a task's metric is the mean of, in the order of its documents."""
    metric, _, kind = name.partition(",")
    rows = [row for row in found.get("samples", {}).get(task, ()) if row["filter"] == kind and metric in row]
    rows.sort(key=lambda row: row["doc_id"])
    values = [row[metric] for row in rows]
    if not values or not all(isinstance(each, Real) for each in values):
        return ()
    documents = tuple(map(float, values))
    return documents if abs(sum(documents) / len(documents) - value) <= 1e-9 * max(1.0, abs(value)) else ()


def _intervals(here: Measured, before: Measured, draws: Draws) -> tuple[Interval, Interval]:
    """The score with its interval, and its paired difference from the untouched model's."""
    count = len(here.documents)
    if count < draws.fewest or count != len(before.documents):
        change = here.value - before.value
        return Interval(here.value, here.value, here.value), Interval(change, change, change)
    draw = draws.bootstrap(count)
    return draw.mean(here.documents), draw.difference(here.documents, before.documents)
