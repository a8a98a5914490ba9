"""How well a model knows a task: the share of a book's held-out tokens that it predicts."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.texts.books import Book
from hf_taskvec.training.token_blocks import IGNORED, TokenBlocks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOutBlocks:
    """A book's held-out text in two parts: one to choose λ by, the other to report."""

    validation: TokenBlocks = field(repr=False)
    test: TokenBlocks = field(repr=False)


def held_out(book: Book, tokenizer: "PreTrainedTokenizerBase", length: int) -> HeldOutBlocks:
    """The held-out sections of a book as blocks: every other one for validation."""
    texts = [book.text[s.start : s.end].strip() for s in book.sections if s.split == "held_out"]
    if len(texts) < 2:
        raise BadValueError(
            f"book {book.name!r} has {len(texts)} held-out section(s), and needs two: one to choose λ by, one to "
            "report. Use smaller sections, a larger held-out share or a longer book."
        )
    return HeldOutBlocks(*(_blocks(texts[half::2], tokenizer, length) for half in (0, 1)))


def _blocks(texts: list[str], tokenizer: Any, length: int) -> TokenBlocks:
    """Every token, in blocks of at most `length`; the shorter ones are filled up with what does not count."""
    rows = []
    for text in texts:
        ids = tokenizer(text, verbose=False)["input_ids"]
        rows += [ids[start : start + length] for start in range(0, len(ids), length)]
    rows = [row for row in rows if len(row) > 1]
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = labels[number, : len(row)] = torch.tensor(row)
    return TokenBlocks(ids, labels)


@torch.inference_mode()
def token_accuracy(model: Any, blocks: TokenBlocks, batch_size: int = 16) -> float:
    """The share of next tokens that are the model's first choice."""
    right = total = 0
    for start in range(0, len(blocks), batch_size):
        ids, labels = blocks.ids[start : start + batch_size], blocks.labels[start : start + batch_size, 1:]
        guess = model(input_ids=ids.to(model.device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
        counted = labels != IGNORED
        right += int((guess == labels)[counted].sum())
        total += int(counted.sum())
    return right / max(1, total)
