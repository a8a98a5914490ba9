"""Text as rows of token ids: from data sets, token sequences, or texts and their tokenizer."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hf_taskvec.analysis.argument_checks import check_whole_number
from hf_taskvec.errors import BadValueError
from hf_taskvec.models.model_facts import context_length, vocabulary_size

if TYPE_CHECKING:
    from datasets import Dataset

#: What the analysis takes as text: a `datasets.Dataset` with `input_ids`, token-id sequences, or texts.
Data: TypeAlias = "Dataset | Iterable[Sequence[int]] | Iterable[str] | torch.Tensor"
#: Token ids, row by row.
TokenRows = list[list[int]]


def token_rows(data: Data, tokenizer: Any = None, max_length: int | None = None, what: str = "the data") -> TokenRows:
    """Token ids, row by row, of a data set with `input_ids`, of token sequences, or of texts and their tokenizer.

    Padding that an `attention_mask` marks is left out. Rows are cut to `max_length`. What a tokenizer gives for several
    texts is a data set too.
    """
    if max_length is not None:
        check_whole_number("max_length", max_length)
        if max_length < 2:
            raise BadValueError(f"max_length={max_length} leaves no next token to predict. Use 2 or more.")
    if isinstance(data, str):
        raise BadValueError(f"{what} is one text. Give a list of texts, or of token-id sequences.")
    if not isinstance(data, Iterable):
        raise BadValueError(f"{what} is a {type(data).__name__}. Give a list of texts, or of token-id sequences.")
    if is_columns(data):
        data = _rows_of(data, what)
    rows = []
    for number, item in enumerate(data):
        ids = _ids(item, tokenizer, what)[:max_length]
        if not ids:
            raise BadValueError(f"row {number} of {what} is empty: leave it out.")
        rows.append(ids)
    if not rows:
        raise BadValueError(f"{what} is empty: give at least one row of text.")
    return rows


def is_columns(data: Any) -> bool:
    """Whether the data comes by column, as a tokenizer gives it."""
    return isinstance(data, Mapping) and "input_ids" in data


def _rows_of(columns: Any, what: str) -> list[dict[str, Any]]:
    ids, mask = columns["input_ids"], columns.get("attention_mask")
    if len(ids) and _is_number(ids[0]):
        raise _one_sequence(what)
    if mask is None:
        return [{"input_ids": row} for row in ids]
    return [{"input_ids": row, "attention_mask": seen} for row, seen in zip(ids, mask, strict=True)]


def _is_number(item: Any) -> bool:
    return isinstance(item, numbers.Number) or (isinstance(item, torch.Tensor) and item.dim() == 0)


def _one_sequence(what: str) -> BadValueError:
    return BadValueError(
        f"{what} is one sequence of token ids. Give a list of sequences: [ids], if it is all there is."
    )


def _ids(item: Any, tokenizer: Any, what: str) -> list[int]:
    mask = None
    if isinstance(item, Mapping):
        if "input_ids" not in item:
            raise BadValueError(
                f"{what} has the columns {', '.join(map(str, item))}, but no input_ids. Tokenize it "
                "first, or give texts and tokenizer=."
            )
        item, mask = item["input_ids"], item.get("attention_mask")
    if isinstance(item, str):
        if tokenizer is None:
            raise BadValueError(f"{what} is text: pass the models' tokenizer=, or token ids.")
        item = tokenizer(item)["input_ids"]
    if _is_number(item):
        raise _one_sequence(what)
    ids = item.tolist() if isinstance(item, torch.Tensor) else list(item)
    if mask is not None:
        ids = [token for token, seen in zip(ids, mask, strict=True) if seen]
    if not all(isinstance(token, numbers.Integral) for token in ids):
        raise BadValueError(f"{what} must hold token ids (whole numbers), texts, or rows with input_ids.")
    return [int(token) for token in ids]


def check_rows(rows: TokenRows, model: Any, what: str = "the data") -> None:
    """Refuse rows that the model cannot read: longer than its context, or with tokens that it does not have."""
    vocabulary = vocabulary_size(model.config)
    wrong = next((token for row in rows for token in row if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise BadValueError(
            f"{what} holds the token {wrong}, but the model has {vocabulary} tokens. Was it made with another "
            "tokenizer?"
        )
    context = context_length(model.config)
    longest = max(map(len, rows))
    if context is not None and longest > context:
        raise BadValueError(
            f"{what} has a row of {longest} tokens, but the model reads {context}. Pass "
            f"max_length={context}, or cut it into shorter rows."
        )


def check_predictable(rows: TokenRows, what: str = "the data") -> None:
    """Refuse rows that hold no next token at all."""
    if all(len(row) < 2 for row in rows):
        raise BadValueError(f"{what} has rows of one token only, so there is no next token to predict.")
