"""What asking a model takes, roughly: answers, tokens, time and memory, told before the first of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage
from hf_taskvec.machine_speed import duration, machine_speed
from hf_taskvec.models.model_facts import input_device, rows_per_pass, vocabulary_size
from hf_taskvec.sizes import memory_size


@dataclass(frozen=True)
class AskingCost:
    """What is about to be asked.

    Args:
        answers (`int`):
            How many are written.
        tokens (`int`):
            How many tokens these have at most.
        seconds (`float`):
            How long that takes, within a factor of two or three.
        memory (`int`):
            The bytes that a batch needs beside the model's weights, about.
    """

    answers: int
    tokens: int
    seconds: float
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.answers:,} answers, {self.tokens:,} tokens at most; roughly {duration(self.seconds)}, "
            f"and {memory_size(self.memory)} beside the model"
        )


def asking_cost(model: Any, batches: Sequence[Sequence[TokenizedPassage]], likelihood: bool = True) -> AskingCost:
    """What these batches take. Nothing is asked: the model's size and the machine's speed tell.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The model.
        batches (`Sequence[Sequence[TokenizedPassage]]`):
            The passages of each batch, which go through the model together.
        likelihood (`bool`, *optional*, defaults to `True`):
            Whether the true continuations are read as well.
    """
    text = model.config.get_text_config()
    speed = machine_speed(input_device(model).type, model.dtype)
    size, layers, item = sum(p.numel() for p in model.parameters()), text.num_hidden_layers, model.dtype.itemsize
    seconds, memory = 0.0, 0
    for batch in filter(None, batches):
        rows, prompt = len(batch), max(len(each.prompt_ids) for each in batch)
        whole = max(len(each.prompt_ids) + len(each.answer_ids) for each in batch)
        new = max(each.new_tokens for each in batch)
        if likelihood:
            seconds += speed.forward(size, layers, rows * whole, item)
        if new:
            seconds += speed.forward(size, layers, rows * prompt, item)
            seconds += (new - 1) * speed.forward(size, layers, rows, item)
        # Keys and values of each layer, and the logits in fp32 of as many rows as go through at once.
        logits = 4 * min(rows, rows_per_pass(model.config, whole)) * whole * vocabulary_size(model.config)
        memory = max(memory, 2 * layers * rows * (prompt + new) * text.hidden_size * item + logits)
    passages = [passage for batch in batches for passage in batch]
    return AskingCost(len(passages), sum(passage.new_tokens for passage in passages), seconds, memory)
