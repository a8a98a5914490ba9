"""A task vector -> live model: merged into its weights in place, or attached beside them.

A merged edit (`merged_edit`) writes `original + λ·τ` into the weights. An attached edit (`attached_edit`) leaves the
weights alone and adds its share to the layers' outputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.attached_edit import AttachedEdit, attachable_layers
from hf_taskvec.application.live_edit import Edit
from hf_taskvec.application.merged_edit import MergedEdit, mergeable_weights
from hf_taskvec.errors import BadValueError, UnsupportedError


def edit(
    vector: TaskVector,
    model: torch.nn.Module,
    scale: float = 1.0,
    merge: bool = True,
    original: str | Path | None = None,
) -> Edit:
    """See `TaskVector.edit`."""
    _check_model(model)
    if not merge and original is not None:
        raise BadValueError("original= is for merged edits: an attached edit does not touch the weights.")
    new: Edit = MergedEdit(vector, model, original) if merge else AttachedEdit(vector, model)
    try:
        new.set_scale(scale)
    except BaseException:
        new.restore()
        raise
    return new


def check_editable(vector: TaskVector, model: torch.nn.Module, merge: bool = True) -> None:
    """Refuse what `edit` refuses, from names, shapes and kinds alone: no weight is copied, and no layer touched.

    Args:
        vector (`TaskVector`):
            What is to be put on the model.
        model (`torch.nn.Module`):
            The model.
        merge (`bool`, *optional*, defaults to `True`):
            As for `TaskVector.edit`.

    Raises:
        `MismatchError`: If the vector does not fit the model.
        `UnsupportedError`: If the model cannot be edited in this way.
    """
    _check_model(model)
    if merge:
        mergeable_weights(vector, model)
    else:
        attachable_layers(vector, model)


def _check_model(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise BadValueError("edit() changes a live model. To write a checkpoint use apply(base, output=...).")
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"):
        raise UnsupportedError(
            f"the model is wrapped by {type(model).__name__}, on which edits are not tested. Edit the model inside "
            "(model.module, or model._orig_mod of a compiled one)."
        )
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise UnsupportedError(
            "the model was compiled in place, with model.compile(), on which edits are not tested. Edit it before it "
            "is compiled, or load it again."
        )


@contextmanager
def applied_to(
    vector: TaskVector,
    model: torch.nn.Module,
    scale: float = 1.0,
    merge: bool = True,
    original: str | Path | None = None,
) -> Iterator[Edit]:
    """See `TaskVector.applied_to`."""
    with edit(vector, model, scale, merge, original) as new:
        yield new
