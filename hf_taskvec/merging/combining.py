"""`combine`: many task vectors into one, by a named rule."""

import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hf_taskvec.algebra.linear_expression import check_shape
from hf_taskvec.algebra.parameter_names import layer_count
from hf_taskvec.algebra.provenance import Provenance, SumOfProvenances
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, MismatchError, some
from hf_taskvec.merging.rule_registry import Change, Parameter, Rule, find_rule
from hf_taskvec.threads import workers


def combine(
    vectors: Sequence[TaskVector], rule: str = "sum", weights: Sequence[float] | None = None, **options: Any
) -> TaskVector:
    """Many task vectors merged into one, by a named rule: again a `TaskVector`, lazy, with its provenance.

    Linear rules give expressions, in which factors stay factors. The result of any other rule is computed when it is
    used, from tiles of the vectors: no model and no whole parameter is held, except for spectral rules on dense
    matrices, which hold one parameter. Only `rows` reads the vectors at once, to know which rows it keeps, and
    `without`, to know how much of the others is in the first.

    Args:
        vectors (`Sequence[TaskVector]`):
            Task vectors of one architecture. A parameter that a vector does not have is not changed by it.
        rule (`str`, *optional*, defaults to `"sum"`):
            One of `rules()`.
        weights (`Sequence[float]`, *optional*):
            One for each vector, 1 by default. A negative weight subtracts, in every rule.
        options:
            The rule's own, such as `density=0.2`.

    Returns:
        `TaskVector`: The merged vector, whose expression names the rule, its options and the vectors.

    Raises:
        `MissingNameError`: If there is no rule or no option of that name.
        `BadValueError`: If an option or a weight is not one, or if there are too few vectors for the rule.
        `MismatchError`: If the vectors come from models of different architectures, shapes or tokenizers.

    Example:
        >>> import torch
        >>> a = TaskVector.from_tensors({"w": torch.tensor([1.0, -3.0, 0.1])}, name="a")
        >>> b = TaskVector.from_tensors({"w": torch.tensor([2.0, 1.0, 0.1])}, name="b")
        >>> merged = combine([a, b], "ties", density=0.7)
        >>> merged.dense("w")
        tensor([ 1.5000, -3.0000,  0.0000])
        >>> merged.expression
        "combine([a, b], 'ties', density=0.7)"

    """
    found = find_rule(rule)
    found.check_options(options)
    _check_vectors(vectors, found.name, found.at_least)
    scales = _check_weights(weights, len(vectors))
    if found.linear:
        parts = zip(found.function(scales, **options), vectors, strict=True)
        return _sum([coefficient * vector for coefficient, vector in parts], found)
    labels = _labels(vectors)
    layers = layer_count(name for vector in vectors for name in vector)
    parameters = []
    for name in dict.fromkeys(name for vector in vectors for name in vector):
        changes = tuple(
            Change(index, labels[index], scale, vector[name].terms)
            for index, (vector, scale) in enumerate(zip(vectors, scales, strict=True))
            if name in vector and scale != 0.0
        )
        if changes:
            parameters.append(Parameter(name, changes, tuple(scales), layers, _key(found, options, len(vectors))))
    with workers() as run:  # for the rules that read at once
        merged = run(lambda parameter: tuple(found.function(parameter, **options)), parameters)
        terms = {parameter.name: each for parameter, each in zip(parameters, merged, strict=True)}
    weighted = None if set(scales) == {1.0} else scales
    origin = Provenance.combined([v.provenance for v in vectors], found.name, found.paper, weights=weighted, **options)
    return TaskVector(terms, origin)


def combine_parameter(
    name: str, changes: Sequence[tuple[Term, ...]], labels: Sequence[str], layers: int, rule: str, **options: Any
) -> tuple[Term, ...]:
    """What `combine` makes of one parameter, at weights of 1: for callers that hold no more than that at a time.

    Args:
        name (`str`):
            The parameter's canonical name.
        changes (`Sequence[tuple[Term, ...]]`):
            What each vector changes in it; nothing for a vector that does not have it.
        labels (`Sequence[str]`):
            What `combine` takes from the vectors' expressions.
        layers (`int`):
            How many layers the model has.
        rule (`str`):
            One of `rules()`.
        options:
            The rule's own.

    Returns:
        `tuple[Term, ...]`: The parameter's merged change.

    """
    found, count = find_rule(rule), len(changes)
    given = tuple(Change(n, label, 1.0, c) for n, (label, c) in enumerate(zip(labels, changes, strict=True)) if c)
    if not given:
        return ()
    parameter = Parameter(name, given, (1.0,) * count, layers, _key(found, options, count))
    if not found.linear:
        return tuple(found.function(parameter, **options))
    coefficients = list(found.function([1.0] * count, **options))
    return tuple(parameter.sum([coefficients[change.index] for change in given]))


def _key(rule: Rule, options: Mapping[str, Any], vectors: int) -> str:
    return f"{rule.name} {sorted(options.items())!r} of {vectors}"


def _sum(vectors: Sequence[TaskVector], rule: Rule) -> TaskVector:
    """What adding them one by one gives, in one pass; with the rule's paper, which an expression does not tell."""
    terms: dict[str, list[Term]] = {}
    for vector in vectors:
        for name, change in vector.items():
            terms.setdefault(name, []).extend(change.terms)
    total = Provenance.total(vector.provenance for vector in vectors)
    papers = [(rule.name, rule.paper)] if rule.paper else []
    return TaskVector(terms, replace(total, rules=tuple(dict.fromkeys([*total.rules, *papers]))))


def _labels(vectors: Sequence[TaskVector]) -> list[str]:
    """The vectors' expressions as they stand in that of the merged vector, with a number where several are the same.

    So the merged vector's expression, evaluated again, gives them the same labels.
    """
    counts: Counter[str] = Counter()
    labels = []
    added = SumOfProvenances()
    for vector in vectors:
        text = added.add(vector.provenance).expression
        counts[text] += 1
        labels.append(text if counts[text] == 1 else f"{text} #{counts[text]}")
    return labels


def _check_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if hasattr(weights, "tolist"):  # an array or a tensor
        weights = weights.tolist()
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise BadValueError(f"weights={weights!r} must be a list of numbers, one for each vector.")
    if len(weights) != count:
        raise BadValueError(f"there are {count} vectors and {len(weights)} weights. Give one weight for each vector.")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not abs(float(weight)) < float("inf"):
            raise BadValueError(f"a weight of {weight!r} makes no sense: give finite numbers.")
    return [float(weight) for weight in weights]


def _check_vectors(vectors: Sequence[TaskVector], rule: str, at_least: int) -> None:
    """Refuse what does not belong together, before anything is read."""
    if isinstance(vectors, TaskVector) or not isinstance(vectors, Sequence):
        raise BadValueError(f"combine() takes a list of task vectors, not a {type(vectors).__name__}.")
    for vector in vectors:
        if not isinstance(vector, TaskVector):
            raise BadValueError(f"combine() takes task vectors, not a {type(vector).__name__}.")
    if len(vectors) < at_least:
        raise BadValueError(
            f"the rule {rule!r} combines at least {at_least} vector{'s'[: at_least > 1]}, and there "
            f"{'is 1' if len(vectors) == 1 else f'are {len(vectors)}'}. To scale one vector, multiply it."
        )
    _check_models(vectors)
    shapes: dict[str, tuple[int, ...]] = {}
    for vector in vectors:
        fresh = {name: vector.shape(name) for name in vector}
        common = fresh.keys() & shapes.keys()
        if shapes and fresh and not common and not _are_of_one_model(vectors):
            raise MismatchError(
                f"{vector.expression} changes none of the parameters that the vectors before it change "
                f"({some(fresh, 2)}; {some(shapes, 2)}). Were they made from models of different architectures?"
            )
        for name in (each for each in fresh if each in common):
            check_shape(name, shapes[name], fresh[name])
        shapes |= fresh


def _are_of_one_model(vectors: Sequence[TaskVector]) -> bool:
    """Whether each vector tells its architecture, and all the same: they may change other parts of one model."""
    known = {vector.provenance.architectures for vector in vectors}
    return len(known) == 1 and len(next(iter(known))) == 1


def _check_models(vectors: Sequence[TaskVector]) -> None:
    """Refuse vectors that are known to come from different kinds of models, or from models that read other tokens."""
    for what, consequence in (
        ("architecture", "Only vectors of one architecture can be combined."),
        (
            "tokenizer",
            "The same token numbers stand for other text there; only vectors of one tokenizer can be combined.",
        ),
    ):
        known: dict[str, tuple[str, str]] = {}
        for vector in vectors:
            for origin in vector.provenance.origins:
                for model in (origin.base, origin.tuned):
                    if model is None or not (value := vars(model)[what]):
                        continue
                    # Digests of different kinds of files, as `kind:digest`, tell nothing of each other.
                    other, expression = known.setdefault(value.rpartition(":")[0], (value, vector.expression))
                    if other != value:
                        raise MismatchError(
                            f"{expression} and {vector.expression} come from models of different {what}s "
                            f"({other}, {value}). {consequence}"
                        )
