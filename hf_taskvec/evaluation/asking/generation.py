"""One batch through the model: what it writes after each prompt, and how likely it finds the true text."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage
from hf_taskvec.evaluation.asking.key_value_cache import preallocated_cache
from hf_taskvec.evaluation.texts.protocols import Decoding
from hf_taskvec.models.layout import without_peft
from hf_taskvec.models.model_facts import (
    accepts_logits_to_keep,
    evaluation_mode,
    input_device,
    rows_per_pass,
    vocabulary_size,
)


@dataclass(frozen=True)
class Continuation:
    """What one row gave: the generated text, and the model's view of the true one.

    `log_probs` and `hits` are those of `scoring.metrics.AnsweredPassage`.
    """

    text: str
    log_probs: tuple[float, ...]
    hits: tuple[bool, ...]


@dataclass(frozen=True)
class _Frame:
    """The tokens that the rows of a batch are padded to, and of how many of the last ones logits are asked for."""

    width: int
    kept: int


class Generator:
    """Runs batches of passages through a model. Use it inside `with generator.prepared():`.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A causal language model; its device, dtype, adapters and quantisation are left as they are.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer. It needs no pad token: padded positions are masked, whatever stands there.
        decoding (`Decoding`):
            Greedy or sampled.
        seed (`int`):
            Of sampled decoding.
        likelihood (`bool`, *optional*, defaults to `True`):
            Also ask for the likelihood of the true continuations.
    """

    def __init__(self, model: Any, tokenizer: Any, decoding: Decoding, seed: int, likelihood: bool = True) -> None:
        self.likelihood = likelihood
        self.model, self.tokenizer, self.decoding, self.seed = model, tokenizer, decoding, seed
        self.model_seconds = 0.0
        self._owner = without_peft(model)  # a PeftModel passes its base's generation_config on
        self._skips_logits = accepts_logits_to_keep(model)
        own = self._owner.generation_config
        ends = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
        self._ends: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        # What stands in padded positions is never looked at, but must be a token of the model: a pad token that was
        # added to the tokenizer alone is none.
        self._pad: int = pad if pad is not None and pad < vocabulary_size(model.config) else 0

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """The model in evaluation mode and without generation defaults of its own; all put back afterwards.

        A checkpoint's `generation_config.json` may ask for sampling or a repetition penalty: the protocol
        alone decides here.
        """
        kept = self._owner.generation_config
        self._owner.generation_config = GenerationConfig(
            eos_token_id=self._ends or None, bos_token_id=kept.bos_token_id, pad_token_id=self._pad
        )
        try:
            with evaluation_mode(self.model):
                yield
        finally:
            self._owner.generation_config = kept

    def run(self, passages: Sequence[TokenizedPassage], set_rows: Callable[[slice], None]) -> list[Continuation]:
        """The continuations of a batch, in its order.

        Args:
            passages (`Sequence[TokenizedPassage]`):
                The rows of the batch.
            set_rows (`Callable[[slice], None]`):
                Called before each pass with the part of the batch that goes through, so that an edit
                with one λ for each row can follow.
        """
        # First: weights that are broken at this λ show in one forward pass.
        views = self._views(passages, set_rows) if self.likelihood else [((), ())] * len(passages)
        set_rows(slice(0, len(passages)))
        outputs = self._generate(passages)
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return [Continuation(text, *view) for text, view in zip(texts, views, strict=True)]

    def _generate(self, passages: Sequence[TokenizedPassage]) -> list[list[int]]:
        new = max(passage.new_tokens for passage in passages)
        if new == 0:
            return [[] for _ in passages]
        device = input_device(self.model)
        width = max(len(passage.prompt_ids) for passage in passages)
        ids = torch.full((len(passages), width), self._pad, dtype=torch.long)
        mask = torch.zeros((len(passages), width), dtype=torch.long)
        for i, passage in enumerate(passages):  # left-padded: the next token of every row is in the last column
            ids[i, width - len(passage.prompt_ids) :] = torch.tensor(passage.prompt_ids)
            mask[i, width - len(passage.prompt_ids) :] = 1
        watch = _Watch()
        processors = LogitsProcessorList([watch])
        if not self.decoding.greedy:
            keys = [passage.text.key for passage in passages]
            processors.append(_SampleByPassage(keys, self.seed, self.decoding.temperature, self.decoding.top_p))
        with self._in_model():
            out = self.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=new,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                past_key_values=preallocated_cache(self._owner, width + new),
                logits_processor=processors,
            )
        watch.raise_if_broken(passages)
        rows = out[:, width:].tolist()
        return [self._cut(row[: passage.new_tokens]) for row, passage in zip(rows, passages, strict=True)]

    def _cut(self, ids: list[int]) -> list[int]:
        for i, token in enumerate(ids):
            if token in self._ends:
                return ids[:i]
        return ids

    def _views(
        self, passages: Sequence[TokenizedPassage], set_rows: Callable[[slice], None]
    ) -> list[tuple[tuple[float, ...], tuple[bool, ...]]]:
        """For each row the log-probabilities of the answer's tokens, and which of them come first."""
        frame = self._frame(passages)
        step = rows_per_pass(self.model.config, frame.kept if self._skips_logits else frame.width)
        views = []
        for first in range(0, len(passages), step):
            part = slice(first, min(first + step, len(passages)))
            set_rows(part)
            with self._in_model():
                found = self._answer_logits(passages[part], frame)
                views += [_view(passage, logits) for passage, logits in zip(passages[part], found, strict=True)]
        return views

    def answer_logits(self, passages: Sequence[TokenizedPassage]) -> list[torch.Tensor]:
        """For each passage the logits, in fp32, from which each token of its true continuation is predicted."""
        with self._in_model():
            return list(self._answer_logits(passages, self._frame(passages)))

    def _frame(self, passages: Sequence[TokenizedPassage]) -> "_Frame":
        width = max(len(passage.prompt_ids) + len(passage.answer_ids) for passage in passages)
        # The first position whose next token belongs to an answer: the output layer is not asked before it.
        return _Frame(width, width + 1 - min(len(passage.prompt_ids) for passage in passages))

    def _answer_logits(self, passages: Sequence[TokenizedPassage], frame: "_Frame") -> Iterator[torch.Tensor]:
        device = input_device(self.model)
        rows = [passage.prompt_ids + passage.answer_ids for passage in passages]
        ids = torch.full((len(rows), frame.width), self._pad, dtype=torch.long)
        mask = torch.zeros((len(rows), frame.width), dtype=torch.long)
        for i, row in enumerate(rows):  # right-padded: each position is its own index, in any architecture
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        keep = {"logits_to_keep": frame.kept} if self._skips_logits else {}
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device), **keep}
        logits = self.model(**inputs, use_cache=False).logits
        skipped = frame.width - logits.shape[1]
        for i, passage in enumerate(passages):
            begin = len(passage.prompt_ids) - 1 - skipped
            yield logits[i, begin : begin + len(passage.answer_ids)].float()

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        # Only here, not around the edit: weights made in inference mode could never be trained again.
        begin = time.perf_counter()
        with torch.inference_mode():
            yield
        self.model_seconds += time.perf_counter() - begin


def _view(passage: TokenizedPassage, logits: torch.Tensor) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    true = torch.tensor(passage.answer_ids, device=logits.device)
    log_probs = logits.gather(-1, true[:, None])[:, 0] - logits.logsumexp(-1)
    if not bool(log_probs.isfinite().all()):
        raise _broken(passage)
    return tuple(log_probs.tolist()), tuple((logits.argmax(-1) == true).tolist())


def _broken(passage: TokenizedPassage) -> BadValueError:
    return BadValueError(
        f"the model's logits are NaN or infinite at passage {passage.text.id}; its weights are broken at this λ "
        "(an overflow of float16, or a |λ| that is too large). Finished passages stay in the store"
    )


class _Watch(LogitsProcessor):
    """Notices NaN logits without waiting for the device at every step.

    Broken weights of the output layer show in the first step, which is looked at entirely; broken hidden
    states make every logit NaN, so one column tells of them later on.
    """

    def __init__(self) -> None:
        self.broken: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.broken is None:
            self.broken = scores.isnan().any(dim=-1)
        else:
            self.broken = self.broken | scores[:, 0].isnan()
        return scores

    def raise_if_broken(self, passages: Sequence[TokenizedPassage]) -> None:
        if self.broken is not None and bool(self.broken.any()):
            raise _broken(passages[int(self.broken.int().argmax())])


class _SampleByPassage(LogitsProcessor):
    """Sampling that depends on the passage alone, not on the others of its batch.

    The largest of logits plus Gumbel noise is a sample of their softmax. Each row draws its noise from a
    generator seeded by its own passage, so greedy decoding of the result is sampling that any batch size,
    process count or resumption repeats; and every λ gets the same noise, which pairs their outputs.
    """

    def __init__(self, keys: Sequence[str], seed: int, temperature: float, top_p: float) -> None:
        self.temperature, self.top_p = temperature, top_p
        self.generators = [torch.Generator().manual_seed((int(key[:15], 16) + seed) % (1 << 62)) for key in keys]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float() / self.temperature
        if self.top_p < 1:
            ordered, index = scores.sort(dim=-1, descending=True)
            before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
            outside = (before >= self.top_p).scatter(-1, index, before >= self.top_p)
            scores = scores.masked_fill(outside, -torch.inf)
        noise = torch.stack([torch.empty(scores.shape[-1]).exponential_(generator=g) for g in self.generators])
        return scores - noise.log().to(scores.device)
