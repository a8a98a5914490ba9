"""A task vector -> live model: merged into its weights in place, or attached beside them.

A merged edit (`merged_edit`) writes `original + λ·τ` into the weights. An attached edit (`attached_edit`) leaves the
weights alone and adds its share to the layers' outputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.attached_edit import AttachedEdit
from hf_taskvec.application.live_edit import Edit
from hf_taskvec.application.merged_edit import MergedEdit
from hf_taskvec.errors import BadValueError, UnsupportedError


def edit(
    vector: TaskVector,
    model: torch.nn.Module,
    scale: float = 1.0,
    merge: bool = True,
    original: str | Path | None = None,
) -> Edit:
    """See `TaskVector.edit`."""
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
    if not merge and original is not None:
        raise BadValueError("original= is for merged edits: an attached edit does not touch the weights.")
    new: Edit = MergedEdit(vector, model, original) if merge else AttachedEdit(vector, model)
    try:
        new.set_scale(scale)
    except BaseException:
        new.restore()
        raise
    return new


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
