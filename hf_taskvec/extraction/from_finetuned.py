"""A full fine-tune and its base -> task vector."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hf_taskvec.algebra.deltas import Delta, Dense, Difference, Rows
from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.provenance import Origin, Provenance
from hf_taskvec.algebra.sources import RowsOf, Source, runs_of_elements
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.algebra.tiles import TILE
from hf_taskvec.algebra.token_rows import quoted
from hf_taskvec.errors import BadValueError, MismatchError, TaskVectorWarning, UnsupportedError, some
from hf_taskvec.extraction.token_differences import token_changes, tokens_between
from hf_taskvec.filenames import MODEL_CARD
from hf_taskvec.models.added_tokens import AddedTokens
from hf_taskvec.models.checkpoint import Checkpoint, open_checkpoint
from hf_taskvec.models.companions import TOKENIZER_FILES
from hf_taskvec.models.layout import Layout, is_peft_model
from hf_taskvec.models.lineage import stated_origin
from hf_taskvec.models.live_model import live_checkpoint
from hf_taskvec.models.sharded_weights import without_wrappers
from hf_taskvec.progress import progress_bar

#: what to do when base and fine-tune differ in their number of embedding rows, or in what a row stands for
VocabularyChoice = Literal["truncate", "extend", "union"]
_VOCABULARY: tuple[str, ...] = get_args(VocabularyChoice)
#: what to do when the heads of base and fine-tune differ
HeadsChoice = Literal["exclude", "match"]
_HEADS: tuple[str, ...] = get_args(HeadsChoice)
_WHICH_HEADS = "Pass heads='exclude' to leave all heads out, or heads='match' to compare those that fit each other."


def from_finetuned(
    base: str | Path | torch.nn.Module,
    tuned: str | Path | torch.nn.Module,
    *,
    name: str | None = None,
    base_revision: str | None = None,
    tuned_revision: str | None = None,
    vocabulary: VocabularyChoice | None = None,
    heads: HeadsChoice | None = None,
    tokenizers: tuple[Any, Any] | None = None,
    stream: bool = False,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> TaskVector:
    """See `TaskVector.from_finetuned`."""
    for what, choice, choices in (("vocabulary", vocabulary, _VOCABULARY), ("heads", heads, _HEADS)):
        if choice not in (None, *choices):
            raise BadValueError(f"{what}={choice!r} is not one of {', '.join(map(repr, choices))}.")
    by_token = vocabulary == "union"
    if tokenizers is not None and (not by_token or len(tokenizers) != 2):
        raise BadValueError("tokenizers= is a pair, the base's and the fine-tune's, for vocabulary='union'.")
    beside = [MODEL_CARD, *(TOKENIZER_FILES if by_token else ())]
    old = open_model(base, base_revision, token, beside, stream)
    new = open_model(tuned, tuned_revision, token, beside, stream)
    added = AddedTokens(frozenset(), {}, {})
    if by_token:
        added = tokens_between((base, tuned), old, new, tokenizers or (None, None), token)
    whole_base, whole_tuned = old, new
    if heads is not None:
        old, new = _without_heads(old, new, heads, vocabulary)
    _check_names(old, new)
    _warn_if_swapped(old, new)
    _check_constants(old, new)
    _check_changed(old, new)
    is_live = isinstance(base, torch.nn.Module) or isinstance(tuned, torch.nn.Module)
    terms: dict[str, list[Term]] = {}
    # Of files nothing is read here; of live models everything is, since they may change later.
    for key, source in progress_bar(old.tensors.items(), "Extracting", progress if is_live else False):
        for changed, deltas in _changes(key, source, new.tensors[key], vocabulary, added, new.layout):
            terms[changed] = [
                Term(1.0, delta) for each in deltas if (delta := each.owned(changed) if is_live else each)
            ]
    how = "full fine-tune" + (f", vocabulary={vocabulary!r}" if vocabulary else "")
    how += f", heads={heads!r}" if heads else ""
    base_record, tuned_record = whole_base.record(), whole_tuned.record()  # whatever is left out of the vector
    if isinstance(base, torch.nn.Module):  # everything was read above, and may change later
        base_record = replace(base_record, sha256=whole_base.full_digest)
    said = tuple((quoted(token), said) for token, said in added.said.items())
    origin = Origin(name or label_for(new.name), how, base_record, replace(tuned_record, weights=None, added=said))
    return TaskVector(terms, Provenance.of(origin))


def open_model(
    model: str | Path | torch.nn.Module,
    revision: str | None = None,
    token: str | bool | None = None,
    companions: list[str] | None = None,
    stream: bool = False,
) -> Checkpoint:
    """The weights of a Hub id, a folder or a live model, under canonical names; see `open_checkpoint`."""
    if isinstance(model, str | Path):
        return open_checkpoint(model, revision, token, companions, stream)
    model = without_wrappers(model)
    if is_peft_model(model):
        raise UnsupportedError(
            "the model is wrapped by PEFT. Use TaskVector.from_adapter(model) for its adapter, or "
            "model.merge_and_unload() first for the merged weights."
        )
    if not isinstance(model, torch.nn.Module):
        raise BadValueError(f"expected a Hub id, a folder or a live model, not {type(model).__name__}.")
    return live_checkpoint(model)


def _heads_of(base: Checkpoint, tuned: Checkpoint) -> frozenset[str]:
    """The parameters that belong to a task: those that a body does not have, or one of two classes alone has."""
    one, other = base.layout, tuned.layout
    heads = one.head | other.head
    return heads | (one.shapes.keys() ^ other.shapes.keys()) if one.architecture != other.architecture else heads


def _without_heads(
    base: Checkpoint, tuned: Checkpoint, heads: HeadsChoice, vocabulary: VocabularyChoice | None
) -> tuple[Checkpoint, Checkpoint]:
    """The two models without their heads, or without those that do not fit each other."""

    def fit(name: str) -> bool:
        if name not in base.tensors or name not in tuned.tensors:
            return False
        one, other = base.tensors[name].shape, tuned.tensors[name].shape
        return one == other or (vocabulary is not None and tuned.layout.is_vocabulary(name) and one[1:] == other[1:])

    left_out = {name for name in _heads_of(base, tuned) if heads == "exclude" or not fit(name)}
    one, other = (
        replace(model, tensors={name: source for name, source in model.tensors.items() if name not in left_out})
        for model in (base, tuned)
    )
    return one, other


def _check_names(base: Checkpoint, tuned: Checkpoint) -> None:
    missing = [name for name in base.tensors if name not in tuned.tensors]
    extra = [name for name in tuned.tensors if name not in base.tensors]
    if not missing and not extra:
        return
    total, common = len(base.tensors), len(base.tensors) - len(missing)
    models = f"{base.where} ({base.layout.architecture}) and {tuned.where} ({tuned.layout.architecture})"
    if common * 2 < total:
        raise MismatchError(
            f"{models} are different architectures: {common} of {total} parameter names match (the base has "
            f"{some(base.tensors, 1)}, the fine-tune {some(tuned.tensors, 1)}). Give the base it was fine-tuned from."
        )
    parts = []
    if missing:
        parts.append(f"missing in the fine-tune: {some(missing)}")
    if extra:
        parts.append(f"missing in the base: {some(extra)}")
    if _heads_of(base, tuned).issuperset([*missing, *extra]) and base.layout.architecture != tuned.layout.architecture:
        raise MismatchError(f"{models} have different heads ({'; '.join(parts)}). {_WHICH_HEADS}")
    raise MismatchError(
        f"{models} do not have the same parameters ({'; '.join(parts)}). Save the fine-tune again whole, "
        "and with the base's tie_word_embeddings setting."
    )


def _warn_if_swapped(base: Checkpoint, tuned: Checkpoint) -> None:
    """Warn if the base's own files say that it was made from the fine-tune, and not the other way round as well."""
    evidence = stated_origin(base, tuned)
    if evidence and not stated_origin(tuned, base):
        warnings.warn(
            f"{base.where}, given as the base, was made from {tuned.where}, as its {evidence} says. A task vector is "
            "τ = tuned − base; if the two were swapped, its sign is wrong: give the base first.",
            TaskVectorWarning,
            stacklevel=4,
        )


def _check_constants(base: Checkpoint, tuned: Checkpoint) -> None:
    """Refuse models that differ in an integer buffer: it cannot be subtracted, and applying keeps that of the base."""
    for name in base.constants.keys() | tuned.constants.keys():
        one, other = base.constants.get(name), tuned.constants.get(name)
        if one is None or other is None or not torch.equal(one.read(), other.read()):
            raise MismatchError(
                f"{name}: {base.where} and {tuned.where} have different tables of integers there, which cannot be "
                "subtracted, so the vector would not give the fine-tune. Give the base that it was fine-tuned from, or "
                "save the fine-tune again with the base's table."
            )


def _check_changed(base: Checkpoint, tuned: Checkpoint) -> None:
    """Refuse a fine-tune that is its base.

    Fingerprints are made of samples, and cannot be compared across dtypes. Where they do not decide, weights are
    compared until one differs.
    """
    pairs = [(source, tuned.tensors[name]) for name, source in base.tensors.items()]
    if base.sampled_fingerprint != tuned.sampled_fingerprint and all(a.dtype == b.dtype for a, b in pairs):
        return
    if all(a == b or _equal(a, b) for a, b in pairs):
        raise BadValueError(
            f"{tuned.where} is identical to its base {base.where}: every parameter is equal, so the vector would be "
            "zero. Was the right checkpoint given?"
        )


def _equal(a: Source, b: Source) -> bool:
    if a.shape != b.shape:
        return False
    pair = (a.readable(), b.readable())
    runs = zip(*(runs_of_elements(each, TILE) for each in pair), strict=True)
    return all(torch.equal(one.double(), other.double()) for one, other in runs)


def _changes(
    name: str,
    base: Source,
    tuned: Source,
    vocabulary: VocabularyChoice | None,
    added: AddedTokens,
    layout: Layout,
) -> Iterable[tuple[str, Sequence[Delta]]]:
    """The changes of one weight, under the names of the parameters that they are of."""
    if vocabulary == "union" and layout.is_vocabulary(name) and base.shape[1:] == tuned.shape[1:]:
        return token_changes(name, base, tuned, added)
    if base.shape == tuned.shape:
        return [(name, [Difference(base, tuned)])]
    return [(name, _resized(name, base, tuned, vocabulary, layout))]


def _resized(
    name: str, base: Source, tuned: Source, vocabulary: VocabularyChoice | None, layout: Layout
) -> tuple[Delta, ...]:
    """The change of an embedding to another number of rows."""
    if name in layout.head and not layout.is_vocabulary(name):
        raise MismatchError(
            f"{name}: the heads differ, {list(base.shape)} in the base and {list(tuned.shape)} in the fine-tune, as "
            f"those of other tasks do. {_WHICH_HEADS}"
        )
    if base.shape[1:] != tuned.shape[1:] or not layout.is_vocabulary(name):
        raise MismatchError(
            f"{name}: the base has shape {list(base.shape)}, the fine-tune {list(tuned.shape)}. Only input embeddings "
            "and heads may differ, in their number of rows. Give the base that the model was fine-tuned from, or the "
            "fine-tune as it was before its vocabulary was resized."
        )
    rows, new_rows = base.shape[0], tuned.shape[0]
    if vocabulary is None:
        raise MismatchError(
            f"{name}: the vocabulary sizes differ, {rows} in the base and {new_rows} in the fine-tune. Pass "
            "vocabulary='truncate' to compare the rows that both have, vocabulary='extend' to take the fine-tune's "
            "additional rows as well, or vocabulary='union' to know them by their tokens."
        )
    common = range(min(rows, new_rows))
    shared = Difference(RowsOf(base, common), RowsOf(tuned, common))
    if new_rows < rows:
        return (Rows(common, shared, rows),)
    if vocabulary == "truncate":
        return (shared,)
    added = range(rows, new_rows)
    return (Rows(common, shared, new_rows), Rows(added, Dense((RowsOf(tuned, added),)), new_rows))
