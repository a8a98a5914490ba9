"""How to fine-tune: one value that holds every choice, checked when it is made."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean

SETTINGS_VERSION = 1  # of what the settings mean: another number, and no earlier run is continued
Method = Literal["full", "lora"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["auto", "fp32", "bf16"]
ComputePrecision = Literal["fp32", "bf16"]  # what "auto" stands for on a machine


@dataclass(frozen=True)
class TrainingSettings:
    """The choices of a fine-tuning run, checked when they are made.

    Args:
        method (`"full"` or `"lora"`, *optional*, defaults to `"full"`):
            Train every weight, or low-rank factors beside the frozen ones.
        epochs (`int`, *optional*, defaults to 3):
            How often each block is seen.
        learning_rate (`float`, *optional*, defaults to 1e-4):
            The highest one, reached after the warm-up. The default suits LoRA and small models; a full fine-tune of a
            model of a billion parameters needs about `1e-5`.
        batch_size (`int`, *optional*, defaults to 8):
            Blocks in one step of the optimiser, over *all* processes.
        micro_batch_size (`int`, *optional*):
            Blocks in one forward pass of one process; gradients are accumulated until the batch is complete. By
            default a process takes its share of the batch in one pass.
        weight_decay (`float`, *optional*, defaults to 0.1):
            AdamW's, on matrices and embeddings; biases and norms have none. On by default: merging by sums rests on it
            (Kuzborskij and Abbasi-Yadkori, "Low-rank bias, weight decay, and model merging").
        warmup (`float`, *optional*, defaults to 0.05):
            The share of all steps in which the learning rate rises.
        schedule (`"cosine"`, `"linear"` or `"constant"`, *optional*, defaults to `"cosine"`):
            How the learning rate falls, to zero or not at all.
        max_grad_norm (`float`, *optional*, defaults to 1.0):
            Longer gradients are clipped to this norm.
        precision (`"auto"`, `"fp32"` or `"bf16"`, *optional*, defaults to `"auto"`):
            Of the forward and backward passes; the trained weights are fp32 always. `"auto"` is what
            `accelerate config` says, else bf16 where a GPU supports it, else fp32.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Compute activations twice instead of keeping them.
        seed (`int`, *optional*, defaults to 0):
            Of the order of the blocks, the dropout and LoRA's first factor.
        rank (`int`, *optional*, defaults to 32):
            Of LoRA's factors.
        alpha (`float`, *optional*):
            LoRA's scale is `alpha / rank`; by default `2 * rank`, so a scale of 2.
        dropout (`float`, *optional*, defaults to 0.0):
            Of LoRA's input.
        targets (`tuple` of `str`, or `str`, *optional*):
            The modules that are trained: ends of their names, or one regular expression for whole names. By default
            LoRA adapts every linear layer but the output head, and a full fine-tune trains every weight.

    Raises:
        `BadValueError`: If a number makes no sense.
        `MissingNameError`: If there is no such method, schedule or precision.

    Example:
        >>> TrainingSettings(method="lora", learning_rate=2e-4).rank
        32

    """

    method: Method = "full"
    epochs: int = 3
    learning_rate: float = 1e-4
    batch_size: int = 8
    micro_batch_size: int | None = None
    weight_decay: float = 0.1
    warmup: float = 0.05
    schedule: Schedule = "cosine"
    max_grad_norm: float = 1.0
    precision: Precision = "auto"
    gradient_checkpointing: bool = False
    seed: int = 0
    rank: int = 32
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] | str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("method", Method), ("schedule", Schedule), ("precision", Precision)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                hint = did_you_mean(str(value), known)
                raise MissingNameError(f"no {name} {value!r}.{hint} It is one of {', '.join(known)}.")
        for name in ("epochs", "batch_size", "micro_batch_size", "rank"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise BadValueError(f"{name}={value!r} must be a whole number of at least 1.")
        for name in ("learning_rate", "max_grad_norm", "alpha", "weight_decay", "warmup", "dropout"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float):
                hint = " (YAML takes 1e-4 for a text; 1.0e-4 is a number)" if isinstance(value, str) else ""
                raise BadValueError(f"{name}={value!r} must be a number{hint}.")
        for name in ("learning_rate", "max_grad_norm", "alpha"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadValueError(f"{name}={value!r} must be a number above 0.")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise BadValueError(f"weight_decay={self.weight_decay!r} must be 0 or more.")
        for name in ("warmup", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise BadValueError(f"{name}={getattr(self, name)!r} must be at least 0 and below 1: it is a share.")
        if isinstance(self.targets, list):  # as YAML gives them
            object.__setattr__(self, "targets", tuple(self.targets))

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step: a function of nothing else, so it needs no state.

        Args:
            step (`int`):
                The step, from 0.
            steps (`int`):
                How many there are.

        Returns:
            `float`: The learning rate.

        Example:
            >>> settings = TrainingSettings(learning_rate=1.0, warmup=0.2, schedule="linear")
            >>> [round(settings.learning_rate_at(step, 10), 2) for step in range(10)]
            [0.33, 0.67, 1.0, 0.88, 0.75, 0.62, 0.5, 0.38, 0.25, 0.12]

        """
        rising = round(self.warmup * steps)
        if step < rising:
            return self.learning_rate * (step + 1) / (rising + 1)
        done = (step - rising) / max(1, steps - rising)
        share = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
        return self.learning_rate * share[self.schedule]
