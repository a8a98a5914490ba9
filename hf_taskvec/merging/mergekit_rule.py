"""The rule `mergekit`: mergekit's methods, with parameters that go by layer, by model and by the names of weights.

What a YAML says of models and files is read in `integrations/mergekit_config.py`; here is what it says of numbers. Each
method ends in one of our own rules, or in a sum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_taskvec.algebra.parameter_names import is_before_layers
from hf_taskvec.algebra.projection import inner_products
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean
from hf_taskvec.merging.option_checks import between, checked_number
from hf_taskvec.merging.rule_registry import REQUIRED, Change, Parameter, find_rule, rule

# mergekit's own: a cosine above which whole models lie so close that it goes straight, and what counts as 0.
_NEARLY_ONE_DIRECTION = 0.9995
_NO_LENGTH, _NO_ANGLE, _NO_WEIGHT = 1e-8, 1e-8, 1e-8
Setting = Any


@dataclass(frozen=True)
class MergekitMethod:
    """One of mergekit's methods.

    Args:
        merge (`Callable`):
            From a `_Case` to terms.
        shared (`Mapping[str, Any]`):
            The parameters of the whole merge, with their defaults.
        each (`Mapping[str, Any]`):
            Those of each model; `REQUIRED` for one without a default.
        needs_base (`bool`, *optional*, defaults to `False`):
            Whether there has to be a `base_model`.
        takes_base (`bool`, *optional*, defaults to `True`):
            Whether there may be one that is not among the models.

    """

    merge: "Callable[[_Case], list[Term]]"
    shared: Mapping[str, Any] = field(default_factory=dict)
    each: Mapping[str, Any] = field(default_factory=dict)
    needs_base: bool = False
    takes_base: bool = True


@dataclass(frozen=True)
class _Case:
    """One weight, the vectors that its slice merges, and the parameters as they are there."""

    parameter: Parameter
    #: those of the whole merge
    shared: Mapping[str, Any]
    #: those of each vector, in the order of `parameter`'s
    each: Sequence[Mapping[str, Any]]
    #: those of the model that the vectors start from, if it is merged itself
    reference: Mapping[str, Any] | None
    #: the weights of that model
    whole: tuple[Term, ...]

    def column(self, name: str) -> list[float]:
        """A parameter of each vector."""
        return [values[name] for values in self.each]

    def weighted(self) -> Parameter:
        """The parameter with each vector's `weight`; a weight of 0 leaves one out."""
        weights = [
            weight * of_rule for weight, of_rule in zip(self.column("weight"), self.parameter.weights, strict=True)
        ]
        changes = (
            Change(change.index, change.label, change.weight * self.each[change.index]["weight"], change.terms)
            for change in self.parameter.changes
        )
        kept = tuple(change for change in changes if change.weight != 0.0)
        return Parameter(self.parameter.name, kept, tuple(weights), self.parameter.layers, self.parameter.key)

    def by_rule(self, name: str, parameter: Parameter, **options: Any) -> list[Term]:
        """What one of our rules makes of it."""
        return list(find_rule(name).function(parameter, **options)) if parameter.changes else []

    def change_of_only(self) -> tuple[Term, ...]:
        """The change of the one vector that there is; nothing where it leaves the weight as it is."""
        return tuple(self.parameter.sum()) if self.parameter.changes else ()


@rule("mergekit", at_least=1)
def mergekit_rule(
    parameter: Parameter,
    method: str,
    slices: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, Setting] | None = None,
    whole: bool = False,
    seed: int = 0,
) -> list[Term]:
    """One of mergekit's methods, as `open_merge` reads it from a YAML.

    A parameter is a number, a list of numbers that is spread over the layers of its slice, or a list of
    `{"filter": "mlp", "value": …}` of which the first that fits a weight's name counts. It is looked up at the vector,
    then at its slice, then in `parameters`.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        method (`str`):
            mergekit's name of it, such as `"dare_ties"`.
        slices (`Sequence[Mapping]`):
            What is merged in which layers: `{"layers": [0, 32], "sources": [{"vector": 0, "parameters": {…}}, …],
            "parameters": {…}}`. A source whose vector is None is the model that the vectors start from.
        parameters (`Mapping`, *optional*):
            Those of the whole merge.
        whole (`bool`, *optional*, defaults to `False`):
            The last of the vectors holds the weights of that model.
        seed (`int`, *optional*, defaults to 0):
            Chooses what random methods drop.

    """
    found = find_method(method)
    part, place = _slice_of(parameter, slices)
    levels = [part.get("parameters") or {}, parameters or {}]
    shared = _values(found.shared, levels, parameter.name, place)
    given, reference = [], None
    for source in part["sources"]:
        values = _values(found.each, [source.get("parameters") or {}, *levels], parameter.name, place)
        if source["vector"] is None:
            reference = values
        else:
            given.append((source["vector"], values))
    for values in (*(each for _, each in given), *([reference] if reference and not found.needs_base else [])):
        if missing := [name for name, value in values.items() if value is REQUIRED]:
            raise BadValueError(
                f"{missing[0]} is missing for {parameter.name}: the method {method!r} needs one of each model."
            )
    of_model = next((c.terms for c in parameter.changes if whole and c.index == parameter.vectors - 1), ())
    places = {vector: number for number, (vector, _) in enumerate(given)}
    changes = sorted(
        (
            Change(places[change.index], change.label, change.weight, change.terms)
            for change in parameter.changes
            if change.index in places
        ),
        key=lambda change: change.index,
    )
    weights = tuple(parameter.weights[vector] for vector, _ in given)
    inner = Parameter(parameter.name, tuple(changes), weights, parameter.layers, f"{parameter.key} {place}")
    case = _Case(inner, {**shared, "seed": seed}, [values for _, values in given], reference, of_model)
    return found.merge(case)


def find_method(name: str) -> MergekitMethod:
    """The method of a name."""
    if name not in MERGEKIT_METHODS:
        hint = did_you_mean(str(name), MERGEKIT_METHODS)
        raise MissingNameError(
            f"merge_method: {name!r} is not supported.{hint} There are {', '.join(MERGEKIT_METHODS)}."
        )
    return MERGEKIT_METHODS[name]


def check_settings(method: str, settings: Mapping[str, Setting], of_model: bool, where: str) -> None:
    """Refuse parameters that the method does not have, or has elsewhere, and values that are none."""
    found = find_method(method)
    known = found.each if of_model else {**found.shared, **found.each}
    for name, value in settings.items():
        if name not in known:
            if of_model and name in found.shared:
                raise BadValueError(f"{where}: {name} is a parameter of the whole merge, not of one model. Move it.")
            told = f"It takes {', '.join(known)}." if known else "It takes none here."
            raise MissingNameError(
                f"{where}: {method} has no parameter {name!r}.{did_you_mean(str(name), known)} {told}"
            )
        _check_setting(f"{where}: {name}", value)


def _check_setting(where: str, value: Setting) -> None:
    if _is_number(value):
        return
    if isinstance(value, list | tuple) and value:
        if all(map(_is_number, value)):
            return
        if all(isinstance(each, Mapping) for each in value):
            for each in value:
                if unknown := each.keys() - {"filter", "value"}:
                    raise BadValueError(f"{where} has {sorted(map(str, unknown))[0]!r} beside filter and value.")
                if "value" not in each or not isinstance(each.get("filter"), str | None):
                    raise BadValueError(f"{where}: each entry of the list needs a value, and a filter that is a text.")
                if isinstance(each["value"], list) and any(isinstance(one, Mapping) for one in each["value"]):
                    raise BadValueError(f"{where}: a filter inside a filter.")
                _check_setting(where, each["value"])
            return
    raise BadValueError(
        f"{where} must be a number, a list of numbers over the layers, or a list of filters and values, not {value!r}."
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _slice_of(parameter: Parameter, slices: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], float]:
    """The slice that a weight belongs to, and its place in it, from 0 to 1.

    What comes before the layers belongs to the first, what comes after them to the last.
    """
    if parameter.layer is None:
        return slices[0 if is_before_layers(parameter.name) else -1], 0.0
    for each in slices:
        start, stop = each["layers"]
        if start <= parameter.layer < stop:
            return each, (parameter.layer - start) / (stop - start - 1) if stop - start > 1 else 1.0
    raise BadValueError(f"{parameter.name} is in no slice.")


def _values(
    declared: Mapping[str, Any], levels: Sequence[Mapping[str, Setting]], name: str, place: float
) -> dict[str, Any]:
    """Each declared parameter as it is for one weight."""
    found = {}
    for each, default in declared.items():
        given = (_at(level[each], name, place) for level in levels if each in level)
        value = next((value for value in given if value is not None), default)
        if isinstance(default, bool):
            if value not in (0, 1):
                raise BadValueError(f"{each}={value!r} must be true or false.")
            value = bool(value)
        elif value is not default:
            value = checked_number(each, value)
        found[each] = value
    return found


def _at(setting: Setting, name: str, place: float) -> Any:
    """A setting as it is for one weight; None if no filter fits its name.

    >>> rising = [{"filter": "mlp", "value": [0, 1]}, {"filter": "attn", "value": 2}]
    >>> _at(rising, "layers.1.mlp.w", 0.25), _at(rising, "layers.1.attn.w", 0.25), _at(rising, "norm", 0.0)
    (0.25, 2, None)
    """
    if not isinstance(setting, list | tuple):
        return setting
    if not isinstance(setting[0], Mapping):
        return between(setting, place)
    fitting = (each for each in setting if each.get("filter") in (None, "*") or each["filter"] in name)
    chosen = next(fitting, None)
    return None if chosen is None else _at(chosen["value"], name, place)


# The methods.


def _linear(case: _Case) -> list[Term]:
    """The weighted mean of whole models, or their weighted sum."""
    own = 0.0 if case.reference is None else case.reference["weight"]
    total = own + sum(case.column("weight"))
    if case.shared["normalize"]:
        if total == 0.0:
            raise BadValueError("the weights add up to 0, so there is no mean. Set normalize: false, or other weights.")
        return _times(1.0 / total, case.weighted().sum() if case.weighted().changes else [])
    changed = case.weighted().sum() if case.weighted().changes else []
    return [*changed, *_times(total - 1.0, case.whole)]


def _arithmetic(our_rule: str, *options: str, elects: bool = False, drops: bool = False) -> "_Merge":
    """Task arithmetic, after one of the ways to make vectors sparse."""

    def merge(case: _Case) -> list[Term]:
        given: dict[str, Any] = {option: case.column(option) for option in options}
        factor = case.shared["lambda"]
        if drops:
            given |= {"rescale": case.shared["rescale"], "seed": case.shared["seed"]}
        elif case.shared["rescale"] and options:
            raise UnsupportedError(
                "rescale: true, which scales what is kept up to the norm that it had, is not supported here. Leave it "
                "out, and raise lambda instead."
            )
        if elects:
            given["normalize"] = "weight" if case.shared["normalize"] else "none"
        elif case.shared["normalize"]:
            total = sum(case.column("weight"))
            factor /= total if abs(total) >= _NO_WEIGHT else 1.0
        weighted = case.weighted()
        if not weighted.changes or factor == 0.0:
            return []
        return _times(factor, weighted.sum() if our_rule == "sum" else case.by_rule(our_rule, weighted, **given))

    return merge


def _slerp(case: _Case) -> list[Term]:
    """Between two whole models."""
    if case.reference is None or len(case.each) != 1:
        raise BadValueError("slerp is between two models, one of which is the base_model.")
    t, change = case.shared["t"], case.change_of_only()
    if t is REQUIRED:
        raise BadValueError(f"t is missing for {case.parameter.name}: slerp needs one.")
    return _turned(case, change, t, straight=lambda cosine: abs(cosine) > _NEARLY_ONE_DIRECTION)


def _nuslerp(case: _Case) -> list[Term]:
    """Between two models, or between their changes of a base."""
    for name, only in (("nuslerp_flatten", True), ("nuslerp_row_wise", False)):
        if case.shared[name] is not only:
            raise UnsupportedError(f"{name}: {str(not only).lower()} is not supported. Leave it out.")
    weights = case.column("weight")
    if case.reference is not None:
        weights = [case.reference["weight"], *weights]
    if len(weights) != 2:
        raise BadValueError("nuslerp is between two models, besides an optional base_model that is not one of them.")
    t = weights[1] / sum(weights) if abs(sum(weights)) >= 1e-6 else 0.5
    if case.reference is None:
        return case.by_rule("slerp", case.parameter, t=t)
    return _turned(
        case, case.change_of_only(), t, straight=lambda cosine: math.sqrt(max(0.0, 1.0 - cosine**2)) < _NO_ANGLE
    )


def _turned(case: _Case, change: tuple[Term, ...], t: float, straight: Callable[[float], bool]) -> list[Term]:
    """What turns the model that the change starts from by the share t of the way to where the change leads."""
    if not change:
        return []
    gram = inner_products(case.parameter.name, [case.whole, (*case.whole, *change)])
    lengths = math.sqrt(gram[0, 0].item()), math.sqrt(gram[1, 1].item())
    cosine = 0.0 if min(lengths) <= _NO_LENGTH else gram[0, 1].item() / (lengths[0] * lengths[1])
    cosine = max(-1.0, min(1.0, cosine))
    first, second = 1.0 - t, t
    if not straight(cosine):
        angle = math.acos(cosine)
        first, second = (math.sin(share * angle) / math.sin(angle) for share in (first, second))
    return [*_times(second, change), *_times(first + second - 1.0, case.whole)]


def _model_stock(case: _Case) -> list[Term]:
    if case.shared["filter_wise"]:
        raise UnsupportedError("filter_wise: true is not supported. Leave it out.")
    if len(case.each) < 2:
        raise BadValueError("model_stock needs at least two models besides the base_model.")
    return case.by_rule("model_stock", case.parameter)


def _passthrough(case: _Case) -> list[Term]:
    if len(case.each) + (case.reference is not None) != 1:
        raise BadValueError("passthrough takes one model for each slice, and merges nothing.")
    (values,) = [case.reference] if case.reference is not None else case.each
    scale = 1.0 if values["scale"] is None else values["scale"]
    return [*_times(scale, case.change_of_only()), *_times(scale - 1.0, case.whole)]


def _times(factor: float, terms: Sequence[Term]) -> list[Term]:
    return [Term(factor * term.weight, term.delta) for term in terms] if factor != 0.0 else []


_Merge = Callable[[_Case], list[Term]]


def _of_arithmetic(
    our_rule: str,
    *,
    elects: bool = False,
    drops: bool = False,
    normalize: bool = False,
    **options: float,
) -> MergekitMethod:
    """A method of mergekit's "generalised task arithmetic", with the defaults of its own."""
    shared = {"int8_mask": False, "normalize": normalize, "rescale": drops, "lambda": 1.0}
    return MergekitMethod(
        _arithmetic(our_rule, *options, elects=elects, drops=drops),
        shared,
        {"weight": REQUIRED, "density": 1.0, **options},
        needs_base=True,
    )


#: mergekit's methods by their names there
MERGEKIT_METHODS: dict[str, MergekitMethod] = {
    "linear": MergekitMethod(_linear, {"normalize": True}, {"weight": REQUIRED}, takes_base=False),
    "task_arithmetic": _of_arithmetic("sum"),
    "ties": _of_arithmetic("ties", elects=True, normalize=True, density=1.0),
    "dare_linear": _of_arithmetic("dare", drops=True, density=1.0),
    "dare_ties": _of_arithmetic("dare_ties", elects=True, drops=True, density=1.0),
    "breadcrumbs": _of_arithmetic("breadcrumbs", density=1.0, gamma=0.01),
    "breadcrumbs_ties": _of_arithmetic("breadcrumbs_ties", elects=True, density=1.0, gamma=0.01),
    "della": _of_arithmetic("della_ties", elects=True, drops=True, normalize=True, density=1.0, epsilon=0.15),
    "della_linear": _of_arithmetic("della", drops=True, density=1.0, epsilon=0.15),
    "slerp": MergekitMethod(_slerp, {"t": REQUIRED}, needs_base=True),
    "nuslerp": MergekitMethod(_nuslerp, {"nuslerp_row_wise": False, "nuslerp_flatten": True}, {"weight": REQUIRED}),
    "model_stock": MergekitMethod(_model_stock, {"filter_wise": False}, needs_base=True),
    "sce": MergekitMethod(
        lambda case: case.by_rule("sce", case.parameter, density=case.shared["select_topk"]),
        {"int8_mask": False, "select_topk": 1.0},
        needs_base=True,
    ),
    "passthrough": MergekitMethod(_passthrough, {}, {"scale": None}, takes_base=False),
}
