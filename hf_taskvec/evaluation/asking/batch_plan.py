"""The batch plan: which passages go through the model together, decided before processes share the work.

A batch of another composition can round a logit differently and so break a tie. The plan therefore depends on
the passages, the values of λ and the batch size alone, never on how many processes there are.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.evaluation.texts.passages import Passage
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.models.model_facts import context_length, vocabulary_size


@dataclass(frozen=True)
class TokenizedPassage:
    """A passage in the model's tokens, with the number of tokens to generate."""

    text: Passage
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Row:
    """One passage at one λ."""

    scale: float
    passage: int

    def __repr__(self) -> str:
        # `BatchPlan.hash` is made of this text, and reports hold the hash: it stays as it was first written.
        return f"Row(scale={self.scale!r}, task={self.passage!r})"


@dataclass(frozen=True)
class BatchPlan:
    """The batches in the order of work, longest prompts first."""

    batch_size: int
    mixed: bool
    batches: tuple[tuple[Row, ...], ...]

    @property
    def hash(self) -> str:
        """sha256 of the batches; reports with the same hash had the same composition of every batch."""
        return hashlib.sha256(repr(self.batches).encode()).hexdigest()

    def with_halved(self, parts: Mapping[int, Sequence[tuple[Row, ...]]]) -> "BatchPlan":
        """The plan as it was carried out: some batches, by number, in the parts that memory allowed."""
        batches = [part for i, batch in enumerate(self.batches) for part in parts.get(i, (batch,))]
        return replace(self, batches=tuple(batches))


def tokenize_passages(
    passages: Sequence[Passage], protocol: Protocol, tokenizer: Any, config: Any
) -> tuple[TokenizedPassage, ...]:
    """The passages as tokens of the model with this configuration.

    Raises:
        `BadValueError`: If a passage does not fit into the model's context; it names the first.
        `MismatchError`: If a token is not in the model's vocabulary.
    """
    context, vocabulary = context_length(config), vocabulary_size(config)
    found = []
    for passage in passages:
        asked = protocol.instruction + passage.prompt + protocol.cue
        prompt = _without_end(tokenizer(asked)["input_ids"], tokenizer)
        whole = _without_end(tokenizer(asked + passage.gap + passage.answer)["input_ids"], tokenizer)
        if whole[: len(prompt)] == prompt and len(whole) > len(prompt):
            answer = whole[len(prompt) :]
        else:  # the prompt's last token merges with the answer's first: keep what is generated from
            answer = tokenizer(passage.gap + passage.answer, add_special_tokens=False)["input_ids"]
        decoding = protocol.decoding
        if decoding.max_new_tokens is not None:
            new = decoding.max_new_tokens
        elif decoding.total_length is not None:
            new = decoding.total_length - len(prompt)
        else:
            new = len(answer)
        if new < 1:
            raise BadValueError(
                f"passage {passage.id}: its prompt has {len(prompt)} tokens, which leaves none of the "
                f"{decoding.total_length} of protocol {protocol.name!r}; use a shorter prompt_length"
            )
        needed = len(prompt) + max(new, len(answer))
        if context is not None and needed > context:
            raise BadValueError(
                f"passage {passage.id} needs {needed} tokens ({len(prompt)} of prompt), but the model's context "
                f"has {context}; use shorter passages, as in protocols.get({protocol.name!r}, prompt_length=..., "
                "answer_length=...), or a model with a longer context"
            )
        found.append(TokenizedPassage(passage, tuple(prompt), tuple(answer), new))
    largest = max((token for each in found for token in each.prompt_ids + each.answer_ids), default=0)
    if largest >= vocabulary:
        raise MismatchError(
            f"the tokenizer gives ids up to {largest} for these passages, but the model's vocabulary has {vocabulary} "
            "entries: it is not this model's tokenizer. Pass the model's own as tokenizer=, or, if tokens were added "
            "to it, give the model rows for them: model.resize_token_embeddings(len(tokenizer))"
        )
    return tuple(found)


def _without_end(ids: list[int], tokenizer: Any) -> list[int]:
    """Tokenizers that end every text with an end token would have the model start a new one."""
    ids = list(ids)
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids


def plan_batches(
    passages: Sequence[TokenizedPassage], scales: Sequence[float], batch_size: int, *, mixed: bool, context: int | None
) -> BatchPlan:
    """The batches of all passages at all λ.

    Args:
        passages (`Sequence[TokenizedPassage]`):
            What is asked.
        scales (`Sequence[float]`):
            The values of λ.
        batch_size (`int`):
            The most rows in one batch.
        mixed (`bool`):
            Whether one batch may hold rows of different λ. If not, each λ has its own batches, one λ after the other.
        context (`int`, *optional*):
            A batch generates as long as its most demanding row; the longest prompt in it must still fit then.
    """
    if batch_size < 1:
        raise BadValueError(f"batch_size={batch_size} must be at least 1")
    order = sorted(range(len(passages)), key=lambda i: (-len(passages[i].prompt_ids), -passages[i].new_tokens, i))
    if mixed:
        groups = [[Row(scale, i) for i in order for scale in scales]]
    else:
        groups = [[Row(scale, i) for i in order] for scale in scales]
    batches: list[tuple[Row, ...]] = []
    for rows in groups:
        batch: list[Row] = []
        prompt, new = 0, 0
        for row in rows:
            passage = passages[row.passage]
            prompt, new = max(prompt, len(passage.prompt_ids)), max(new, passage.new_tokens)
            if len(batch) == batch_size or (context is not None and batch and prompt + new > context):
                batches.append(tuple(batch))
                batch, prompt, new = [], len(passage.prompt_ids), passage.new_tokens
            batch.append(row)
        if batch:
            batches.append(tuple(batch))
    return BatchPlan(batch_size, mixed, tuple(batches))
