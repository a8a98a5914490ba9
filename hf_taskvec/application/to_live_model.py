"""A task vector -> live model: merged into its weights in place, or attached beside them.

A merged edit (`merged_edit`) writes `original + λ·τ` into the weights. An attached edit (`attached_edit`) leaves the
weights alone and adds its share to the layers' outputs.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.attached_edit import AttachedEdit, attachable_layers
from hf_taskvec.application.live_edit import Edit
from hf_taskvec.application.merged_edit import MergedEdit, mergeable_weights
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.models.sharded_weights import is_compiled, without_wrappers


def edit(
    vector: TaskVector,
    model: torch.nn.Module,
    scale: float = 1.0,
    merge: bool = True,
    original: str | Path | None = None,
) -> Edit:
    """See `TaskVector.edit`."""
    model = _checked_model(model, merge)
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
    model = _checked_model(model, merge)
    if merge:
        mergeable_weights(vector, model)
    else:
        attachable_layers(vector, model)


def _checked_model(model: torch.nn.Module, merge: bool) -> torch.nn.Module:
    """The model that is edited: the one inside DistributedDataParallel or `torch.compile`, which calls it."""
    if not isinstance(model, torch.nn.Module):
        raise BadValueError("edit() changes a live model. To write a checkpoint use apply(base, output=...).")
    if is_compiled(model):
        _check_compiled(merge)
    return without_wrappers(model)


def _check_compiled(merge: bool) -> None:
    """Refuse what compiled code would not follow."""
    if not merge:
        raise UnsupportedError(
            "the model is compiled, and its code would not see what is attached to its layers. Merge the vector "
            "(merge=True), which compiled code follows, or attach it to a model that is not compiled."
        )
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None and inductor.freezing:
        raise UnsupportedError(
            "torch._inductor.config.freezing is set, so the compiled model has its weights in its code, and would not "
            "follow an edit. Switch it off, or edit the model before it is compiled."
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
