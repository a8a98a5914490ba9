"""`TaskVector`: an immutable, lazy linear expression over weight changes."""

import fnmatch
import hashlib
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.deltas import Dense, LowRank
from hf_taskvec.algebra.low_rank import Target, compress
from hf_taskvec.algebra.provenance import ModelRecord, Origin, Provenance
from hf_taskvec.algebra.rounding import FLOATS, parse_dtype
from hf_taskvec.algebra.sources import InMemory, Source, describe, fingerprint
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.errors import (
    BadValueError,
    MismatchError,
    MissingNameError,
    UnsupportedError,
    did_you_mean,
    some,
)
from hf_taskvec.models.layout import is_vocabulary

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from peft import PeftModel

    from hf_taskvec.application.to_live_model import Edit
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
    from hf_taskvec.publishing.push import Pushed

Pattern = str | re.Pattern[str]
Model = str | Path | torch.nn.Module


class TaskVector(Mapping[str, tuple[Term, ...]]):
    """A change to a model's weights: a mapping from parameter name to weighted terms.

    `-v`, `0.5 * v`, `a + b - c` build expressions and read no tensor; low-rank factors stay factors. Tensors are read
    when the expression is used: applied, saved, exported or measured.

    >>> import torch
    >>> a = TaskVector.from_tensors({"w": torch.ones(2, 2)}, name="a")
    >>> b = TaskVector.from_tensors({"w": torch.eye(2)}, name="b")
    >>> (a - 0.5 * b).dense("w")
    tensor([[0.5000, 1.0000],
            [1.0000, 0.5000]])
    >>> (a - 0.5 * b).expression
    'a - 0.5*b'
    >>> len(a - a)
    0
    """

    def __init__(
        self,
        terms: Mapping[str, Iterable[Term]],
        provenance: Provenance | None = None,
        discarded: Mapping[str, float] | None = None,
    ) -> None:
        self._terms = {name: folded for name, each in terms.items() if (folded := _fold(name, each))}
        self._provenance = provenance or Provenance()
        self._discarded = dict(discarded or {})

    # Making one: thin doors to the rooms that do the work.

    @classmethod
    def from_finetuned(
        cls,
        base: Model,
        tuned: Model,
        *,
        name: str | None = None,
        base_revision: str | None = None,
        tuned_revision: str | None = None,
        vocabulary: str | None = None,
        token: str | bool | None = None,
    ) -> "TaskVector":
        """The vector `tuned - base` of a full fine-tune.

        Args:
            base, tuned: each a Hub id (`"me/model"` or `"me/model@revision"`), a folder, or a live model. Files are
                mapped and read only when used; of a live model the exact difference is taken at once, so that
                training or editing the model afterwards does not change the vector.
            name: the vector's label in expressions; by default made from the tuned model's name.
            base_revision, tuned_revision: branch, tag or commit, for Hub ids.
            vocabulary: what to do when the embeddings differ in their number of rows: `"truncate"` compares the
                rows that both have, `"extend"` also takes the fine-tune's additional rows as a change from zero.
            token: as in transformers.

        The difference is that of the real numbers, whatever the dtypes: a bf16 base and an fp32 fine-tune give an
        exact fp32 change. Applying it rounds once, to the dtype of the model it is applied to.
        """
        from hf_taskvec.extraction.from_finetuned import from_finetuned

        return from_finetuned(
            base,
            tuned,
            name=name,
            base_revision=base_revision,
            tuned_revision=tuned_revision,
            vocabulary=vocabulary,
            token=token,
        )

    @classmethod
    def from_adapter(
        cls,
        adapter: "str | Path | PeftModel",
        base: Model | None = None,
        *,
        name: str | None = None,
        revision: str | None = None,
        base_revision: str | None = None,
        adapter_name: str | None = None,
        token: str | bool | None = None,
    ) -> "TaskVector":
        """The vector of a LoRA adapter, its factors kept as factors.

        Args:
            adapter: a folder, a Hub id, or a live `PeftModel`.
            base: needed only for what is not low-rank (`modules_to_save`, trained biases and tokens, DoRA); by default
                the base that the adapter's config names.
            name: the vector's label in expressions; by default made from the adapter's name.
            revision, base_revision: branch, tag or commit, for Hub ids.
            adapter_name: which adapter of a live `PeftModel`; by default the active one.
            token: as in transformers.

        LoRA on a tied input embedding changes the one stored weight, and so the output head too, as PEFT's merge
        does. An adapter on the *head* of a tied model (LoRA or `modules_to_save` on `lm_head`) is kept as a change
        to the head alone.
        """
        from hf_taskvec.extraction.from_adapter import from_adapter

        return from_adapter(
            adapter,
            base,
            name=name,
            revision=revision,
            base_revision=base_revision,
            adapter_name=adapter_name,
            token=token,
        )

    @classmethod
    def from_gradient(
        cls,
        model: torch.nn.Module,
        data: Any,
        learning_rate: float,
        *,
        name: str = "gradient",
        batch_size: int = 8,
        max_length: int | None = None,
        tokenizer: Any = None,
        progress: bool | None = None,
    ) -> "TaskVector":
        """The vector of one full-batch gradient step, `−η ∇L(θ)`: what one epoch of gradient descent gives.

        L is the mean loss of the next token over all of the data, without dropout. The gradient is accumulated over
        batches, in fp32 or better; under `accelerate launch` the processes share the rows. The model and its `.grad`
        stay as they are.

        Args:
            model: a live causal language model; parameters that require no gradient are left out.
            data: a `datasets.Dataset` with `input_ids`, token-id sequences, or texts.
            learning_rate: η, the size of the step.
            name: the vector's label in expressions.
            batch_size: rows in a forward pass.
            max_length: cut rows to this many tokens.
            tokenizer: for texts.
            progress: show a progress bar; by default on a terminal.
        """
        from hf_taskvec.analysis.gradients import from_gradient

        return from_gradient(
            model,
            data,
            learning_rate,
            name=name,
            batch_size=batch_size,
            max_length=max_length,
            tokenizer=tokenizer,
            progress=progress,
        )

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]], *, name: str = "tensors"
    ) -> "TaskVector":
        """A vector from plain tensors: a dense change, or a pair `(left, right)` of low-rank factors, for each name.

        The tensors are copied, so later changes to them do not reach the vector.
        """
        terms, sources = {}, {}
        for key, value in tensors.items():
            given = value if isinstance(value, tuple) else (value,)
            if isinstance(value, tuple) and len(value) != 2:
                raise BadValueError(f"{key}: a low-rank change is given by two factors, not {len(value)}.")
            for tensor in given:
                if tensor.dtype not in FLOATS:
                    raise UnsupportedError(f"{key}: a change must be floating-point, not {tensor.dtype}.")
            copies = tuple(InMemory(tensor.detach().cpu().clone()) for tensor in given)
            try:
                delta = LowRank(*copies) if len(copies) == 2 else Dense(copies)
            except MismatchError as error:
                raise MismatchError(f"{key}: {error}") from None
            terms[key] = (Term(1.0, delta),)
            sources.update({f"{key}:{part}": copy for part, copy in enumerate(copies)})
        record = ModelRecord(name, fingerprint=fingerprint(sources))
        return cls(terms, Provenance.of(Origin(name, "given as tensors", tuned=record)))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        verify: bool = True,
    ) -> "TaskVector":
        """A saved vector, from a folder or a Hub id. Its file is mapped; nothing is read until used.

        With `verify` each tensor's checksum is checked when it is first used.
        """
        from hf_taskvec.files.vector_format import load

        return load(folder, revision=revision, token=token, verify=verify)

    def save(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        reference: bool = False,
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
    ) -> dict[str, float]:
        """Write the vector to a folder: `taskvec.json`, which a person can read, and safetensors files.

        Factors are stored as factors. Dense differences are stored losslessly: in the smallest dtype in which they
        are exact, else as high and low parts. A `dtype` stores them in that dtype instead.

        Args:
            dtype: a dtype to round dense changes to.
            reference: store no tensors, only the ids, revisions and fingerprints of what the vector is made of. A
                reference to a model in a folder stores that folder's path, so it is of use on this machine only.
            overwrite: replace a task vector that is already in the folder.
            max_shard_size: the largest size of one file.

        Returns:
            The relative error of each parameter that the chosen `dtype` cannot hold exactly (empty when lossless).
        """
        from hf_taskvec.files.vector_format import save

        return save(
            self,
            folder,
            dtype=None if dtype is None else parse_dtype(dtype),
            reference=reference,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
        )

    # Using it.

    def apply(
        self,
        base: str | Path,
        save_to: str | Path,
        *,
        scale: float = 1.0,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int | str | None = None,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        overwrite: bool = False,
        strict_base: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        progress: bool | None = None,
    ) -> Path:
        """Write `base + scale * vector` as a complete model folder, streamed: no model is ever in memory.

        Every element is accumulated in fp64 and rounded once (see `arithmetic.Sum` for where fp32 is enough). The folder appears under its name when it
        is complete; a run that was interrupted is resumed by calling it again. Under `accelerate launch` the processes
        share the work and write the same bytes as one would.

        Args:
            base: a Hub id or a folder. It may be another model than the vector's own base, of the same architecture.
            save_to: the folder to write.
            scale: λ.
            dtype: of the result; by default that of each of the base's tensors.
            max_shard_size: e.g. `"5GB"`; by default the base's own files.
            device: where to compute, e.g. `"cuda"`.
            threads: how many threads write, each with 10 to 15 MB of its own (more where a single row of a tensor has
                more than half a million elements); by default as many as torch uses, but no more than 16.
            overwrite: replace an earlier output of `apply`.
            strict_base: refuse a base that is not the one the vector was made from.
            revision, token: for Hub ids, as in transformers.
            progress: show a progress bar; by default on a terminal.
        """
        from hf_taskvec.application.to_checkpoint import apply

        return apply(
            self,
            base,
            save_to,
            scale=scale,
            dtype=dtype,
            max_shard_size=max_shard_size,
            device=device,
            threads=threads,
            overwrite=overwrite,
            strict_base=strict_base,
            revision=revision,
            token=token,
            progress=progress,
        )

    def edit(
        self, model: torch.nn.Module, scale: float = 1.0, *, merge: bool = True, original: str | Path | None = None
    ) -> "Edit":
        """Put the vector on a live model, and get a handle to move λ and to undo it.

        `edit.set_scale(x)` moves to another λ, always from the untouched original; `edit.restore()` brings the model
        back bit for bit; `edit.keep()` leaves it as it is.

        Args:
            model: a plain, offloaded (`device_map`) or PEFT-wrapped model.
            scale: λ.
            merge: write into the weights. With `False` the vector, which must be low-rank, is attached beside them: a λ
                costs nothing, each row of a batch may have its own (`edit.set_row_scales`), quantised bases work.
            original: a folder or Hub id that the model was loaded from, to re-read the weights from instead of keeping
                a copy of them. (What is offloaded to disk is re-read from there anyway.)

        Not supported, because not tested: models wrapped by DistributedDataParallel or `torch.compile`, or compiled in
        place by `model.compile()`.
        """
        from hf_taskvec.application.to_live_model import edit

        return edit(self, model, scale, merge, original)

    def applied_to(
        self, model: torch.nn.Module, scale: float = 1.0, *, merge: bool = True, original: str | Path | None = None
    ) -> "AbstractContextManager[Edit]":
        """A `with` block in which the model is edited; afterwards it is as before, bit for bit, whatever happened.

        The arguments are those of `edit`. An edit that was made inside and is still open ends with the block.
        """
        from hf_taskvec.application.to_live_model import applied_to

        return applied_to(self, model, scale, merge, original)

    def to_adapter(
        self,
        folder: str | Path,
        base_model_name_or_path: str | Path | None = None,
        *,
        base: str | Path | None = None,
        dense: str = "refuse",
        uniform_rank: bool = False,
        dtype: torch.dtype | str = torch.float32,
        overwrite: bool = False,
        scale: float = 1.0,
    ) -> Path:
        """Export the vector as a PEFT adapter: at weight 1, the adapter *is* the vector (times `scale`).

        Args:
            folder: the folder to write.
            base_model_name_or_path: the base that the adapter names; by default the vector's own, if that came from the
                Hub, else none.
            base: a folder or Hub id of the base, to check that the vector fits, and for `dense="save"`; by default
                `base_model_name_or_path`.
            dense: what to do with changes that are not low-rank (norms, biases, embeddings). PEFT can carry them only
                as whole values: `"save"` stores base + change (then the adapter cannot be scaled or negated),
                `"drop"` leaves them out, `"refuse"` raises and names them.
            uniform_rank: pad all factors to one rank, as some serving engines want it.
            dtype: of the stored factors.
            overwrite: replace an earlier export in the folder (never an adapter that was trained there).
            scale: λ.
        """
        from hf_taskvec.application.to_adapter import to_adapter

        return to_adapter(
            self,
            folder,
            base_model_name_or_path,
            base=base,
            dense=dense,
            uniform_rank=uniform_rank,
            dtype=parse_dtype(dtype),
            overwrite=overwrite,
            scale=scale,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        base: str | Path | None = None,
        scale: float = 1.0,
        report: "UnlearningReport | str | Path | None" = None,
        private: bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
        token: str | bool | None = None,
    ) -> "Pushed":
        """Push the vector to the Hub, with its card, in one commit. `TaskVector.load(repo_id)` brings it back.

        Args:
            base: push the model `base + scale * vector` instead, streamed: no model is ever in memory.
            scale: λ.
            report: of a sweep of this vector; the card shows its table and plot.
            private, revision, create_pr, commit_message, token: as in transformers.
        """
        from hf_taskvec.publishing.push import push_merged, push_vector

        options: dict[str, Any] = {
            "report": report,
            "private": private,
            "revision": revision,
            "create_pr": create_pr,
            "commit_message": commit_message,
            "token": token,
        }
        if base is not None:
            return push_merged(self, base, repo_id, scale=scale, **options)
        return push_vector(self if scale == 1.0 else self * scale, repo_id, **options)

    # The mapping.

    def __getitem__(self, name: str) -> tuple[Term, ...]:
        try:
            return self._terms[name]
        except KeyError:
            raise MissingNameError(
                f"the task vector has no parameter {name!r}.{did_you_mean(name, self._terms)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._terms

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)

    # A vector is a value that holds large tensors: it is compared by what it stands for, its terms in any order.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskVector) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def _value(self) -> frozenset[tuple[str, frozenset[Term]]]:
        return frozenset((name, frozenset(terms)) for name, terms in self._terms.items())

    # The algebra.

    __array_ufunc__ = None  # so that numpy's numbers, as in `np.linspace(0, 1, 11)[3] * v`, leave the product to us

    def __add__(self, other: object) -> "TaskVector":
        if isinstance(other, numbers.Real) and other == 0:  # the start of sum([...])
            return self
        if not isinstance(other, TaskVector):
            return NotImplemented
        names = dict.fromkeys([*self._terms, *other._terms])
        terms = {n: (*self._terms.get(n, ()), *other._terms.get(n, ())) for n in names}
        return TaskVector(terms, self._provenance.plus(other._provenance))

    __radd__ = __add__

    def __mul__(self, scale: object) -> "TaskVector":
        if not isinstance(scale, numbers.Real):
            return NotImplemented
        weight = _finite(scale)
        terms = {n: [Term(t.weight * weight, t.delta) for t in each] for n, each in self._terms.items()}
        return TaskVector(terms, self._provenance.scaled(weight))

    __rmul__ = __mul__

    def __truediv__(self, scale: object) -> "TaskVector":
        if not isinstance(scale, numbers.Real):
            return NotImplemented
        if scale == 0:
            raise BadValueError("a task vector cannot be divided by 0.")
        return self * (1.0 / _finite(scale))

    def __neg__(self) -> "TaskVector":
        return self * -1.0

    def __pos__(self) -> "TaskVector":
        return self

    def __sub__(self, other: object) -> "TaskVector":
        if not isinstance(other, TaskVector):
            return NotImplemented
        return self + -other

    def scale(
        self, scales: float | Mapping[Pattern, float] | Callable[[str], float], default: float = 1.0
    ) -> "TaskVector":
        """The vector with each parameter scaled by a number of its own.

        Args:
            scales: one number; a mapping from patterns (glob strings or compiled regular expressions) to numbers, of
                which the first that matches counts; or a function from a parameter's name to a number.
            default: for parameters that no pattern matches.
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
            matched = {pattern: set(self._matching(pattern)) for pattern in scales}
            factors = {}
            for name in self:
                found = (scales[pattern] for pattern, names in matched.items() if name in names)
                factors[name] = _finite(next(found, default))
            by = {_text(pattern): _finite(scale) for pattern, scale in scales.items()}
            described = {"by": by, "default": None if default == 1.0 else _finite(default)}
        terms = {n: [Term(t.weight * factors[n], t.delta) for t in each] for n, each in self._terms.items()}
        return TaskVector(terms, self._provenance.through("scale", **described))

    def filter(
        self,
        include: Pattern | Iterable[Pattern] | None = None,
        exclude: Pattern | Iterable[Pattern] | None = None,
    ) -> "TaskVector":
        """The vector restricted to some parameters, by glob strings or compiled regular expressions.

        >>> import torch
        >>> v = TaskVector.from_tensors({"mlp.w": torch.ones(2), "attn.w": torch.ones(2)})
        >>> list(v.filter(include="mlp.*"))
        ['mlp.w']
        """
        chosen = set(self) if include is None else {n for p in _patterns(include) for n in self._matching(p)}
        for pattern in _patterns(exclude):
            chosen -= set(self._matching(pattern))
        terms = {name: each for name, each in self._terms.items() if name in chosen}
        described = {
            "include": [_text(p) for p in _patterns(include)] or None,
            "exclude": [_text(p) for p in _patterns(exclude)] or None,
        }
        return TaskVector(terms, self._provenance.through("filter", **described))

    def _matching(self, pattern: Pattern) -> list[str]:
        if isinstance(pattern, str):
            names = fnmatch.filter(self, pattern) if pattern not in self else [pattern]
        else:
            names = [name for name in self if pattern.search(name)]
        if not names:
            raise MissingNameError(
                f"the pattern {_text(pattern)!r} matches none of the vector's {len(self)} parameters"
                f" ({some(self, 2)}).{did_you_mean(_text(pattern), self)}"
            )
        return names

    def compress(
        self,
        *,
        rank: int | None = None,
        energy: float | None = None,
        tolerance: float | None = None,
        dtype: torch.dtype | str = torch.float32,
        exact: bool | None = None,
    ) -> "TaskVector":
        """The vector with every matrix approximated at low rank; biases and norms stay as they are.

        Give one of `rank`, `energy` (the share of the squared norm to keep) and `tolerance` (the relative error to
        allow). `discarded` of the result tells the share of the squared norm that was lost, for each parameter.

        Args:
            dtype: of the new factors.
            exact: for large dense matrices: a randomised approximation by default, the exact one with `True`.
        """
        target = Target(rank, energy, tolerance)
        terms: dict[str, tuple[Term, ...]] = {}
        discarded = {}
        for name, each in self._terms.items():
            if len(each[0].delta.shape) != 2:
                terms[name] = each
                continue
            result = compress(name, each, target, parse_dtype(dtype), exact)
            terms[name], discarded[name] = result.terms, result.discarded
        options = {"dtype": None if parse_dtype(dtype) == torch.float32 else str(dtype), "exact": exact}
        provenance = self._provenance.through("compress", rank=rank, energy=energy, tolerance=tolerance, **options)
        return TaskVector(terms, provenance, discarded)

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
        """After `compress`: the share of each matrix's squared norm that was discarded."""
        return dict(self._discarded)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the whole expression and of what it reads: equal only for vectors that do the same."""
        digest = hashlib.sha256()
        for name in sorted(self):
            for term in self[name]:
                digest.update(f"{name}|{term.weight!r}|{describe(term.delta)}\n".encode())
        return digest.hexdigest()

    def named(self, name: str) -> "TaskVector":
        """The same vector under a label of its own."""
        return TaskVector(self._terms, self._provenance.renamed(name), self._discarded)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return self[name][0].delta.shape

    def rank(self, name: str) -> int:
        """The rank of a parameter's change as represented: the sum of its factors' ranks, or the full rank."""
        shape = self.shape(name)
        held = sum(term.delta.rank for term in self[name])
        return min(held, *shape) if len(shape) > 1 else 1

    @property
    def is_low_rank(self) -> bool:
        """Whether every matrix is held as factors."""
        return all(
            isinstance(term.delta, LowRank)
            for terms in self._terms.values()
            for term in terms
            if len(term.delta.shape) > 1
        )

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every stored tensor that the vector reads when used, each once."""
        roots = (r for terms in self._terms.values() for t in terms for s in t.delta.sources for r in s.roots)
        return tuple(dict.fromkeys(roots))

    @property
    def nbytes(self) -> int:
        """The bytes of all stored tensors that the vector reads when used."""
        return sum(source.nbytes for source in self.sources)

    def dense(self, name: str, dtype: torch.dtype | str = torch.float32) -> torch.Tensor:
        """A parameter's change as one tensor, rounded once."""
        out = torch.empty(self.shape(name), dtype=parse_dtype(dtype))
        Sum(self.shape(name), self[name]).into(out, name)
        return out

    # Measures, from the factors.

    def norm(self, name: str | None = None) -> float:
        """The Frobenius norm of the whole vector, or of one parameter's change."""
        if name is not None:
            return measures.norm(name, self[name])
        return math.sqrt(sum(value**2 for value in self.norms().values()))

    def norms(self) -> dict[str, float]:
        """The Frobenius norm of each parameter's change."""
        return {name: measures.norm(name, terms) for name, terms in self._terms.items()}

    def dot(self, other: "TaskVector", name: str | None = None) -> float:
        """The inner product with another vector, in total or for one parameter."""
        if name is not None:
            check_shape(name, self.shape(name), other.shape(name))
            return measures.dot(name, self[name], other[name])
        return math.fsum(self.dots(other).values())

    def dots(self, other: "TaskVector") -> dict[str, float]:
        """The inner product with another vector for each parameter that both change."""
        common = [name for name in self if name in other]
        for name in common:
            check_shape(name, self.shape(name), other.shape(name))
        return {name: measures.dot(name, self[name], other[name]) for name in common}

    def cosine(self, other: "TaskVector", name: str | None = None) -> float:
        """The cosine with another vector, in total or for one parameter. Raises for a vector of norm 0."""
        return _cosine(self.dot(other, name), self.norm(name), other.norm(name), name or "the vector")

    def cosines(self, other: "TaskVector") -> dict[str, float]:
        """The cosine with another vector for each parameter that both change."""
        return {n: _cosine(d, self.norm(n), other.norm(n), n) for n, d in self.dots(other).items()}

    def __repr__(self) -> str:
        low = sum(1 for name in self if all(isinstance(t.delta, LowRank) for t in self[name]))
        ranks = sorted({self.rank(n) for n in self if all(isinstance(t.delta, LowRank) for t in self[n])})
        kinds = []
        if low:
            span = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"
            kinds.append(f"{low} low-rank (rank {span})")
        if len(self) - low:
            kinds.append(f"{len(self) - low} dense")
        lines = [
            f"TaskVector({self.expression})",
            f"  {len(self)} parameters" + (f": {', '.join(kinds)}" if kinds else "") + f"; {_size(self.nbytes)}",
        ]
        lines += [f"  {origin}" for origin in self._provenance.origins]
        return "\n".join(lines)


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


def _patterns(patterns: Pattern | Iterable[Pattern] | None) -> tuple[Pattern, ...]:
    if patterns is None:
        return ()
    return (patterns,) if isinstance(patterns, str | re.Pattern) else tuple(patterns)


def _text(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError
