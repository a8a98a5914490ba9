"""Fine-tuned models to run: live ones, or a base with a task vector that is applied only while it is needed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.argument_checks import check_model, check_vectors
from hf_taskvec.models.model_facts import evaluation_mode


@dataclass(frozen=True)
class EditedModel:
    """A model and a task vector, applied only while the analysis runs it: many fine-tunes, one model in memory.

    Args:
        model (`torch.nn.Module`):
            The live base. It is as before, bit for bit, whenever it is not being run.
        vector (`TaskVector`):
            The change.
        scale (`float`, *optional*, defaults to 1.0):
            λ.
        merge (`bool`, *optional*, defaults to `True`):
            Whether the change is added to the weights or attached beside them; see `TaskVector.edit`.

    Example:
        >>> task_correlation(EditedModel(base, vector_a), EditedModel(base, vector_b), data_a, data_b)  # doctest: +SKIP

    """

    model: torch.nn.Module
    vector: TaskVector
    scale: float = 1.0
    merge: bool = True


#: What the analysis takes as a fine-tuned model.
FineTuned: TypeAlias = torch.nn.Module | EditedModel


def model_of(fine_tuned: FineTuned) -> Any:
    """The live module of a fine-tuned model; of an `EditedModel` it is the base."""
    if isinstance(fine_tuned, EditedModel):
        check_vectors(fine_tuned.vector)
        fine_tuned = fine_tuned.model
    check_model(fine_tuned, "a live model, or EditedModel(model, vector)")
    return fine_tuned


@contextmanager
def applied_model(fine_tuned: FineTuned) -> Iterator[Any]:
    """The live module in evaluation mode, with its vector applied; all is put back afterwards."""
    model = model_of(fine_tuned)
    applied: AbstractContextManager[Any] = nullcontext()
    if isinstance(fine_tuned, EditedModel):
        applied = fine_tuned.vector.applied_to(model, fine_tuned.scale, merge=fine_tuned.merge)
    with applied, evaluation_mode(model):
        yield model
