"""Where a task vector comes from: its sources, and the expression that made it from them.

Kept as plain values so that it can be printed, stored as JSON, and shown on a model card. A local folder is known
by its name only: no path of the user's machine is stored here or printed. (A vector saved with `reference=True` must
store the path of a local folder that it refers to, beside its provenance.)
"""

import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_taskvec.algebra.expressions import check_expression, check_label, is_label, label_for
from hf_taskvec.algebra.provenance_schema import model_schema, provenance_schema
from hf_taskvec.algebra.sources import Source, full_digest
from hf_taskvec.algebra.token_rows import unquoted
from hf_taskvec.errors import BadValueError, CorruptFileError
from hf_taskvec.escaping import visible
from hf_taskvec.hub_names import CARD_ID, HUB_ID


@dataclass(frozen=True)
class License:
    """A licence as a model card states it: the Hub's ids, and a name and a link for `other`."""

    ids: tuple[str, ...]
    name: str | None = None
    link: str | None = None

    def __str__(self) -> str:
        named = f" ({self.name})" if self.name else ""
        return " and ".join(self.ids) + named

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, for a file."""
        return {key: list(value) if key == "ids" else value for key, value in vars(self).items() if value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "License":
        """What `to_json` gave."""
        return cls(tuple(data["ids"]), data.get("name"), data.get("link"))


@dataclass(frozen=True)
class ModelRecord:
    """A model that entered a vector: a Hub id, a folder's name, or the class of a live model."""

    name: str
    revision: str | None = None
    architecture: str | None = None
    fingerprint: str | None = None
    #: sha256 of each weight file, where the Hub told it
    files: tuple[tuple[str, str], ...] = ()
    #: what the model's own card states, where it was at hand
    license: License | None = None
    datasets: tuple[str, ...] = ()
    #: a digest of the vocabulary, where a tokenizer was beside the weights
    tokenizer: str | None = None
    #: of a fine-tune whose rows are known by token, the tokens that its base has not, each in quotation marks: what is
    #: said of how it is found in a text (`models.added_tokens`)
    added: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    #: weights that are one parameter in this model: alias -> the name under which it is stored
    tied: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    #: a digest of every byte of the weights (`sources.full_digest`), where they were read; `fingerprint` is of samples.
    #: The record of a model is the same with and without it; called what it was before it was of blocks
    sha256: str | None = field(default=None, compare=False)
    #: the weights themselves, where they are in files; not stored
    weights: Mapping[str, Source] | None = field(default=None, compare=False, repr=False)
    #: where the model was found, a Hub id or a folder of this machine; not stored
    address: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", visible(self.name))  # a folder's name may hold anything

    @property
    def hub_id(self) -> str | None:
        """The model's id on the Hub; none for a folder or a live model, whose name is no address."""
        form = HUB_ID if self.revision is None else CARD_ID
        return self.name if form.fullmatch(self.name) else None

    def __str__(self) -> str:
        revision = f"@{self.revision[:12]}" if self.revision else ""
        fingerprint = f" [{self.fingerprint[:12]}]" if self.fingerprint else ""
        return f"{self.name}{revision}{fingerprint}"

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, for a file."""
        found: dict[str, Any] = {k: v for k, v in vars(self).items() if v and k not in ("weights", "address")}
        for pairs in ("files", "tied", "added"):
            if pairs in found:
                found[pairs] = dict(found[pairs])
        if self.license:
            found["license"] = self.license.to_json()
        if self.datasets:
            found["datasets"] = list(self.datasets)
        return found

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ModelRecord":
        """What `to_json` gave; anything else is refused."""
        model_schema.check(data, "the record of a model")
        pairs = {key: tuple(sorted(data.get(key, {}).items())) for key in ("files", "tied", "added")}
        license = License.from_json(data["license"]) if "license" in data else None
        return cls(**{**data, **pairs, "license": license, "datasets": tuple(data.get("datasets", ()))})


@dataclass(frozen=True)
class Origin:
    """One source of a vector: the label it has in the expression, and how it was made."""

    label: str
    how: str
    base: ModelRecord | None = None
    tuned: ModelRecord | None = None
    #: a digest of the changes that the label stands for, told by the files and tensors that they are in. It is of this
    #: process: a record of samples is no proof that two models are the same, and a saved vector gets a new one
    identity: str | None = field(default=None, compare=False, repr=False)

    def stands_for_the_same(self, other: "Origin") -> bool:
        """Whether both are known to be the same changes; where that is not known, whether the records are the same."""
        if self.identity is None or other.identity is None:
            return self == other
        return self.identity == other.identity

    def __post_init__(self) -> None:
        check_label(self.label)

    def __str__(self) -> str:
        models = [f"{side}={model}" for side, model in (("base", self.base), ("tuned", self.tuned)) if model]
        return f"{self.label}: {self.how}" + (f" ({', '.join(models)})" if models else "")

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, for a file."""
        models = {"base": self.base, "tuned": self.tuned}
        return {
            "label": self.label,
            "how": self.how,
            **{side: model.to_json() for side, model in models.items() if model},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Origin":
        """What `to_json` gave."""
        models = {s: ModelRecord.from_json(data[s]) for s in ("base", "tuned") if s in data}
        return cls(data["label"], data["how"], models.get("base"), models.get("tuned"))


@dataclass(frozen=True)
class Provenance:
    """A linear combination of labelled atoms, and the origins that the labels stand for."""

    weights: tuple[tuple[str, float], ...] = ()
    origins: tuple[Origin, ...] = field(default=(), repr=False)
    #: the merging rules that took part, each with the link to its paper
    rules: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, origin: Origin) -> "Provenance":
        """The provenance of a single source."""
        return cls(((origin.label, 1.0),), (origin,))

    @property
    def architectures(self) -> frozenset[str]:
        """The model classes that took part, as far as they are known."""
        models = (model for origin in self.origins for model in (origin.base, origin.tuned))
        return frozenset(model.architecture for model in models if model and model.architecture)

    @property
    def expression(self) -> str:
        """The expression in the algebra's own notation.

        >>> Provenance((("hp1", -0.6), ("hp2", 1.0))).expression
        '-0.6*hp1 + hp2'
        """
        text = ""
        for atom, weight in self.weights:
            sign = "-" if weight < 0 else "+"
            factor = "" if abs(weight) == 1.0 else f"{_number(abs(weight))}*"
            text += f" {sign} {factor}{atom}" if text else f"{sign.strip('+')}{factor}{atom}"
        return text or "0"

    def scaled(self, weight: float) -> "Provenance":
        """The provenance of `weight * self`."""
        return replace(self, weights=tuple((atom, w * weight) for atom, w in self.weights if w * weight != 0.0))

    @property
    def added_tokens(self) -> dict[str, str]:
        """What is said of each token that a fine-tune among the origins added, by the first that says it."""
        models = [model for origin in self.origins for model in (origin.base, origin.tuned) if model]
        return unquoted({token: said for model in reversed(models) for token, said in model.added})

    def plus(self, other: "Provenance") -> "Provenance":
        """The provenance of `self + other`; labels that stand for different sources are told apart."""
        return self.total([self, other])

    @classmethod
    def total(cls, each: "Iterable[Provenance]") -> "Provenance":
        """The provenance of a sum of any number of vectors: that of adding them one by one."""
        whole = SumOfProvenances()
        for one in each:
            whole.add(one)
        return whole.result()

    def through(self, function: str, **arguments: object) -> "Provenance":
        """The provenance of `function(self, ...)`: one new atom."""
        given = _keywords(arguments)
        return Provenance(((f"{function}({self.expression}{given})", 1.0),), self.origins, self.rules)

    def with_ties(self, moved: Callable[[str], str | None]) -> "Provenance":
        """The same, with what the bases tie also told by other names."""

        def told(base: ModelRecord | None) -> ModelRecord | None:
            if base is None:
                return None
            pairs = [(moved(alias), moved(owner)) for alias, owner in base.tied]
            known = [(alias, owner) for alias, owner in pairs if alias is not None and owner is not None]
            return replace(base, tied=tuple(dict.fromkeys([*base.tied, *known])))

        return replace(self, origins=tuple(replace(each, base=told(each.base)) for each in self.origins))

    @classmethod
    def combined(
        cls, each: "Sequence[Provenance]", rule: str, paper: str | None = None, **arguments: object
    ) -> "Provenance":
        """The provenance of `combine([...], rule, ...)`: one new atom over all of them.

        >>> a, b = (Provenance.of(Origin(label, "given")) for label in "ab")
        >>> Provenance.combined([a, b.scaled(-0.5)], "ties", density=0.2).expression
        "combine([a, -0.5*b], 'ties', density=0.2)"
        """
        added = SumOfProvenances()
        expressions = [added.add(one).expression for one in each]
        whole = added.result()
        atom = f"combine([{', '.join(expressions)}], {rule!r}{_keywords(arguments)})"
        rules = dict.fromkeys([*whole.rules, *([(rule, paper)] if paper else [])])
        return cls(((atom, 1.0),), whole.origins, tuple(rules))

    def renamed(self, label: str) -> "Provenance":
        """The same provenance under a name of its own, if it is a single source; else as a named atom."""
        if len(self.origins) == 1 and self.weights == ((self.origins[0].label, 1.0),):
            return Provenance.of(replace(self.origins[0], label=label))
        how = f"{self.expression}"
        return Provenance(((label, 1.0),), (Origin(label, how), *self.origins), self.rules)

    def identified(self, identity: Callable[[], str]) -> "Provenance":
        """The same provenance, its origins knowing what they stand for; those that knew it before keep that."""
        if all(origin.identity is not None for origin in self.origins):
            return self
        known = identity()
        origins = (replace(each, identity=each.identity or f"{each.label}|{known}") for each in self.origins)
        return replace(self, origins=tuple(origins))

    def with_digests(self, read: Collection[Source]) -> "Provenance":
        """The same provenance, with a digest of every byte of each base that is read as a whole anyway.

        Args:
            read (`Collection[Source]`):
                All that is read.
        """
        origins, digests = [], dict[frozenset[tuple[str, Source]], str]()
        for origin in self.origins:
            base = origin.base
            if base is not None and base.weights and not base.sha256 and set(base.weights.values()) <= set(read):
                key = frozenset(base.weights.items())  # vectors of one base read it once
                digests[key] = digests.get(key) or full_digest(base.weights)
                origin = replace(origin, base=replace(base, sha256=digests[key]))
            origins.append(origin)
        return replace(self, origins=tuple(origins))

    def relabelled_beside(self, taken: Mapping[str, Origin], known: Mapping[str, str]) -> "Provenance":
        """The same provenance, with no label that stands for something else.

        Args:
            taken (`Mapping[str, Origin]`):
                Labels and what they stand for.
            known (`Mapping[str, str]`):
                The identity of an origin -> its label there.
        """
        labels = {origin.label: origin.label for origin in self.origins}
        for origin in self.origins:
            if taken.get(origin.label, origin).stands_for_the_same(origin):
                continue
            number = 2
            while (new := f"{origin.label}_{number}") in taken or new in labels:
                number += 1
            # Two vectors of one name may have met before, the other way round.
            labels[origin.label] = known.get(origin.identity or "") or new
        return self._relabelled({old: new for old, new in labels.items() if old != new})

    def _relabelled(self, labels: Mapping[str, str]) -> "Provenance":
        if not labels:
            return self
        swap = _swap(labels)
        origins = (
            replace(
                each,
                label=labels.get(each.label, each.label),
                # What a vector that was given a name of its own is made of is an expression, too.
                how=each.how if each.base or each.tuned else swap(each.how),
            )
            for each in self.origins
        )
        return Provenance(tuple((swap(atom), weight) for atom, weight in self.weights), tuple(origins), self.rules)

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, for a file."""
        return {
            "expression": self.expression,
            "weights": [[atom, weight] for atom, weight in self.weights],
            "origins": [origin.to_json() for origin in self.origins],
            **({"rules": dict(self.rules)} if self.rules else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Provenance":
        """What `to_json` gave; anything else is refused, since it may be shown as code."""
        provenance_schema.check(data, "where the vector comes from")
        labels = _fitting([origin["label"] for origin in data["origins"]])
        atoms, origins = data["weights"], data["origins"]
        # A vector could once be called anything, and its expression has that name.
        if renamed := {old: new for old, new in labels.items() if old != new}:
            swap = _swap(renamed)
            atoms = [(swap(atom), weight) for atom, weight in atoms]
            origins = [each if "base" in each or "tuned" in each else _with_how(each, swap) for each in origins]
        for atom, weight in atoms:
            if not math.isfinite(weight):
                raise CorruptFileError(f"the weight of {atom[:60]!r} in the expression is not a number.")
            try:
                check_expression(atom, labels.values())
            except BadValueError as error:
                raise CorruptFileError(f"where the vector comes from is damaged or not ours: {error}") from None
        return cls(
            tuple((atom, float(weight)) for atom, weight in atoms),
            tuple(Origin.from_json({**origin, "label": labels[origin["label"]]}) for origin in origins),
            tuple(data.get("rules", {}).items()),
        )


class SumOfProvenances:
    """The provenances of a sum's vectors, added up one after another, each in the time that it takes by itself."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._origins: dict[str, Origin] = {}
        self._known: dict[str, str] = {}
        self._rules: dict[tuple[str, str], None] = {}

    def add(self, one: Provenance) -> Provenance:
        """Take one more; it is given back with labels that are told apart from those before."""
        one = one.relabelled_beside(self._origins, self._known)
        for atom, weight in one.weights:
            self._weights[atom] = self._weights.get(atom, 0.0) + weight
            if self._weights[atom] == 0.0:
                del self._weights[atom]
        for origin in one.origins:
            if origin.label not in self._origins:
                self._origins[origin.label] = origin
                if origin.identity:
                    self._known[origin.identity] = origin.label
        self._rules |= dict.fromkeys(one.rules)
        return one

    def result(self) -> Provenance:
        """The provenance of the sum so far."""
        return Provenance(tuple(self._weights.items()), tuple(self._origins.values()), tuple(self._rules))


def _fitting(labels: Sequence[str]) -> dict[str, str]:
    """Each label, or in place of one that cannot stand in an expression a similar one that is free."""
    fitting = {label: label for label in labels if is_label(label)}
    for label in labels:
        if label not in fitting:
            wanted, number = label_for(label), 1
            while (free := wanted if number == 1 else f"{wanted}_{number}") in fitting.values():
                number += 1
            fitting[label] = free
    return fitting


def _with_how(origin: dict[str, Any], swap: Callable[[str], str]) -> dict[str, Any]:
    return {**origin, "how": swap(origin["how"])}


def _keywords(arguments: Mapping[str, object]) -> str:
    return "".join(f", {key}={_written(value)}" for key, value in arguments.items() if value is not None)


def _written(value: object) -> str:
    """A value as code that gives it again: numpy's numbers as Python's, a compiled pattern as what compiles it."""
    if isinstance(value, re.Pattern):  # its own repr is cut after 200 characters
        flags = re.RegexFlag(value.flags & ~(re.UNICODE | re.DEBUG))
        return f"re.compile({value.pattern!r}{f', {flags!r}' if flags else ''})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_written(key)}: {_written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, numbers.Integral):
        return repr(value if isinstance(value, bool) else int(value))
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return repr(float(value))
    # What no text gives again, such as a function, is told as a text, so that the expression can be read.
    return repr(value if value is None or isinstance(value, str) else repr(value))


def _number(value: float) -> str:
    """A number in the fewest digits, at least twelve where it needs them, that give it again."""
    short = f"{value:.12g}"
    return short if float(short) == value else repr(value)


def _swap(labels: Mapping[str, str]) -> Callable[[str], str]:
    """Other names for vectors in an expression, all at once; texts, options and functions of their names stay."""
    text = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
    names = "|".join(map(re.escape, sorted(labels, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w.])(?:{names})(?![\w.(=])|{text}")
    return lambda expression: pattern.sub(lambda found: labels.get(found[0], found[0]), expression)
