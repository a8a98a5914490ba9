"""How much memory a training run needs, told before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import DistributedType

from hf_taskvec.errors import UnsupportedError
from hf_taskvec.sizes import memory_size
from hf_taskvec.training.accelerators import resolve_precision
from hf_taskvec.training.settings import ComputePrecision, TrainingSettings
from hf_taskvec.training.trainable_parts import make_trainable
from hf_taskvec.training.trained_model import meta_model, training_dtype

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedConfig, PreTrainedModel

# Bytes that a layer keeps for each token and hidden unit until the backward pass, in 16 bits; fp32 keeps twice that.
# Fused kernels with attention that stores no scores keep 34 (Korthikanti et al. 2022, "Reducing activation
# recomputation", eq. (2) without its last term); transformers' layers of plain operations about half as much more,
# and those with LoRA beside them half as much again.
_KEPT = {"full": 50, "lora": 75}
# Bytes for each token and entry of the vocabulary: logits, a copy of them, log-probabilities, and two gradients.
_LOGITS = 20


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes that one process needs to train, by their use.

    The first three are counted, parameter by parameter; the activations are a rule of thumb. Phi and Llama of 20
    million parameters on a CPU took between as much as the total and 40 % more.

    Args:
        weights (`int`):
            Of all weights, trained or frozen.
        gradients (`int`):
            Of the trained ones, with the copies that processes exchange.
        optimizer (`int`):
            AdamW's two moments.
        activations (`int`):
            What the forward pass keeps for the backward pass.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "activations")
        return (
            f"{memory_size(self.total)} ({', '.join(f'{part} {memory_size(getattr(self, part))}' for part in parts)})"
        )


def estimate_memory(
    model: "PreTrainedConfig | PreTrainedModel",
    settings: TrainingSettings,
    block_length: int,
    *,
    precision: ComputePrecision = "fp32",
    processes: int = 1,
    sharded: bool = False,
) -> MemoryEstimate:
    """What one process needs for training; no weight is loaded or created.

    Args:
        model (`PreTrainedConfig` or `PreTrainedModel`):
            A configuration, or a model (on the meta device, for instance).
        settings (`TrainingSettings`):
            Of the training; its `precision` counts if it is not `"auto"`.
        block_length (`int`):
            Tokens in a block.
        precision (`"fp32"` or `"bf16"`, *optional*, defaults to `"fp32"`):
            What `"auto"` stands for.
        processes (`int`, *optional*, defaults to 1):
            Among how many the batch is split.
        sharded (`bool`, *optional*, defaults to `False`):
            Whether they also split weights, gradients and moments (FSDP).

    Returns:
        `MemoryEstimate`: The bytes, by their use.

    Example:
        >>> from transformers import PhiConfig
        >>> str(estimate_memory(PhiConfig(), TrainingSettings(method="lora", batch_size=1), 512))
        '9.7 GiB (weights 5.4 GiB, gradients 108.0 MiB, optimizer 216.0 MiB, activations 4.0 GiB)'

    """
    used: ComputePrecision = precision if settings.precision == "auto" else settings.precision
    config = model.config if isinstance(model, torch.nn.Module) else model
    shape = meta_model(config)
    frozen_bytes = training_dtype(config, settings, used).itemsize
    with torch.random.fork_rng([]):
        shape = make_trainable(shape, settings)
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in shape.parameters()]
    trained = sum(count for count, is_trained in counts if is_trained)
    frozen = sum(count for count, is_trained in counts if not is_trained)
    parts = processes if sharded else 1
    # DistributedDataParallel exchanges gradients in buckets that are a second copy of them.
    copies = 2 if processes > 1 and not sharded else 1
    text = config.get_text_config()
    batch = settings.micro_batch_size or -(-settings.batch_size // processes)
    tokens = min(batch, settings.batch_size) * block_length
    kept = tokens * text.hidden_size * _KEPT[settings.method] * (1 if used == "bf16" else 2)
    inputs = tokens * text.hidden_size * 4 * text.num_hidden_layers
    layers = inputs + kept if settings.gradient_checkpointing else kept * text.num_hidden_layers
    return MemoryEstimate(
        weights=(4 * trained + frozen_bytes * frozen) // parts,
        gradients=4 * trained * copies // parts,
        optimizer=8 * trained // parts,
        activations=layers + tokens * text.vocab_size * _LOGITS,
    )


def check_training_memory(
    model: "PreTrainedConfig | PreTrainedModel",
    settings: TrainingSettings,
    block_length: int,
    accelerator: "Accelerator",
    teachers: "Sequence[PreTrainedConfig]" = (),
) -> None:
    """Refuse a training that does not fit into the memory of the accelerator's devices, shared or sharded as it says.

    Args:
        model (`PreTrainedConfig` or `PreTrainedModel`):
            As for `estimate_memory`.
        settings (`TrainingSettings`):
            Of the training.
        block_length (`int`):
            Tokens in a block.
        accelerator (`accelerate.Accelerator`):
            Of the run; a bare `PartialState` knows neither of FSDP nor of the precision.
        teachers (`Sequence[PreTrainedConfig]`, *optional*):
            Of the frozen models that each process holds besides.
    """
    precision = resolve_precision(settings, accelerator)
    estimate = estimate_memory(
        model,
        settings,
        block_length,
        precision=precision,
        processes=accelerator.num_processes,
        sharded=accelerator.distributed_type == DistributedType.FSDP,
    )
    held = sum(meta_model(config).num_parameters() for config in teachers) * (2 if precision == "bf16" else 4)
    estimate = replace(estimate, weights=estimate.weights + held)
    check_memory(
        estimate, accelerator.device, sharing=accelerator.num_processes if accelerator.device.type == "cpu" else 1
    )


def free_memory(device: torch.device) -> float:
    """The bytes that are free on a device for this process."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    import psutil

    return min(psutil.virtual_memory().available, _free_in_container())


def _free_in_container() -> float:
    """What the control group of a container leaves; infinite without one or without a limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return float("inf")
    return float("inf") if limit == "max" else int(limit) - int(used)


def check_memory(estimate: MemoryEstimate, device: torch.device, free: float | None = None, sharing: int = 1) -> None:
    """Refuse a run that does not fit. The estimate is a low one, so what passes may still fail.

    Args:
        estimate (`MemoryEstimate`):
            What one process needs.
        device (`torch.device`):
            Where it trains.
        free (`float`, *optional*):
            The free bytes, if known better than by asking the device.
        sharing (`int`, *optional*, defaults to 1):
            How many processes of the run use the same memory.

    Raises:
        `UnsupportedError`: If there is too little memory.
    """
    free = free_memory(device) if free is None else free
    if estimate.total * sharing <= free:
        return
    each = f" in each of {sharing} processes" if sharing > 1 else ""
    raise UnsupportedError(
        f"too little memory: training needs about {estimate}{each}, and {memory_size(free)} are free on "
        f"{device.type}. Use method='lora', a smaller micro_batch_size, gradient_checkpointing=True, shorter blocks, "
        "or FSDP over several devices."
    )
