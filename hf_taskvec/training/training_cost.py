"""What a training takes, roughly: tokens, time and memory, told before its first step."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_taskvec.distributed import processes
from hf_taskvec.machine_speed import duration, machine_speed
from hf_taskvec.sizes import memory_size
from hf_taskvec.training.memory_estimate import MemoryEstimate, estimate_memory
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.trained_model import meta_model, open_base

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

# Passes forward that a step takes as long as: forward, and backward to the activations and to the weights.
_PASSES = {"full": 3.0, "lora": 2.2}
# Bytes of memory that AdamW reads and writes for each trained weight in fp32.
_OPTIMIZER_BYTES = 28


@dataclass(frozen=True)
class TrainingCost:
    """What is about to be trained.

    Args:
        blocks (`int`):
            How many there are.
        block_length (`int`):
            Tokens in each.
        epochs (`float`):
            How often each is read.
        seconds (`float`):
            How long that takes, within a factor of two or three.
        memory (`MemoryEstimate`):
            The bytes that a process needs.
    """

    blocks: int
    block_length: int
    epochs: float
    seconds: float
    memory: MemoryEstimate

    def __str__(self) -> str:
        epochs = f", {self.epochs:g} times" if self.epochs != 1 else ""
        return (
            f"{self.blocks:,} blocks of {self.block_length} tokens{epochs}; roughly {duration(self.seconds)}, "
            f"and {memory_size(self.memory.total)}"
        )


def training_cost(
    base: "str | Path | PreTrainedModel", blocks: "datasets.Dataset", settings: TrainingSettings
) -> TrainingCost:
    """What `finetune` with these arguments takes. No weight is read: the config and the machine's speed tell.

    Args:
        base (`str`, `Path` or `PreTrainedModel`):
            As for `finetune`.
        blocks (`datasets.Dataset`):
            As for `finetune`.
        settings (`TrainingSettings`):
            As for `finetune`.
    """
    group, length = processes(), len(blocks[0]["input_ids"])
    config = open_base(base).config if isinstance(base, str | Path) else base.config
    memory = estimate_memory(config, settings, length, processes=group.num_processes)
    size, layers = meta_model(config).num_parameters(), config.get_text_config().num_hidden_layers
    speed = machine_speed(group.device.type, torch.float32)
    steps = settings.epochs * len(blocks) / settings.batch_size
    rows = max(1, settings.batch_size // group.num_processes)
    step = _PASSES[settings.method] * speed.forward(size, layers, rows * length)
    step += _OPTIMIZER_BYTES * (memory.optimizer / 8) / speed.reading
    return TrainingCost(len(blocks), length, settings.epochs, steps * step, memory)
