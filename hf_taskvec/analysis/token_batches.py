"""Text through live models: token rows, batches, and the models that they go through.

Rows are padded on the right: each position is then its own index, in any causal architecture.
"""

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from tqdm.auto import tqdm

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.models.layout import is_peft_model

if TYPE_CHECKING:
    from datasets import Dataset

Data: TypeAlias = "Dataset | Iterable[Sequence[int]] | Iterable[str] | torch.Tensor"
Rows = list[list[int]]
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Edited:
    """A model with a task vector on it, applied only while it is looked at: many fine-tunes, one model in memory.

    Args:
        model: the live base. It is as before, bit for bit, whenever nothing looks at it.
        vector: the change.
        scale: λ.
        merge: see `TaskVector.edit`.
    """

    model: torch.nn.Module
    vector: TaskVector
    scale: float = 1.0
    merge: bool = True


Subject = torch.nn.Module | Edited


def model_of(subject: Subject) -> Any:
    """The live module of a subject."""
    if isinstance(subject, Edited):
        check_vectors(subject.vector)
        subject = subject.model
    check_model(subject, "a live model, or Edited(model, vector)")
    return subject


def check_model(model: Any, needed: str = "a live model") -> None:
    """Refuse what is no live model, such as the name of one."""
    if not isinstance(model, torch.nn.Module):
        raise BadValueError(
            f"a forward pass needs {needed}, not {type(model).__name__}. Load it with "
            "AutoModelForCausalLM.from_pretrained()."
        )


def check_vectors(*vectors: Any) -> None:
    """Refuse what is no task vector, such as the name of one."""
    for vector in vectors:
        if not isinstance(vector, TaskVector):
            raise BadValueError(
                f"{vector!r} is not a task vector. TaskVector.load(...) reads a saved one, "
                "TaskVector.from_finetuned(base, tuned) makes one."
            )


@contextmanager
def looking_at(subject: Subject) -> Iterator[Any]:
    """The live model of a subject in evaluation mode, its vector applied; all put back afterwards."""
    model = model_of(subject)
    edited: AbstractContextManager[Any] = nullcontext()
    if isinstance(subject, Edited):
        edited = subject.vector.applied_to(model, subject.scale, merge=subject.merge)
    with edited, evaluating(model):
        yield model


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """A block in which the model has no dropout."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def token_rows(data: Data, tokenizer: Any = None, max_length: int | None = None, what: str = "the data") -> Rows:
    """Token ids, row by row, of a data set with `input_ids`, of token sequences, or of texts and their tokenizer.

    Padding that an `attention_mask` marks is left out. Rows are cut to `max_length`. What a tokenizer gives for several
    texts is a data set too.
    """
    if max_length is not None:
        check_whole("max_length", max_length)
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
                f"{what} has the columns {', '.join(map(str, item))}, but no input_ids. Tokenize it first, or give texts "
                "and tokenizer=."
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


def check_rows(rows: Rows, model: Any, what: str = "the data") -> None:
    """Refuse rows that the model cannot read: longer than its context, or with tokens that it does not have."""
    vocabulary = vocabulary_of(model)
    wrong = next((token for row in rows for token in row if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise BadValueError(
            f"{what} holds the token {wrong}, but the model has {vocabulary} tokens. Was it made with another tokenizer?"
        )
    # An architecture without a limit lacks it; GPT-2's n_positions is mapped to this name.
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, rows))
    if context is not None and longest > context:
        raise BadValueError(
            f"{what} has a row of {longest} tokens, but the model reads {context}. Pass max_length={context}, or cut it into "
            "shorter rows."
        )


def vocabulary_of(model: Any) -> int:
    """The number of tokens that a model tells apart."""
    return model.config.get_text_config().vocab_size


@dataclass(frozen=True)
class Batch:
    """Some rows, padded on the right. `first` is the number of the first of them."""

    first: int
    lengths: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def labels(self) -> torch.Tensor:
        """The tokens to predict; padding is not."""
        return self.input_ids.masked_fill(self.attention_mask == 0, -100)

    def inputs(self, model: Any) -> dict[str, torch.Tensor]:
        """What the model takes, on the device where it takes it."""
        device = model.get_input_embeddings().weight.device
        device = torch.device("cpu") if device.type == "meta" else device  # offloaded: its hook moves the rest
        return {"input_ids": self.input_ids.to(device), "attention_mask": self.attention_mask.to(device)}


def make_batch(rows: Rows, first: int = 0) -> Batch:
    """Rows side by side."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return Batch(first, lengths, ids, mask)


def batches(rows: Rows, batch_size: int, first: int = 0) -> Iterator[Batch]:
    """All rows, in their order."""
    for start in range(0, len(rows), batch_size):
        yield make_batch(rows[start : start + batch_size], first + start)


def summed_loss(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """The cross-entropy of a batch's next tokens added up (in fp32 or better), and how many they are."""
    logits = model(**batch.inputs(model), use_cache=False).logits[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    labels = batch.labels[:, 1:].to(logits.device)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, int((labels != -100).sum())


def mean_loss(model: Any, rows: Rows, batch_size: int) -> float:
    """The mean cross-entropy of a model's next tokens over all rows, in nats."""
    total, count = 0.0, 0
    for batch in batches(rows, batch_size):
        with torch.inference_mode():
            loss, tokens = summed_loss(model, batch)
        total += loss.item()
        count += tokens
    return total / count


def check_predictable(rows: Rows, what: str = "the data") -> None:
    """Refuse rows that hold no next token at all."""
    if all(len(row) < 2 for row in rows):
        raise BadValueError(f"{what} has rows of one token only, so there is no next token to predict.")


def check_whole(name: str, value: Any) -> None:
    """Refuse what is not a whole number."""
    if not isinstance(value, numbers.Integral):
        raise BadValueError(f"{name}={value!r} must be a whole number.")


def is_finite(value: Any) -> bool:
    """Whether it is a number, and neither NaN nor infinite."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def check_batch_size(batch_size: int) -> None:
    check_whole("batch_size", batch_size)
    if batch_size < 1:
        raise BadValueError(f"batch_size={batch_size}: a batch has at least one row.")


def skips_logits(model: Any) -> bool:
    """Whether the model can be asked for the logits of some positions only."""
    inner = model.get_base_model() if is_peft_model(model) else model
    return "logits_to_keep" in signature(inner.forward).parameters


def progress_bar(items: Iterable[_Item], what: str, progress: bool | None, total: int | None = None) -> "tqdm[_Item]":
    """A bar over items: by default on a terminal."""
    return tqdm(items, desc=what, total=total, disable=None if progress is None else not progress)
