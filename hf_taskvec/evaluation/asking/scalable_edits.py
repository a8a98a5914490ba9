"""Edits of a live model, as the harness uses them: something whose λ can be set, or nothing.

This is all that the harness knows of edits. What an edit does to a model, and how, is `hf_taskvec.application`'s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, runtime_checkable
from typing import Protocol as Interface

from hf_taskvec.errors import BadValueError
from hf_taskvec.models.layout import without_peft


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
class SeveralEdits(ScalableEdit, Interface):
    """Several edits that take turns: λ is the number of the one that is on the model, 0 for none."""

    def identity(self, scale: float, /) -> tuple[str, float]:
        """The fingerprint of the one of this number, and its own λ."""


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


def identity_at(edit: ScalableEdit, scale: float) -> tuple[str, float]:
    """What an edit is at a λ, for the store: its fingerprint and λ, or the edit's own answer."""
    return edit.identity(scale) if isinstance(edit, SeveralEdits) else (edit.fingerprint, scale)


def check_edit(edit: Any, model: Any) -> None:
    """Refuse what is no edit, or is one of another model than the one that will be asked."""
    if not isinstance(edit, ScalableEdit):
        raise BadValueError(
            f"an edit has a `fingerprint` and `set_scale(λ)`, which {type(edit).__name__} lacks; "
            "a task vector gives one: vector.edit(model)"
        )
    # `modules` also finds a model inside PEFT's wrapper or that of torch.compile.
    if isinstance(edit, EditOnModel) and all(part is not without_peft(edit.model) for part in model.modules()):
        raise BadValueError(
            "the edit is on another model than the one that is asked, so λ would change nothing: "
            "pass the model that was edited, or the vector itself: sweep(model, vector, ...)"
        )


@contextmanager
def starting_at_zero(edit: ScalableEdit) -> Iterator[ScalableEdit]:
    """The edit, at λ=0 before and afterwards, whatever happens."""
    edit.set_scale(0.0)
    try:
        yield edit
    finally:
        edit.set_scale(0.0)
