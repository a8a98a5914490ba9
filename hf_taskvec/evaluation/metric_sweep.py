"""What a metric of the caller's own says of a live model at each λ: for classifiers, and whatever else has a score."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.asking.scalable_edits import ScalableEdit, check_edit, starting_at_zero
from hf_taskvec.progress import progress_bar

#: what a metric that gives a single number is called
SCORE = "score"


@dataclass(frozen=True)
class ScaleScores:
    """The scores of a model at each λ.

    Args:
        scales (`tuple[float, ...]`):
            The values of λ, in the order in which they were given.
        scores (`Mapping[str, tuple[float, ...]]`):
            The metric's name -> its value at each of them.

    """

    scales: tuple[float, ...]
    scores: Mapping[str, tuple[float, ...]]

    def of(self, metric: str = SCORE) -> dict[float, float]:
        """λ -> the value of a metric.

        Raises:
            `MissingNameError`: If there is no such metric.
        """
        if metric not in self.scores:
            raise MissingNameError(f"no metric {metric!r}.{did_you_mean(metric, self.scores)}")
        return dict(zip(self.scales, self.scores[metric], strict=True))

    def best(self, metric: str = SCORE, *, lowest: bool = False, where: Callable[[float], bool] | None = None) -> float:
        """The λ of the best value of a metric; of equal ones, that of the smallest magnitude.

        Args:
            metric (`str`, *optional*, defaults to `"score"`):
                Its name.
            lowest (`bool`, *optional*, defaults to `False`):
                The lowest value is the best.
            where (`Callable[[float], bool]`, *optional*):
                Which λ may be chosen: those at which another task is kept, for example.

        Raises:
            `MissingNameError`: If there is no such metric.
            `BadValueError`: If no λ may be chosen.
        """
        values = {scale: value for scale, value in self.of(metric).items() if where is None or where(scale)}
        if not values:
            raise BadValueError("where= lets no λ through. Measure more of them, or ask for less.")
        return min(values, key=lambda scale: (values[scale] if lowest else -values[scale], abs(scale)))


def score_scales(
    model: Any,
    change: TaskVector | ScalableEdit,
    scales: Sequence[float],
    metric: Callable[[Any], float | Mapping[str, float]],
    *,
    merge: bool = True,
    progress: bool | None = None,
) -> ScaleScores:
    """What a metric says of a live model of any class at each λ. The model is left as it was, bit for bit.

    Task negation and addition (https://arxiv.org/abs/2212.04089) on classifiers are this: the accuracy on the task, and
    on another that is to be kept, for each λ. For books and generated text see `sweep`.

    Args:
        model (`torch.nn.Module`):
            A live model. It is not put into evaluation mode: the metric does what it needs.
        change (`TaskVector` or an edit):
            What λ scales. A vector is put on the model for the time of the call; an edit is on it already, and stands
            at λ=0 afterwards.
        scales (`Sequence[float]`):
            The values of λ, each once.
        metric (`Callable`):
            From the model to a number, or to several by their names.
        merge (`bool`, *optional*, defaults to `True`):
            For a vector, as in `TaskVector.edit`.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `ScaleScores`: Every value.

    Raises:
        `BadValueError`: If there is no λ or one twice, or the metric does not give the same names of numbers each time.
        `MismatchError`: If the vector does not fit the model.

    Example:
        ```python
        metric = lambda model: {"task": accuracy(model, forget), "kept": accuracy(model, retain)}
        found = score_scales(model, vector, [0, -0.5, -1], metric)
        kept = found.of("kept")
        scale = found.best("task", lowest=True, where=lambda scale: kept[scale] >= 0.95 * kept[0])
        ```

    """
    if not scales or len(set(map(float, scales))) != len(scales):
        raise BadValueError(f"scales={list(scales)!r}: give at least one λ, and each of them once.")
    if isinstance(change, TaskVector):
        with change.edit(model, 0.0, merge=merge) as made:
            return _scored(model, made, scales, metric, progress)
    check_edit(change, model)
    with starting_at_zero(change) as edit:
        return _scored(model, edit, scales, metric, progress)


def _scored(
    model: Any, edit: ScalableEdit, scales: Sequence[float], metric: Callable[[Any], Any], progress: bool | None
) -> ScaleScores:
    rows = []
    for scale in progress_bar(list(scales), "Scoring", progress):
        edit.set_scale(float(scale))
        found = metric(model)
        values = {str(name): float(each) for name, each in found.items()} if isinstance(found, Mapping) else None
        rows.append(values if values is not None else {SCORE: float(found)})
        if not rows[-1] or rows[-1].keys() != rows[0].keys():
            raise BadValueError(
                f"the metric gave {sorted(rows[-1])} at λ={float(scale)} and {sorted(rows[0])} at "
                f"λ={float(scales[0])}. It must give the same names for each λ, and at least one."
            )
    return ScaleScores(tuple(map(float, scales)), {name: tuple(each[name] for each in rows) for name in rows[0]})
