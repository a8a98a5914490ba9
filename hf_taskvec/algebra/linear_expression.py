"""`LinearExpression`: weighted changes by parameter, added, scaled, filtered, approximated and measured.

What a task vector is, apart from where it comes from and what is done with it. Nothing here reads a tensor before a
number is asked for.
"""

import hashlib
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.low_rank import Compressed, Target, compress
from hf_taskvec.algebra.name_patterns import Pattern, listed, matching, selected
from hf_taskvec.algebra.parameter_change import ParameterChange
from hf_taskvec.algebra.parameter_names import is_vocabulary, layer_count, layer_numbers
from hf_taskvec.algebra.provenance import Provenance
from hf_taskvec.algebra.rendering import as_html, as_text
from hf_taskvec.algebra.rounding import dtype_name, parse_dtype
from hf_taskvec.algebra.row_pruning import pruned_rows
from hf_taskvec.algebra.sources import Source, describe, handle_of
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError, did_you_mean
from hf_taskvec.progress import progress_bar
from hf_taskvec.threads import workers

if TYPE_CHECKING:
    from typing_extensions import Self


class LinearExpression(Mapping[str, ParameterChange]):
    """A mapping from parameter name to change, with the operations of a vector space; see `TaskVector`."""

    def __init__(
        self,
        terms: Mapping[str, Iterable[Term]],
        provenance: Provenance | None = None,
        discarded: Mapping[str, float] | None = None,
    ) -> None:
        folded = ((name, _fold(name, each)) for name, each in terms.items())
        self._changes = {name: ParameterChange(name, each) for name, each in folded if each}
        self._provenance = (provenance or Provenance()).identified(lambda: self._digest(handle_of))
        self._discarded = dict(discarded or {})

    # The mapping.

    def __getitem__(self, name: str) -> ParameterChange:
        try:
            return self._changes[name]
        except KeyError:
            raise MissingNameError(
                f"the task vector has no parameter {name!r}.{did_you_mean(name, self._changes)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._changes

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    # An expression is a value over large tensors: it is compared by what it stands for, its terms in any order.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinearExpression) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def _value(self) -> frozenset[tuple[str, frozenset[Term]]]:
        return frozenset((name, frozenset(change.terms)) for name, change in self._changes.items())

    # It never changes, so a copy of it is itself. Pickled, it holds tensors in memory by value, files by their place.

    def __copy__(self) -> "Self":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Self":
        return self

    # The algebra.

    __array_ufunc__ = None  # so that numpy's numbers, as in `np.linspace(0, 1, 11)[3] * v`, leave the product to us

    def terms_of(self, name: str) -> tuple[Term, ...]:
        """The weighted terms of a parameter's change; none if the parameter is not changed."""
        return self._changes[name].terms if name in self._changes else ()

    def __add__(self, other: object) -> "Self":
        if isinstance(other, numbers.Real) and other == 0:  # the start of sum([...])
            return self
        if not isinstance(other, LinearExpression):
            return NotImplemented
        names = dict.fromkeys([*self, *other])
        terms = {name: (*self.terms_of(name), *other.terms_of(name)) for name in names}
        return type(self)(terms, self._provenance.plus(other._provenance))

    __radd__ = __add__

    def __mul__(self, scale: object) -> "Self":
        if not isinstance(scale, numbers.Real):
            return NotImplemented
        weight = _finite(scale)
        terms = {name: [Term(t.weight * weight, t.delta) for t in each.terms] for name, each in self.items()}
        return type(self)(terms, self._provenance.scaled(weight))

    __rmul__ = __mul__

    def __truediv__(self, scale: object) -> "Self":
        if not isinstance(scale, numbers.Real):
            return NotImplemented
        if scale == 0:
            raise BadValueError("a task vector cannot be divided by 0.")
        return self * (1.0 / _finite(scale))

    def __neg__(self) -> "Self":
        return self * -1.0

    def __pos__(self) -> "Self":
        return self

    def __sub__(self, other: object) -> "Self":
        if not isinstance(other, LinearExpression):
            return NotImplemented
        return self + -other

    def scale(self, scales: float | Mapping[Pattern, float] | Callable[[str], float], default: float = 1.0) -> "Self":
        """The vector with each parameter scaled by a number of its own.

        Args:
            scales (`float`, `Mapping` or `Callable`):
                One number; a mapping from patterns (glob strings or compiled regular expressions) to numbers, of which
                the first that matches counts; or a function from a parameter's name to a number.
            default (`float`, *optional*, defaults to 1.0):
                For parameters that no pattern matches.

        Returns:
            `TaskVector`: The scaled vector. Nothing is read.

        Raises:
            `MissingNameError`: If a pattern matches no parameter.
            `BadValueError`: If a scale is not a finite number.

        Example:
            >>> import torch
            >>> from hf_taskvec import TaskVector
            >>> v = TaskVector.from_tensors({"mlp.w": torch.ones(2), "attn.w": torch.ones(2)})
            >>> v.scale({"mlp.*": 0.5}).dense("mlp.w")
            tensor([0.5000, 0.5000])

        """
        if isinstance(scales, float | numbers.Real):  # numpy's numbers as well
            return self * scales
        if callable(scales):
            factors = {name: _finite(scales(name)) for name in self}
            # Functions have no value to show: a digest of what they gave tells one from another.
            digest = hashlib.sha256(repr(factors).encode()).hexdigest()
            described: dict[str, Any] = {"by": f"function {digest[:8]}"}
        elif not isinstance(scales, Mapping):
            raise _not_a_number(scales)
        else:
            matched = {pattern: set(matching(pattern, self)) for pattern in scales}
            factors = {}
            for name in self:
                found = (scales[pattern] for pattern, names in matched.items() if name in names)
                factors[name] = _finite(next(found, default))
            by = {pattern: _finite(scale) for pattern, scale in scales.items()}
            described = {"by": by, "default": None if default == 1.0 else _finite(default)}
        terms = {name: [Term(t.weight * factors[name], t.delta) for t in each.terms] for name, each in self.items()}
        return type(self)(terms, self._provenance.through("scale", **described))

    def filter(
        self,
        include: Pattern | Iterable[Pattern] | None = None,
        exclude: Pattern | Iterable[Pattern] | None = None,
        layers: int | Iterable[int] | None = None,
        outside: bool = False,
    ) -> "Self":
        """The vector restricted to some parameters: those that all of the arguments let through.

        Args:
            include (`str`, `re.Pattern` or an iterable of them, *optional*):
                Glob strings or compiled regular expressions of the parameters to keep; all by default.
            exclude (`str`, `re.Pattern` or an iterable of them, *optional*):
                Those to leave out of what is kept.
            layers (`int` or an iterable of them, *optional*):
                The layers to keep, such as `range(4, 8)`; all by default. Negative numbers count from the last layer
                that the vector changes: `range(-4, 0)` is the last four.
            outside (`bool`, *optional*, defaults to `False`):
                With `layers`: keep what is in no layer as well (embeddings, the last norm, the head).

        Returns:
            `TaskVector`: The restricted vector. Nothing is read.

        Raises:
            `MissingNameError`: If a pattern matches no parameter.
            `BadValueError`: If there is no such layer, or nothing is left of the layers.

        Example:
            >>> import torch
            >>> from hf_taskvec import TaskVector
            >>> v = TaskVector.from_tensors({name: torch.ones(2) for name in ("h.0.mlp", "h.1.mlp", "h.1.attn", "wte")})
            >>> list(v.filter(include="*.mlp")), list(v.filter(layers=-1))
            (['h.0.mlp', 'h.1.mlp'], ['h.1.mlp', 'h.1.attn'])

        """
        kept, left_out = (None if each is None else listed(each) for each in (include, exclude))
        numbers = None if layers is None else layer_numbers(layers, layer_count(self))
        chosen = selected(self, kept, left_out, numbers, outside)
        terms = {name: each.terms for name, each in self.items() if name in chosen}
        described = {"include": kept, "exclude": left_out, "layers": numbers, "outside": outside or None}
        return type(self)(terms, self._provenance.through("filter", **described))

    def compress(
        self,
        *,
        rank: int | None = None,
        energy: float | None = None,
        tolerance: float | None = None,
        dtype: torch.dtype | str = torch.float32,
        exact: bool | None = None,
        progress: bool | None = None,
    ) -> "Self":
        """The vector with every matrix approximated at low rank; biases and norms stay as they are.

        Give one of `rank`, `energy` and `tolerance`. `discarded` of the result tells what was lost.

        Args:
            rank (`int`, *optional*):
                The rank of each matrix.
            energy (`float`, *optional*):
                The share of each matrix's squared norm to keep.
            tolerance (`float`, *optional*):
                The relative error to allow for each matrix.
            dtype (`torch.dtype` or `str`, *optional*, defaults to `torch.float32`):
                Of the new factors.
            exact (`bool`, *optional*):
                For large dense matrices: a randomised approximation by default, the exact one with `True`.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `TaskVector`: The approximation. The matrices are decomposed by this call, as many at once as torch has
                threads, each on one: their number changes no bit.

        Raises:
            `BadValueError`: If not exactly one target is given, or it is out of its range.

        Example:
            >>> import torch
            >>> from hf_taskvec import TaskVector
            >>> v = TaskVector.from_tensors({"w": torch.diag(torch.tensor([2.0, 1.0]))})
            >>> round(v.compress(rank=1).discarded["w"], 3)
            0.2

        """
        target = Target(rank, energy, tolerance)
        terms: dict[str, tuple[Term, ...]] = {}
        discarded = {}
        stored_in = parse_dtype(dtype)

        def compressed(change: ParameterChange) -> Compressed | None:
            is_matrix = len(change.shape) == 2
            return compress(change.name, change.terms, target, stored_in, exact) if is_matrix else None

        with workers() as run:
            results = progress_bar(run(compressed, self.values()), "Compressing", progress, total=len(self))
            for (name, each), result in zip(self.items(), results, strict=True):
                terms[name] = each.terms if result is None else result.terms
                if result is not None:
                    discarded[name] = result.discarded
        options = {"dtype": None if stored_in == torch.float32 else dtype_name(stored_in), "exact": exact}
        provenance = self._provenance.through("compress", rank=rank, energy=energy, tolerance=tolerance, **options)
        return type(self)(terms, provenance, discarded)

    def prune_rows(
        self, fraction: float, include: re.Pattern[str] | None = None, *, progress: bool | None = None
    ) -> "Self":
        """The vector with only the share `fraction` of the neurons of each MLP: those whose change is largest.

        A neuron is an output of an MLP's first matrix: a row, or a column where the weight is stored transposed, as
        GPT-2's. All else stays as it is, and factors stay factors. `discarded` of the result tells what was lost.

        Args:
            fraction (`float`):
                How many of the rows to keep, above 0 and at most 1; at least one row is kept.
            include (`re.Pattern`, *optional*):
                Which matrices lose outputs; by default the first of each MLP, as in corollary 2 of Li et al. 2025.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `TaskVector`: The pruned vector. The rows' norms are measured by this call.

        Raises:
            `BadValueError`: If `fraction` is out of its range.
            `MissingNameError`: If there is no such matrix.

        Example:
            >>> import torch
            >>> from hf_taskvec import TaskVector
            >>> name, change = "model.layers.0.mlp.fc1.weight", torch.diag(torch.tensor([1.0, 3.0, 2.0]))
            >>> TaskVector.from_tensors({name: change}).prune_rows(0.5).dense(name).diagonal()
            tensor([0., 3., 2.])

        """
        terms = {name: each.terms for name, each in self.items()}
        discarded = dict(self._discarded)
        architectures = self._provenance.architectures
        for name, (kept, lost) in pruned_rows(self, fraction, include, architectures, progress).items():
            terms[name] = kept
            discarded[name] = 1.0 - (1.0 - discarded.get(name, 0.0)) * (1.0 - lost)
        provenance = self._provenance.through("prune_rows", fraction=fraction, include=include)
        return type(self)(terms, provenance, discarded)

    # What is in it.

    @property
    def provenance(self) -> Provenance:
        """Where the vector comes from, and the whole expression."""
        return self._provenance

    @property
    def expression(self) -> str:
        """The expression in the algebra's own notation, e.g. `-0.6*hp1 + 0.2*hp2`."""
        return self._provenance.expression

    @property
    def discarded(self) -> Mapping[str, float]:
        """After `compress` or `prune_rows`: the share of each matrix's squared norm that was discarded."""
        return dict(self._discarded)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the whole expression and of what it reads: equal only for vectors that do the same."""
        return self._digest(lambda source: source.identity)

    def _digest(self, leaf: Callable[[Source], str]) -> str:
        digest = hashlib.sha256()
        for name in sorted(self):
            for term in self[name].terms:
                digest.update(f"{name}|{term.weight!r}|{describe(term.delta, leaf)}\n".encode())
        return digest.hexdigest()

    def named(self, name: str) -> "Self":
        """The same vector under a label of its own."""
        terms = {key: each.terms for key, each in self.items()}
        return type(self)(terms, self._provenance.renamed(name), self._discarded)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return self[name].shape

    def rank(self, name: str) -> int:
        """The rank of a parameter's change as represented: the sum of its factors' ranks, or the full rank."""
        return self[name].rank

    @property
    def is_low_rank(self) -> bool:
        """Whether every matrix is held as factors."""
        return all(each.is_low_rank for each in self.values() if len(each.shape) > 1)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every stored tensor that the vector reads when used, each once."""
        roots = (r for each in self.values() for t in each.terms for s in t.delta.sources for r in s.roots)
        return tuple(dict.fromkeys(roots))

    @property
    def nbytes(self) -> int:
        """The bytes of all stored tensors that the vector reads when used."""
        return sum(source.nbytes for source in self.sources)

    def dense(self, name: str, dtype: torch.dtype | str = torch.float32) -> torch.Tensor:
        """A parameter's change as one tensor.

        Args:
            name (`str`): The parameter.
            dtype (`torch.dtype` or `str`, *optional*, defaults to `torch.float32`): Each element is rounded to it once.
        """
        return self[name].dense(dtype)

    # Measures, from the factors.

    def norm(self, name: str | None = None) -> float:
        """The Frobenius norm.

        Args:
            name (`str`, *optional*): The parameter whose change is measured; by default the whole vector.
        """
        if name is not None:
            return self[name].norm
        return math.sqrt(sum(value**2 for value in self.norms().values()))

    def norms(self) -> dict[str, float]:
        """The Frobenius norm of each parameter's change."""
        with workers() as run:
            return dict(zip(self, run(lambda each: each.norm, self.values()), strict=True))

    def dot(self, other: "LinearExpression", name: str | None = None) -> float:
        """The inner product with another vector.

        Args:
            other (`TaskVector`): A vector of models of the same shapes.
            name (`str`, *optional*): The parameter whose changes are multiplied; by default the whole vectors.
        """
        if name is not None:
            return self._dot(other, name)
        return math.fsum(self.dots(other).values())

    def dots(self, other: "LinearExpression") -> dict[str, float]:
        """The inner product with another vector for each parameter that both change."""
        common = [name for name in self if name in other]
        for name in common:
            check_shape(name, self.shape(name), other.shape(name))
        with workers() as run:
            return dict(zip(common, run(lambda name: self._dot(other, name), common), strict=True))

    def _dot(self, other: "LinearExpression", name: str) -> float:
        check_shape(name, self.shape(name), other.shape(name))
        return measures.dot(name, self[name].terms, other[name].terms)

    def cosine(self, other: "LinearExpression", name: str | None = None) -> float:
        """The cosine with another vector, from −1 to 1.

        Args:
            other (`TaskVector`): A vector of models of the same shapes.
            name (`str`, *optional*): The parameter whose changes are compared; by default the whole vectors.

        Raises:
            `BadValueError`: If one side has norm 0.
        """
        return _cosine(self.dot(other, name), self.norm(name), other.norm(name), name or "the vector")

    def cosines(self, other: "LinearExpression") -> dict[str, float]:
        """The cosine with another vector for each parameter that both change."""
        return {n: _cosine(d, self.norm(n), other.norm(n), n) for n, d in self.dots(other).items()}

    def __repr__(self) -> str:
        return as_text(type(self).__name__, self, self._provenance, self.nbytes)

    def _repr_html_(self) -> str:
        return as_html(type(self).__name__, self, self._provenance, self.nbytes)


def _fold(name: str, terms: Iterable[Term]) -> tuple[Term, ...]:
    """Like terms added up, those that cancel dropped."""
    weights: dict[Any, float] = {}
    shape: tuple[int, ...] | None = None
    for term in terms:
        if shape is not None:
            check_shape(name, shape, term.delta.shape)
        shape = term.delta.shape
        weights[term.delta] = weights.get(term.delta, 0.0) + term.weight
    for weight in weights.values():
        if not math.isfinite(weight):
            raise BadValueError(f"{name}: the scales of the expression multiply to a weight of {weight}.")
    return tuple(Term(weight, delta) for delta, weight in weights.items() if weight != 0.0)


def check_shape(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Refuse two shapes of one parameter that differ, naming it."""
    if one != other:
        vocabulary = len(one) == len(other) and one[1:] == other[1:] and is_vocabulary(name)
        hint = (
            "the vocabulary sizes differ. Extract both with the same vocabulary= choice"
            if vocabulary
            else "the vectors belong to models of different shapes"
        )
        raise MismatchError(f"{name}: shapes {list(one)} and {list(other)} cannot be combined: {hint}.")


def _not_a_number(scale: object) -> BadValueError:
    return BadValueError(f"a task vector cannot be scaled by {scale!r}: give a number.")


def _finite(scale: Any) -> float:
    if isinstance(scale, str):  # float() would take "0.5"
        raise _not_a_number(scale)
    try:
        value = float(scale)
    except (TypeError, ValueError, RuntimeError):
        raise _not_a_number(scale) from None
    if not math.isfinite(value):
        raise BadValueError(f"a task vector cannot be scaled by {value}.")
    return value


def _cosine(dot: float, norm: float, other_norm: float, what: str) -> float:
    if norm == 0.0 or other_norm == 0.0:
        raise BadValueError(f"the cosine of {what} is undefined: one side has norm 0.")
    return max(-1.0, min(1.0, dot / (norm * other_norm)))
