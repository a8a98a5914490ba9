"""The settings that all experiments share: model, texts, training, and where the results go."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from hf_taskvec.errors import BadValueError
from hf_taskvec.experiments.config_options import option
from hf_taskvec.experiments.synthetic_library.tiny_phi import HEADS
from hf_taskvec.training.settings import TrainingSettings

EMBEDDED = "embedded"
# Where things lie and what is done with them; the results are the same.
NOT_IDENTITY = {"config", "output", "cache", "force", "push_to_hub", "checkpoint_every", "epoch_vectors"}


@dataclass(frozen=True)
class ExperimentConfig:
    """The settings of any experiment; `--help` of a recipe explains each of them."""

    config: str | None = option(
        None, "A file of settings (YAML): a ready one by its name, or a path. Flags win over it."
    )

    # The model.
    base_model: str = option(
        EMBEDDED,
        "θ_0: a Hub id or a folder; `embedded` (a tiny Phi, pretrained here and now) or `smollm2-135m` (from PyPI).",
    )
    method: Literal["full", "lora"] = option("full", "How the vector is made: by full fine-tuning, or with LoRA.")

    # LoRA.
    lora_rank: int = option(32, "The rank that LoRA trains with.")
    lora_alpha: float | None = option(None, "LoRA's scale is alpha / rank; twice the rank if not given.")
    lora_targets: list[str] | None = option(
        None, "The modules that LoRA adapts, by the ends of their names; every linear layer but the head if not given."
    )
    lora_dropout: float = option(0.0, "Dropout of LoRA's input.")
    lora_learning_rate: float = option(2e-4, "The highest learning rate of LoRA.")

    # Fine-tuning.
    learning_rate: float = option(1e-5, "The highest learning rate of full fine-tuning.")
    batch_size: int = option(8, "Blocks in one step, over all processes.")
    micro_batch_size: int | None = option(
        None, "Blocks in one forward pass of a process; all of its share if not given."
    )
    weight_decay: float = option(0.1, "The weight decay of AdamW.")
    max_grad_norm: float = option(1.0, "Longer gradients are clipped to this norm.")
    warmup: float = option(0.05, "The share of the steps in which the learning rate rises.")
    schedule: Literal["cosine", "linear", "constant"] = option("cosine", "How the learning rate falls.")
    precision: Literal["auto", "fp32", "bf16"] = option("auto", "Of the forward and backward passes.")
    gradient_checkpointing: bool = option(False, "Compute activations twice instead of keeping them.")
    block_length: int = option(512, "Tokens in a block.")
    block_stride: int | None = option(
        None, "Tokens from one block's start to the next; blocks overlap if it is smaller than their length."
    )
    evaluation_batch_size: int | None = option(None, "Passages in one batch; found automatically if not given.")

    # The texts.
    words: int | None = option(
        None, "Take only so many words of each book (or write so many, with the embedded model)."
    )
    section_words: int = option(1000, "Words in a section, which is trained on or held out as a whole.")
    held_out: float = option(0.3, "The share of the sections that is held out.")
    prose: bool = option(True, "Leave title pages, contents and headings out of the books' files.")

    # The embedded model, which is pretrained on general prose of the same generator.
    general_words: int = option(60_000, "Words of general prose that the embedded model is pretrained on.")
    pretrain_epochs: int = option(5, "How often it reads them.")
    pretrain_learning_rate: float = option(3e-3, "The highest learning rate while it does.")
    vocabulary: int = option(2048, "Entries of its tokenizer.")
    hidden_size: int = option(128, "The width of its layers.")
    layers: int = option(4, "How many layers it has.")

    # The run.
    seed: int = option(0, "Of the texts, the split, the training and the statistics.")
    output: str = option("outputs/experiment", "The folder for the results.")
    cache: str | None = option(None, "The folder for the trained stages; `stages` in the output folder if not given.")
    force: bool = option(
        False, "Do everything again, also what is finished, and replace the results of other settings."
    )

    def check(self) -> None:
        """Refuse numbers that make no sense, before anything is read."""
        least = {"words": 1, "block_length": 2, "block_stride": 1, "evaluation_batch_size": 1, "section_words": 1}
        if self.embedded:
            least |= {"words": 200, "general_words": 200, "layers": 1, "hidden_size": 4}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise BadValueError(f"{name}={value} must be at least {low}.")
        if self.block_stride is not None and self.block_stride > self.block_length:
            raise BadValueError(
                f"block_stride={self.block_stride} is larger than block_length={self.block_length}: blocks would leave "
                "text out between them. Use a smaller --block-stride."
            )
        if self.embedded and self.hidden_size % HEADS:
            raise BadValueError(f"hidden_size={self.hidden_size} must be a multiple of {HEADS}, the number of heads.")
        if self.pretrain_epochs < 1:
            raise BadValueError(f"pretrain_epochs={self.pretrain_epochs} must be at least 1.")
        _ = self.pretraining

    @property
    def embedded(self) -> bool:
        """Whether the model is the embedded one, pretrained here and now."""
        return self.base_model == EMBEDDED

    def settings(self, method: Literal["full", "lora"], epochs: int = 1) -> TrainingSettings:
        """How to fine-tune by this method."""
        settings = TrainingSettings(
            method=method,
            epochs=epochs,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            warmup=self.warmup,
            schedule=self.schedule,
            precision=self.precision,
            gradient_checkpointing=self.gradient_checkpointing,
            seed=self.seed,
        )
        if method == "full":  # the same whatever LoRA would do, so that its stage is shared
            return settings
        return dataclasses.replace(
            settings,
            learning_rate=self.lora_learning_rate,
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            dropout=self.lora_dropout,
            targets=tuple(self.lora_targets) if self.lora_targets else None,
        )

    @property
    def pretraining(self) -> TrainingSettings:
        """How the embedded model is pretrained."""
        return dataclasses.replace(
            self.settings("full"), epochs=self.pretrain_epochs, learning_rate=self.pretrain_learning_rate
        )

    def identity(self, without: tuple[str, ...]) -> dict[str, Any]:
        """The settings that decide the results, but for those that are paths."""
        settings = dataclasses.asdict(self)
        return {k: v for k, v in settings.items() if k not in NOT_IDENTITY and k not in without}
