"""`unlearn`: what others would do, a model that knows a text -> the same model after a usual unlearning method."""

from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.training.finetuning import train_with
from hf_taskvec.training.run_record import Finetuned
from hf_taskvec.training.settings import ComputePrecision, TrainingSettings
from hf_taskvec.training.text_losses import SecondText, TextLoss, frozen_model
from hf_taskvec.training.token_blocks import TokenBlocks, read_blocks
from hf_taskvec.training.trained_model import TrainingBase, made_by, open_base
from hf_taskvec.training.unlearning_methods import UnlearningMethod, unlearning_method

if TYPE_CHECKING:
    import datasets
    from accelerate import Accelerator
    from transformers import PreTrainedConfig, PreTrainedModel

#: what open-unlearning trains by (Dorna et al. 2025): ten epochs of the text to forget, 1e-5, batches of 32
AUTHORS_SETTINGS = TrainingSettings(epochs=10, learning_rate=1e-5, batch_size=32)


@dataclass(frozen=True)
class Unlearned:
    """What an unlearning method made of a model.

    Args:
        folder (`Path`):
            A whole model (full) or a PEFT adapter of the model (LoRA).
        vector (`TaskVector`):
            The change that it made to the model, for a report beside other edits.
        method (`UnlearningMethod`):
            Which, with its settings.
        losses (`tuple` of `float`):
            What was minimised, at each step.
        steps (`int`):
            Steps of the optimiser.
        tokens (`int`):
            Tokens that were trained on, to be forgotten or kept, each as often as it was seen.
        seconds (`float`):
            How long the training takes at the speed of the run that finished it.
        peak_bytes (`int`, *optional*):
            The most memory that the steps took beyond the weights; `None` where nothing told.
    """

    folder: Path
    vector: TaskVector
    method: UnlearningMethod
    losses: tuple[float, ...]
    steps: int
    tokens: int
    seconds: float
    peak_bytes: int | None


def unlearn(
    model: "str | Path | PreTrainedModel",
    forget_blocks: "datasets.Dataset",
    output: str | Path,
    *,
    method: str | UnlearningMethod,
    keep_blocks: "datasets.Dataset | None" = None,
    settings: TrainingSettings | None = None,
    tokenizer: Any = None,
    checkpoint_every: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    accelerator: "Accelerator | None" = None,
) -> Unlearned:
    """Unlearn a text by gradient steps, as the usual methods do: to compare with, or to be combined with task vectors.

    Methods are `ga` (gradient ascent), `grad_diff`, `npo`, `simnpo` and `rmu`, by name with the authors' settings or as
    an object, such as `NPO(beta=0.2)`. Each step takes a batch of the text to forget and, for all but `ga`, one of the
    text to keep; an epoch is one of the text to forget. MUSE's "task vector" needs no method of its own: it is
    `-scale * TaskVector.from_finetuned(model, …)` of the model trained further on the text.

    Everything else is as in `finetune`: processes share the work, the folder appears when it is complete, an
    interrupted run continues, a finished one is returned, and one whose loss or gradient is no longer a finite number
    (gradient ascent's usual end) is stopped and leaves nothing.

    Args:
        model (`str`, `Path` or `PreTrainedModel`):
            The model that knows the text: a folder, a Hub id, or a live model, which is left as it is.
        forget_blocks (`datasets.Dataset`):
            Packed blocks of the text to forget, as `Book.training_blocks` gives them.
        output (`str` or `Path`):
            The folder to write, on a disk that all processes see.
        method (`str` or `UnlearningMethod`):
            Which.
        keep_blocks (`datasets.Dataset`, *optional*):
            Packed blocks of text to keep, which all methods but `ga` need.
        settings (`TrainingSettings`, *optional*):
            Of the training, full or LoRA: `AUTHORS_SETTINGS` without them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Saved beside the model, as in `finetune`.
        checkpoint_every (`int`, *optional*):
            Steps between checkpoints, as in `finetune`.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an earlier output, and an unfinished one of other arguments.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal only.
        accelerator (`accelerate.Accelerator`, *optional*):
            Your own, if the one that `accelerate launch` implies is not what you want.

    Returns:
        `Unlearned`: The folder, and the change as a task vector.

    Raises:
        `BadValueError`: If a method needs text to keep and there is none, or takes none and there is.
        `MissingNameError`: If there is no such method.
        `DivergedError`: If a loss or a gradient is not a finite number. Nothing is saved then.
        `OutputError`, `MismatchError`, `UnsupportedError`: As for `finetune`.

    Example:
        >>> from hf_taskvec.training import NPO, unlearn
        >>> done = unlearn("books", forget_blocks, "out", method=NPO(beta=0.2), keep_blocks=kept)  # doctest: +SKIP
        >>> report = sweep(model, {"npo": done.vector, "-0.6*forget": -0.6 * forget}, None, books)  # doctest: +SKIP

    """
    chosen = unlearning_method(method)
    if chosen.keeps and keep_blocks is None:
        raise BadValueError(
            f"{chosen.name} trains on text to keep beside the text to forget: give keep_blocks, or set keep_weight=0."
        )
    if not chosen.keeps and keep_blocks is not None:
        raise BadValueError(f"{chosen} trains on no text to keep: leave keep_blocks out, or take grad_diff.")
    source = open_base(model)
    used = chosen.settings(settings or AUTHORS_SETTINGS, source.config)
    run = train_with(
        partial(_open, chosen, keep_blocks, used.seed),
        model,
        forget_blocks,
        used,
        output,
        tokenizer=tokenizer,
        checkpoint_every=checkpoint_every,
        overwrite=overwrite,
        progress=progress,
        accelerator=accelerator,
        books=() if keep_blocks is None else [keep_blocks],
    )
    forgotten = used.epochs * sum(map(len, forget_blocks["input_ids"]))
    return Unlearned(
        folder=run.folder,
        vector=_vector(model, run, used, chosen),
        method=chosen,
        losses=run.losses,
        steps=run.steps,
        tokens=forgotten + _kept_tokens(run.steps, used.batch_size, keep_blocks),
        seconds=round(forgotten / max(run.tokens_per_second, 0.1), 1),  # of both texts: a speed counts the first only
        peak_bytes=run.peak_bytes,
    )


@dataclass(frozen=True)
class _Unlearning:
    """A method on a model that was opened: the run's objective."""

    method: UnlearningMethod
    model: TrainingBase
    kept: TokenBlocks | None
    seed: int

    @property
    def configs(self) -> "list[PreTrainedConfig]":
        return [self.model.config] if self.method.compares else []

    @cached_property
    def key(self) -> list[Any]:
        kept = None if self.kept is None else self.kept.digest
        return ["unlearning", self.method.name, asdict(self.method), kept]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"loss": self.method.name, **asdict(self.method), "paper": self.method.paper}
        if self.kept is not None:
            found["kept"] = {"count": len(self.kept), "length": self.kept.length, "sha256": self.kept.digest}
        return found

    def load(self, precision: ComputePrecision, device: torch.device) -> tuple[TextLoss, SecondText | None]:
        before = frozen_model(self.model, precision, device) if self.method.compares else None
        loss = self.method.forget_loss(self.model.config, before, self.seed)
        if self.kept is None:
            return loss, None
        return loss, SecondText(self.kept, self.method.keep_loss(self.model.config, before))


def _open(
    method: UnlearningMethod, keep_blocks: "datasets.Dataset | None", seed: int, model: TrainingBase
) -> _Unlearning:
    kept = None if keep_blocks is None else read_blocks(keep_blocks, model.vocabulary, model.context)
    return _Unlearning(method, model, kept, seed)


def _kept_tokens(steps: int, batch_size: int, blocks: "datasets.Dataset | None") -> int:
    """The tokens of text to keep in all steps: of each round through the text the last batch may be smaller."""
    if blocks is None:
        return 0
    sizes = [len(part) for part in torch.arange(len(blocks)).split(batch_size)]
    return sum(sizes[step % len(sizes)] for step in range(steps)) * len(blocks[0]["input_ids"])


def _vector(
    model: "str | Path | PreTrainedModel", run: Finetuned, settings: TrainingSettings, method: UnlearningMethod
) -> TaskVector:
    """What a method changed, its provenance telling so."""
    if settings.method == "lora":
        base = model if isinstance(model, str | Path) else None
        vector = TaskVector.from_adapter(run.folder, base=base, name=method.name)
    else:
        vector = TaskVector.from_finetuned(model, run.folder, name=method.name)
    return made_by(vector, f"unlearning by {method.name}, {'LoRA' if settings.method == 'lora' else 'full'}")
