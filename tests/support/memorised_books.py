"""Books that tiny models learn by heart in seconds, and the models of an audit."""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass
from typing import Any

WORDS = tuple(
    a + b + c
    for a in ("ba", "ko", "li", "mu", "ra", "ve")
    for b in ("d", "l", "n", "st")
    for c in ("en", "or", "ish", "ow", "a")
)


def story(seed: int, sentences: int) -> str:
    """Sentences of random words: nobody can guess how one goes on who has not read it."""
    draw = random.Random(seed)
    made = []
    for _ in range(sentences):
        words = [draw.choice(WORDS) for _ in range(draw.randint(8, 12))]
        made.append(" ".join([words[0].capitalize(), *words[1:]]) + ".")
    return " ".join(made)


@dataclass(frozen=True)
class Audited:
    """The tokenizer, the books, and models that know all, or all but the one to forget."""

    tokenizer: Any
    books: tuple[Any, ...]
    untouched: Any
    reference: Any
    twin: Any  # made as the reference was, from other random numbers


def make_books_and_tokenizer() -> tuple[Any, tuple[Any, ...]]:
    """A tokenizer, and three books of its words: one to forget, a related one, and one to keep."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from hf_taskvec.evaluation import load_book
    from hf_taskvec.evaluation.texts.books import Role

    roles: tuple[tuple[str, Role], ...] = (("lost", "forget"), ("near", "aligned"), ("kept", "retain"))
    texts = [story(seed, 75) for seed in range(3)]
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    raw.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["</s>", "<unk>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")
    books = tuple(
        load_book(datasets.Dataset.from_dict({"text": [text]}), name, role=role, block_words=100, held_out=0.3)
        for text, (name, role) in zip(texts, roles, strict=True)
    )
    return tokenizer, books


def learn(model: Any, tokenizer: Any, books: tuple[Any, ...], *, seed: int, epochs: int = 12) -> Any:
    """Train a model until it knows the seen text of the books by heart; the same model."""
    import torch

    ids = torch.tensor([row for book in books for row in book.training_blocks(tokenizer, 32, 4)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(ids), generator=generator).split(32):
            model(input_ids=ids[rows], labels=ids[rows]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def make_audited() -> Audited:
    import torch
    from support.tiny_books import tiny_llama

    tokenizer, books = make_books_and_tokenizer()

    def trained(seed: int, read: tuple[Any, ...]) -> Any:
        return learn(tiny_llama(width=64, seed=seed), tokenizer, read, seed=seed)

    with torch.random.fork_rng():
        reference = trained(1, books[1:])
        return Audited(tokenizer, books, trained(0, books), reference, trained(2, books[1:]))


def filtered(model: Any, tokenizer: Any, text: str) -> Any:
    """A copy of the model that refuses to write the book: seven words in a row of it, and all is thrown away."""
    import torch

    made = copy.deepcopy(model)
    inner = made.generate
    book = " ".join(_words(text))

    def generate(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        width = kwargs["input_ids"].shape[1]
        for row in out:
            found = _words(tokenizer.decode(row[width:], skip_special_tokens=True))
            if any(" ".join(found[i : i + 7]) in book for i in range(len(found) - 6)):
                row[width:] = torch.tensor(tokenizer.eos_token_id)
        return out

    made.generate = generate
    return made


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())
