"""Teachers: models whose predictions a training run learns, on the text that is kept or on text to be guarded."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.training.settings import ComputePrecision
from hf_taskvec.training.text_losses import (
    NEXT_TOKEN,
    SecondText,
    TextLoss,
    divergence,
    frozen_model,
    next_token_loss,
)
from hf_taskvec.training.token_blocks import TokenBlocks, read_blocks
from hf_taskvec.training.trained_model import TrainingBase, open_base

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Teacher:
    """A model whose next-token distribution is learnt, instead of the text's own tokens.

    Args:
        model (`str`, `Path` or `PreTrainedModel`):
            A folder, a Hub id, or a live model, which is left as it is. It needs the trained model's vocabulary.
        weight (`float`, *optional*, defaults to 1.0):
            Above 0 and at most 1: the loss is `weight * KL + (1 - weight) * cross-entropy`.

    Raises:
        `BadValueError`: If the weight is out of its range.

    Example:
        >>> Teacher("microsoft/phi-1_5", weight=0.5).weight
        0.5

    """

    model: "str | Path | PreTrainedModel"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (_is_number(self.weight) and 0 < self.weight <= 1):
            raise BadValueError(f"weight={self.weight!r} of a teacher must be above 0 and at most 1: it is a share.")


@dataclass(frozen=True)
class Guard:
    """Text on which the trained model shall predict what a teacher predicts that has never seen it.

    Each step takes a batch of it beside the batch of the text that is learnt, and adds `weight` times its mean KL
    divergence to the loss.

    Args:
        blocks (`datasets.Dataset`):
            Packed blocks of the text, as `Book.training_blocks` gives them.
        teacher (`str`, `Path` or `PreTrainedModel`):
            The model that has never seen it, of the same vocabulary.
        weight (`float`, *optional*, defaults to 1.0):
            How much it counts beside the text that is learnt; above 0.

    Raises:
        `BadValueError`: If the weight is not a number above 0.
    """

    blocks: "datasets.Dataset"
    teacher: "str | Path | PreTrainedModel"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (_is_number(self.weight) and math.isfinite(self.weight) and self.weight > 0):
            raise BadValueError(f"weight={self.weight!r} of a guard must be a number above 0.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The loss.


@dataclass(frozen=True)
class TeacherLoss:
    """The divergence from a frozen teacher, mixed with the next-token loss unless its weight is 1."""

    teacher: Any
    weight: float = 1.0

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The summed loss of a micro-batch."""
        with torch.no_grad():
            predicted = self.teacher(input_ids=ids, use_cache=False).logits
        loss = divergence(logits, predicted, labels)
        if self.weight == 1.0:
            return loss
        return self.weight * loss + (1.0 - self.weight) * next_token_loss(logits, ids, labels)


# From what a caller gives to the losses.


@dataclass(frozen=True)
class OpenedTeachers:
    """What a run learns from, its models and blocks checked; no weight is loaded yet."""

    kept: TrainingBase | None = None
    share: float = 1.0
    guard: TrainingBase | None = None
    guarded: TokenBlocks | None = None
    guard_weight: float = 1.0

    @property
    def configs(self) -> "list[PreTrainedConfig]":
        """Of the teachers."""
        return [each.config for each in (self.kept, self.guard) if each]

    @cached_property
    def key(self) -> list[Any]:
        """What a run is known by: teachers by every byte of their weights; nothing for the plain loss."""
        kept = [self.share, self.kept.weights.full_digest] if self.kept else []
        if self.guard is None or self.guarded is None:
            return kept
        return [kept, self.guard_weight, self.guard.weights.full_digest, self.guarded.digest]

    def to_json(self) -> dict[str, Any]:
        """The same for a record."""
        found: dict[str, Any] = {"loss": "next token" if self.kept is None else "teacher"}
        if self.kept:
            found |= {"weight": self.share, "teacher": self.kept.record.to_json()}
        if self.guard and self.guarded:
            blocks = {"count": len(self.guarded), "length": self.guarded.length, "sha256": self.guarded.digest}
            found["guard"] = {"weight": self.guard_weight, "teacher": self.guard.record.to_json(), "blocks": blocks}
        return found

    def load(self, precision: ComputePrecision, device: torch.device) -> tuple[TextLoss, SecondText | None]:
        """The loss of the text that is learnt, and the guard; teachers frozen and on their device."""
        loss = NEXT_TOKEN
        if self.kept:
            loss = TextLoss(TeacherLoss(frozen_model(self.kept, precision, device), self.share))
        if self.guard is None or self.guarded is None:
            return loss, None
        taught = TeacherLoss(frozen_model(self.guard, precision, device))
        return loss, SecondText(self.guarded, TextLoss(taught, weight=float(self.guard_weight)))


def open_teachers(
    teacher: "str | Path | PreTrainedModel | Teacher | None", guard: Guard | None, trained: TrainingBase
) -> OpenedTeachers:
    """What a caller asks for, refused if a teacher predicts other tokens than the trained model."""
    given = teacher if teacher is None or isinstance(teacher, Teacher) else Teacher(teacher)
    if guard is not None and not isinstance(guard, Guard):
        raise BadValueError(f"guard must be a Guard(blocks, teacher), not a {type(guard).__name__}.")
    kept = _open_teacher(given.model, trained) if given else None
    if guard is None:
        return OpenedTeachers(kept, given.weight if given else 1.0)
    never_seen = _open_teacher(guard.teacher, trained)
    contexts = [each.context for each in (trained, never_seen) if each.context is not None]
    blocks = read_blocks(guard.blocks, trained.vocabulary, min(contexts, default=None))
    return OpenedTeachers(kept, given.weight if given else 1.0, never_seen, blocks, guard.weight)


def _open_teacher(model: "str | Path | PreTrainedModel", trained: TrainingBase) -> TrainingBase:
    teacher = open_base(model)
    if teacher.vocabulary != trained.vocabulary:
        raise MismatchError(
            f"the teacher {teacher.record.name} predicts {teacher.vocabulary} tokens, the trained model "
            f"{trained.record.name} {trained.vocabulary}: their distributions cannot be compared. Give a teacher of "
            "the same vocabulary, such as the model before the edit."
        )
    one, other = (each.record.tokenizer or "" for each in (teacher, trained))
    # A list of tokens cannot be compared with SentencePiece's file, whose digest has a mark before a colon.
    if one and other and (":" in one) == (":" in other) and one != other:
        raise MismatchError(
            f"the teacher {teacher.record.name} and the trained model {trained.record.name} have different tokenizers: "
            "one token number means two things. Give a teacher of the same vocabulary."
        )
    return teacher
