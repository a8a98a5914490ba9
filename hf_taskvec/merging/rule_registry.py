"""What a merging rule is, and the list of them.

A rule is a function over the changes of *one* parameter, found by its name. It gives the terms of the merged change,
and best computes nothing yet: sums are expressions, and what is not a sum is a `Computed` change or computed factors.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_taskvec.algebra.computed_deltas import (
    ComputedElements,
    ComputedTiles,
    ElementFunction,
    Factored,
    Statistic,
    TileFunction,
)
from hf_taskvec.algebra.deltas import LowRank
from hf_taskvec.algebra.low_rank import are_factors
from hf_taskvec.algebra.parameter_names import layer_of
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.plugins import plugin, plugin_names


@dataclass(frozen=True)
class Change:
    """What one vector changes in a parameter.

    Args:
        index (`int`):
            The vector's place in the list that `combine` was given.
        label (`str`):
            The vector's expression, numbered where several vectors have the same.
        weight (`float`):
            The vector's weight, of either sign.
        terms (`tuple[Term, ...]`):
            The unweighted change.

    """

    index: int
    label: str
    weight: float
    terms: tuple[Term, ...]

    @property
    def is_low_rank(self) -> bool:
        """Whether the change is held as factors."""
        return are_factors(self.terms)


@dataclass(frozen=True)
class Parameter:
    """One parameter and what each vector changes in it: all that a rule is given.

    Args:
        name (`str`):
            The parameter's canonical name, as on disk.
        changes (`tuple[Change, ...]`):
            Of the vectors that change this parameter at all, with a weight that is not 0.
        weights (`tuple[float, ...]`):
            Those of all vectors, also of those that leave this parameter as it is.
        layers (`int`):
            How many layers the vectors reach, counted from the first.
        key (`str`):
            The rule and its options.

    """

    name: str
    changes: tuple[Change, ...]
    weights: tuple[float, ...]
    layers: int
    key: str

    @property
    def vectors(self) -> int:
        """How many vectors there are, with those that leave this parameter as it is."""
        return len(self.weights)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.changes[0].terms[0].delta.shape

    @property
    def layer(self) -> int | None:
        """The number of the layer that the parameter belongs to; None for embeddings, the last norm and the head."""
        return layer_of(self.name)

    def sum(self, coefficients: Sequence[float] | None = None) -> list[Term]:
        """The changes times their weights, or times other numbers, added up: exact, lazy, factors stay factors.

        Args:
            coefficients (`Sequence[float]`, *optional*):
                A number for each of `changes`; by default their weights.

        Returns:
            `list[Term]`: What a rule returns. Nothing is read.

        """
        chosen = [change.weight for change in self.changes] if coefficients is None else coefficients
        pairs = zip(chosen, self.changes, strict=True)
        return [Term(c * term.weight, term.delta) for c, change in pairs for term in change.terms]

    def computed(self, function: TileFunction, statistics: Iterable[Statistic] = ()) -> list[Term]:
        """A function of the changes, element by element, computed tile by tile when it is read.

        Args:
            function (`TileFunction`):
                Gets a list of tiles (all fp32 or all fp64), one for each of `changes`, unweighted, which it may write
                to; a list with the statistic of each; and the number of the tile's first row. Gives the merged tile.
            statistics (`Iterable[Statistic]`, *optional*):
                For each of `changes`, a function from its tiles to what must be known of it as a whole.

        Returns:
            `list[Term]`: What a rule returns.

        """
        return [Term(1.0, ComputedTiles(self.name, self._inputs, self._weighted, tuple(statistics), function))]

    def elementwise(self, element: ElementFunction, statistics: Iterable[Statistic] = ()) -> list[Term]:
        """An expression over the changes' elements, which is compiled to one pass over what is stored.

        Args:
            element (`ElementFunction`):
                Gets a `FormulaBuilder`, for numbers; an `Element` for each of `changes`, unweighted; and a list with
                the statistic of each. Gives the merged element.
            statistics (`Iterable[Statistic]`, *optional*):
                For each of `changes`, a function from its tiles to what must be known of it as a whole.

        Returns:
            `list[Term]`: What a rule returns.

        """
        return [Term(1.0, ComputedElements(self.name, self._inputs, self._weighted, tuple(statistics), element))]

    @property
    def _weighted(self) -> str:
        return f"{self.key} {[(change.label, change.weight) for change in self.changes]}"

    @property
    def _inputs(self) -> tuple[tuple[Term, ...], ...]:
        return tuple(change.terms for change in self.changes)

    def factored(self, rank: int, function: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> list[Term]:
        """A low-rank change whose factors are computed, both at once, when they are read.

        Args:
            rank (`int`):
                The rank of the factors.
            function (`Callable`):
                Gives the left and the right factor.

        Returns:
            `list[Term]`: What a rule returns.

        """
        weighted = f"{self.key} {[change.weight for change in self.changes]}"
        rows, columns = self.shape
        inputs = tuple(change.terms for change in self.changes)
        return [Term(1.0, LowRank(*Factored(inputs, weighted, ((rows, rank), (rank, columns)), function).factors))]


# From a `Parameter` and options to terms; of a linear rule, from weights and options to coefficients.
RuleFunction = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class Rule:
    """A way of combining vectors.

    Args:
        name (`str`):
            As `combine` takes it.
        summary (`str`):
            What it does, in one line.
        function (`Callable`):
            From a `Parameter` and the options to terms. Of a linear rule: from the weights and the options to one
            coefficient for each vector.
        options (`Mapping[str, Any]`):
            The names of the options, with their defaults.
        paper (`str`, *optional*):
            The link to the paper that describes it.
        at_least (`int`, *optional*, defaults to 2):
            How many vectors it takes, at least.
        linear (`bool`, *optional*, defaults to `False`):
            Whether the result is a plain linear combination of the vectors.

    """

    name: str
    summary: str
    function: RuleFunction = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: str | None = None
    at_least: int = 2
    linear: bool = False

    def check_options(self, given: Mapping[str, Any]) -> None:
        """Refuse an option that the rule does not have, or one that is missing."""
        for name in given:
            if name not in self.options:
                known = f"It takes {', '.join(self.options)}." if self.options else "It takes no options."
                hint = did_you_mean(name, self.options)
                raise MissingNameError(f"the rule {self.name!r} has no option {name!r}.{hint} {known}")
        missing = [name for name, default in self.options.items() if default is REQUIRED and name not in given]
        if missing:
            raise BadValueError(f"the rule {self.name!r} needs {' and '.join(f'{name}=' for name in missing)}.")

    def __str__(self) -> str:
        options = ", ".join(f"{k}" if v is REQUIRED else f"{k}={v!r}" for k, v in self.options.items())
        return f"{self.name}({options}): {self.summary}" + (f" {self.paper}" if self.paper else "")


REQUIRED = inspect.Parameter.empty

_RULES: dict[str, Rule] = {}


def rule(
    name: str, *, paper: str | None = None, at_least: int = 2, linear: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Make a function a merging rule that `combine` finds by its name.

    The function's first argument is a `Parameter`; the others, with their defaults, are the rule's options. The first
    paragraph of its docstring becomes the summary. Options should be checked in the function itself, which runs when
    `combine` is called; what it gives is computed later.

    Args:
        name (`str`):
            What `combine` takes.
        paper (`str`, *optional*):
            The link to the paper that describes it, which model cards show.
        at_least (`int`, *optional*, defaults to 2):
            How many vectors it takes, at least.
        linear (`bool`, *optional*, defaults to `False`):
            The function gives coefficients: its first argument is the list of the vectors' weights, and it gives one
            number for each vector.

    Returns:
        `Callable`: A decorator, which returns the function as it is.

    Raises:
        `BadValueError`: If there already is a rule of that name.

    Example:
        >>> import torch
        >>> from hf_taskvec import TaskVector, combine
        >>> @rule("strongest", paper="https://example.org/strongest")
        ... def strongest(parameter: Parameter):
        ...     "Of each element, the change that is largest, whatever its sign."
        ...     weights = [change.weight for change in parameter.changes]
        ...     def pick(tiles, statistics, start):
        ...         stacked = torch.stack([tile * weight for tile, weight in zip(tiles, weights)])
        ...         return stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]
        ...     return parameter.computed(pick)
        >>> a = TaskVector.from_tensors({"w": torch.tensor([1.0, -5.0])}, name="a")
        >>> b = TaskVector.from_tensors({"w": torch.tensor([2.0, 3.0])}, name="b")
        >>> combine([a, b], "strongest").dense("w")
        tensor([ 2., -5.])
        >>> del _RULES["strongest"]

    """

    def register(function: RuleFunction) -> RuleFunction:
        if name in _RULES:
            raise BadValueError(f"there already is a merging rule {name!r}. Choose another name.")
        options = list(inspect.signature(function).parameters.values())[1:]
        summary = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
        defaults = {option.name: option.default for option in options}
        _RULES[name] = Rule(name, summary, function, defaults, paper, at_least, linear)
        return function

    return register


def rules() -> dict[str, Rule]:
    """Every merging rule by its name, with its options and the link to its paper; those of other packages as well.

    Returns:
        `dict[str, Rule]`: The rules, in the order of their names.

    Example:
        >>> print(rules()["sum"])
        sum(): The weighted sum: task arithmetic. https://arxiv.org/abs/2212.04089
        >>> rules()["magnitude"].options
        {'density': 0.2}

    """
    for name in plugin_names("rules"):
        if name not in _RULES:
            _load(name)
    return dict(sorted(_RULES.items()))


def find_rule(name: str) -> Rule:
    """The rule of a name."""
    if not isinstance(name, str):
        raise BadValueError(
            f"rule={name!r} must be the name of a merging rule: {', '.join(rules())}. Weights are given as "
            "weights=[...]."
        )
    if name not in _RULES and name in plugin_names("rules"):
        _load(name)
    if name not in _RULES:
        known = sorted({*_RULES, *plugin_names("rules")})
        hint = did_you_mean(str(name), known)
        raise MissingNameError(f"no merging rule {name!r}.{hint} There are {', '.join(known)}.")
    return _RULES[name]


def _load(name: str) -> None:
    """Import what another package adds under a name: its function, which `rule` registers."""
    wanted = f"a function with the decorator hf_taskvec.merging.rule({name!r})"
    plugin("rules", name, lambda found: name in _RULES and _RULES[name].function is found, wanted)
