"""What a sweep moves λ of: a task vector, an edit that is on the model already, or nothing.

This is all that the harness knows of edits. What an edit does to a model, and how, is `hf_taskvec.application`'s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, runtime_checkable
from typing import Protocol as Interface

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.models.layout import is_peft_model


@runtime_checkable
class ScalableEdit(Interface):
    """An edit with a name of its own, whose λ can be set."""

    @property
    def fingerprint(self) -> str:
        """Tells this edit from any other."""

    def set_scale(self, scale: float, /) -> None:
        """Move to another λ."""


@runtime_checkable
class RowScalableEdit(ScalableEdit, Interface):
    """An edit that can give each row of the batch its own λ, so that all λ go through the model together."""

    def set_row_scales(self, scales: list[float], /) -> None:
        """Move to one λ for each row of the batches that follow."""


@runtime_checkable
class EditOnModel(Interface):
    """An edit that says which live model it is on."""

    @property
    def model(self) -> Any:
        """The model."""


class NoEdit:
    """An edit that changes nothing, at any λ: the control."""

    fingerprint = "none"

    def set_scale(self, scale: float, /) -> None:
        """Do nothing."""


def check_change(change: Any, model: Any, merge: bool) -> None:
    """Refuse what is no change of this model.

    Args:
        change (`TaskVector`, `ScalableEdit` or `None`):
            What a caller wants to sweep over.
        model:
            The model that will be asked.
        merge (`bool`):
            How to put a vector on it.
    """
    if change is None or isinstance(change, TaskVector):
        return
    if not isinstance(change, ScalableEdit):
        raise BadValueError(
            f"an edit has a `fingerprint` and `set_scale(λ)`, which {type(change).__name__} lacks; "
            "a task vector gives one: vector.edit(model)"
        )
    if not merge:
        raise BadValueError(
            "merge=False is for a task vector, but the edit is on the model already: "
            "pass the vector, or make the edit with vector.edit(model, merge=False)"
        )
    # `modules` also finds a model inside PEFT's wrapper or that of torch.compile.
    if isinstance(change, EditOnModel) and all(part is not _unwrapped(change.model) for part in model.modules()):
        raise BadValueError(
            "the edit is on another model than the one that is asked, so λ would change nothing: "
            "pass the model that was edited, or the vector itself: sweep(model, vector, ...)"
        )


def _unwrapped(model: Any) -> Any:
    """The model inside PEFT's wrapper, if it has one."""
    return model.get_base_model() if is_peft_model(model) else model


@contextmanager
def on_model(change: TaskVector | ScalableEdit | None, model: Any, merge: bool) -> Iterator[ScalableEdit]:
    """The change as an edit of the model, at λ=0.

    Afterwards it is at λ=0 again; a vector is taken off, and the model is as before, whatever happened.
    """
    if isinstance(change, TaskVector):
        with change.edit(model, 0.0, merge=merge) as made:
            yield made
        return
    edit = NoEdit() if change is None else change
    edit.set_scale(0.0)
    try:
        yield edit
    finally:
        edit.set_scale(0.0)
