"""Linear rules: exact and lazy, low-rank in and low-rank out. They give nothing but coefficients."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_taskvec.algebra.parameter_names import Grouping, group_of
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import BadValueError, did_you_mean
from hf_taskvec.merging.option_checks import between, checked_number
from hf_taskvec.merging.rule_registry import Parameter, rule


@rule("sum", paper="https://arxiv.org/abs/2212.04089", linear=True)
def sum_rule(weights: list[float]) -> list[float]:
    """The weighted sum: task arithmetic."""
    return weights


@rule("mean", paper="https://arxiv.org/abs/2203.05482", linear=True)
def mean_rule(weights: list[float]) -> list[float]:
    """The weighted sum divided by the number of vectors: the uniform average of the models, at weights of 1."""
    return [weight / len(weights) for weight in weights]


@rule("weighted", paper="https://arxiv.org/abs/2203.05482", linear=True)
def weighted_rule(weights: list[float]) -> list[float]:
    """The weighted average: the weighted sum divided by the sum of the weights' magnitudes.

    Magnitudes, so that a negative weight still subtracts: dividing by a negative sum would turn it into an addition.
    """
    magnitude = sum(map(abs, weights))
    if magnitude == 0.0:
        raise BadValueError("a weighted average needs a weight that is not 0.")
    return [weight / magnitude for weight in weights]


@rule("interpolate", paper="https://arxiv.org/abs/2208.05592", linear=True)
def interpolate_rule(weights: list[float], t: float = 0.5) -> list[float]:
    """Between two vectors: (1 - t) of the first and t of the second.

    Args:
        weights (`list[float]`):
            One for each vector.
        t (`float`, *optional*, defaults to 0.5):
            From 0, the first vector, to 1, the second.

    """
    if len(weights) != 2:
        raise BadValueError(
            f"the rule 'interpolate' is between two vectors, not {len(weights)}. Use 'weighted' for more."
        )
    if isinstance(t, bool) or not isinstance(t, float | int) or not 0.0 <= t <= 1.0:
        raise BadValueError(f"t={t!r} must be at least 0 and at most 1. Use 'sum' to go beyond the two vectors.")
    return [(1.0 - t) * weights[0], t * weights[1]]


@rule("layers", at_least=1)
def layers_rule(
    parameter: Parameter, schedule: Sequence[Sequence[float]] | Sequence[float], outside: float = 1.0
) -> list[Term]:
    """The weighted sum with each vector scaled layer by layer, along a schedule.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        schedule (`Sequence[float]` or `Sequence[Sequence[float]]`):
            Numbers spread evenly from the first layer to the last, with straight lines between them: `[0, 1]` rises
            from nothing in the first layer to everything in the last. One schedule for all vectors, or a list of one
            for each.
        outside (`float`, *optional*, defaults to 1.0):
            Scales what is in no layer: embeddings, the last norm, the head.

    """
    rows, others = _rows(schedule, parameter.vectors), checked_number("outside", outside)
    place = 0.0 if parameter.layers < 2 or parameter.layer is None else parameter.layer / (parameter.layers - 1)
    factors = [others if parameter.layer is None else between(rows[c.index], place) for c in parameter.changes]
    return parameter.sum([c.weight * factor for c, factor in zip(parameter.changes, factors, strict=True)])


@rule("learned", paper="https://arxiv.org/abs/2407.02880", at_least=1)
def learned_rule(
    parameter: Parameter,
    scales: Sequence[Mapping[str, float]] | Mapping[str, float],
    by: Grouping = "tensor",
) -> list[Term]:
    """The weighted sum with a coefficient for each vector and group of parameters, as `fit_scales` learns them (aTLAS).

    The table goes by the vectors' places, not by their names: an expression may give a vector another name beside
    others, and still merges the same.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        scales (`Mapping[str, float]` or `Sequence[Mapping[str, float]]`):
            The coefficient of each group: one table for each vector, in their order, or one for all of them.
        by (`str`, *optional*, defaults to `"tensor"`):
            What makes a group: `"tensor"`, `"layer"`, `"kind"` or `"vector"`.

    """
    group = group_of(parameter.name, by)
    tables = [scales] * parameter.vectors if isinstance(scales, Mapping) else scales
    if not isinstance(tables, list | tuple) or not all(isinstance(table, Mapping) for table in tables):
        raise BadValueError(f"scales={scales!r} must be a table of groups and numbers, or one such for each vector.")
    if len(tables) != parameter.vectors:
        raise BadValueError(f"there are {len(tables)} tables of scales for {parameter.vectors} vectors. Give one each.")
    coefficients = []
    for change in parameter.changes:
        table = tables[change.index]
        if group not in table:
            raise BadValueError(
                f"scales has no number for {group!r} (by={by!r}), to which {parameter.name} of {change.label} "
                f"belongs.{did_you_mean(group, map(str, table))} A group that shall not change has the number 0."
            )
        coefficients.append(change.weight * checked_number(f"scales[{group!r}]", table[group]))
    return parameter.sum(coefficients)


def _rows(schedule: Any, vectors: int) -> list[Sequence[float]]:
    """The schedule of each vector, checked."""

    def is_row(value: object) -> bool:
        return isinstance(value, list | tuple) and bool(value) and all(type(each) in (float, int) for each in value)

    if is_row(schedule):
        return [schedule] * vectors
    if not isinstance(schedule, list | tuple) or not all(map(is_row, schedule)):
        raise BadValueError(f"schedule={schedule!r} must be a list of numbers, or one such list for each vector.")
    if len(schedule) != vectors:
        raise BadValueError(
            f"there are {len(schedule)} schedules for {vectors} vectors. Give one for each, or one for all."
        )
    return list(schedule)
