"""Rows of added tokens -> the rows that a model has for them.

A vector of `vocabulary="union"` knows the rows of added tokens by their tokens. The tokenizer of the model that it is
applied to says which rows these are, after it was given the tokens that it lacks. What the model had in the row of a
token that is new to it stood for nothing, and counts as zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra.deltas import Delta, Dense, Rows
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.algebra.token_rows import TokenRow, rows_of_tokens
from hf_taskvec.errors import BadValueError, MismatchError, some
from hf_taskvec.models.added_tokens import Tokenizer, add_to, open_tokenizer, with_tokens
from hf_taskvec.models.checkpoint import Checkpoint
from hf_taskvec.models.layout import layout_of_model
from hf_taskvec.models.live_model import live_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class PlacedRows:
    """A vector whose rows of tokens are rows of the model's weights, and the tokenizer that belongs to the result.

    Args:
        vector (`TaskVector`):
            The vector.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            None if no row is one of a token: then the model's own belongs to the result.
        ids (`Mapping[str, int]`):
            Token -> its row.
        cleared (`Mapping[str, tuple[int, ...]]`):
            Weight -> the rows that it has for tokens that are new to the model.

    """

    vector: TaskVector
    tokenizer: "PreTrainedTokenizerBase | None"
    ids: Mapping[str, int]
    cleared: Mapping[str, tuple[int, ...]]

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def place_rows(
    vector: TaskVector, checkpoint: Checkpoint, tokenizer: Tokenizer | None, token: str | bool | None
) -> PlacedRows:
    """The vector for a checkpoint, which gets more rows if it has too few.

    Args:
        vector (`TaskVector`):
            What is to be applied, its λ included.
        checkpoint (`Checkpoint`):
            The model.
        tokenizer (`Any`, *optional*):
            Its tokenizer; by default the one beside it.
        token (`str` or `bool`, *optional*):
            For private repositories.

    Raises:
        `MissingFileError`: If there is no tokenizer.
        `BadValueError`: If one is given that nothing is done with.
        `MismatchError`: If the tokenizer does not take a token, or the model has no such weight.
    """
    rows = rows_of_tokens(vector)
    if not rows:
        if tokenizer is not None:
            raise BadValueError("tokenizer= is for vectors that were extracted with vocabulary='union'.")
        return PlacedRows(vector, None, {}, {})
    opened = open_tokenizer(tokenizer, checkpoint.folder, token)
    tokens = dict.fromkeys(row.token for row in rows.values())
    grown, ids, new = with_tokens(opened, list(tokens), vector.provenance.added_tokens)
    shapes = {name: source.shape for name, source in checkpoint.tensors.items()}
    sizes = _grown_rows(rows, shapes, checkpoint.layout.is_vocabulary, ids, checkpoint.where)
    terms = _placed_terms(vector, rows, sizes, ids)
    for name, size in sizes.items():
        height, *rest = shapes[name]
        if size > height and not terms[name]:  # nothing else changes a weight that has to be as high as the others
            nothing = torch.zeros(size - height, *rest, device="cpu")
            terms[name] = [Term(1.0, Rows(range(height, size), Dense((InMemory(nothing),)), size))]
    cleared = {name: tuple(ids[each] for each in new if ids[each] < shapes[name][0]) for name in sizes}
    return PlacedRows(_with_terms(vector, terms), grown, ids, {name: each for name, each in cleared.items() if each})


def add_tokens(vector: TaskVector, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> TaskVector:
    """Give a live model and its tokenizer the tokens that a vector of `vocabulary="union"` has rows for.

    Both are changed: the tokenizer gets the tokens that it lacks, the model a row of zeros for each of them.

    Args:
        vector (`TaskVector`):
            The vector.
        model (`PreTrainedModel`):
            The model that it is to be put on.
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.

    Returns:
        `TaskVector`: The vector for this model, which `edit` and `applied_to` take.

    Raises:
        `BadValueError`: If the vector has no rows of tokens.
        `MismatchError`: If the tokenizer does not take a token, or the model has no such weight.

    Example:
        ```python
        v = TaskVector.from_finetuned("me/base", "me/tuned", vocabulary="union")
        with add_tokens(v, model, tokenizer).applied_to(model):
            ...
        ```

    """
    rows = rows_of_tokens(vector)
    if not rows:
        raise BadValueError("no row of this vector is one of an added token. It can be put on a model as it is.")
    tokens = dict.fromkeys(row.token for row in rows.values())
    said = vector.provenance.added_tokens
    _, ids, new = with_tokens(tokenizer, list(tokens), said)  # refuses, before anything is changed
    is_vocabulary = layout_of_model(model).is_vocabulary
    where = f"the live {type(model).__name__}"
    before = {name: weight.shape for name, weight in live_weights(model).items()}
    sizes = _grown_rows(rows, before, is_vocabulary, ids, where)
    add_to(tokenizer, new, said)
    if (size := max(sizes.values())) > max(before[name][0] for name in sizes):
        model.resize_token_embeddings(size, mean_resizing=False)
    weights = live_weights(model)
    cleared = [ids[each] for each in new]
    with torch.no_grad():
        for name in sizes:
            value = weights[name].value().clone()
            value[cleared] = 0
            weights[name].write(value)
    return _with_terms(vector, _placed_terms(vector, rows, {name: weights[name].shape[0] for name in sizes}, ids))


def _grown_rows(
    rows: Mapping[str, TokenRow],
    shapes: Mapping[str, tuple[int, ...]],
    is_vocabulary: Any,
    ids: Mapping[str, int],
    where: str,
) -> dict[str, int]:
    """How many rows each weight over the vocabulary gets: those with rows of tokens, and all that are as high."""
    missing = [row.weight for row in rows.values() if row.weight not in shapes]
    if missing:
        raise MismatchError(
            f"{where} does not have {some(dict.fromkeys(missing))}, of which this vector changes rows. Is its head "
            "tied, or of another class?"
        )
    high = {shapes[row.weight][0] for row in rows.values()}
    every = [name for name, shape in shapes.items() if shape and shape[0] in high and is_vocabulary(name)]
    return {name: max(shapes[name][0], *(number + 1 for number in ids.values())) for name in every}


def _placed_terms(
    vector: TaskVector, rows: Mapping[str, TokenRow], sizes: Mapping[str, int], ids: Mapping[str, int]
) -> dict[str, list[Term]]:
    """The terms of each weight over the vocabulary: of the rows that the model has, then of those of tokens."""
    terms: dict[str, list[Term]] = {}
    for name, size in sizes.items():
        own = vector[name].terms if name in vector else ()
        terms[name] = [Term(each.weight, _in_taller(each.delta, size)) for each in own]
    for name, row in rows.items():
        for term in vector[name].terms:
            placed = Rows((ids[row.token],), term.delta, sizes[row.weight])
            terms[row.weight].append(Term(term.weight, placed))
    return terms


def _in_taller(delta: Delta, size: int) -> Delta:
    """The same change of a weight that has more rows."""
    rows = delta.shape[0]
    if rows == size:
        return delta
    return Rows(delta.index, delta.inner, size) if isinstance(delta, Rows) else Rows(range(rows), delta, size)


def _with_terms(vector: TaskVector, terms: Mapping[str, list[Term]]) -> TaskVector:
    """The vector with other terms of some weights, and none of tokens."""
    rows = rows_of_tokens(vector)
    left = {name: list(change.terms) for name, change in vector.items() if name not in rows}
    return TaskVector({**left, **terms}, vector.provenance)
