"""`Edit`: a task vector on a live model, whether it is merged into the weights or attached beside them."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from types import TracebackType
from weakref import ref

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError

# The edits that are not over, in the order in which they were made. Weak, so that nothing is kept alive.
_edits: "list[ref[Edit]]" = []


class Edit(ABC):
    """A vector on a live model, at a scale that can be moved. Made by `TaskVector.edit`.

    It ends with `restore` or `keep`, or with its `with` block, which restores the model. Several edits on one model end
    in the reverse order of that in which they were made; a model, its parts and others that share weights with it count
    as one.

    Attributes:
        vector (`TaskVector`):
            What is on the model.
        model (`torch.nn.Module`):
            The model, without DistributedDataParallel and `torch.compile` around it.
        scale (`float`):
            The present λ.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_taskvec import TaskVector
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> model.model.norm.weight.data.fill_(1.0).sum()
        tensor(8.)
        >>> vector = TaskVector.from_tensors({"model.norm.weight": torch.ones(8)})
        >>> edit = vector.edit(model, 0.5)
        >>> model.model.norm.weight.data.sum()
        tensor(12.)
        >>> edit.set_scale(-1.0)
        >>> model.model.norm.weight.data.sum()
        tensor(0.)
        >>> edit.restore()
        >>> model.model.norm.weight.data.sum()
        tensor(8.)

    """

    def __init__(self, vector: TaskVector, model: torch.nn.Module) -> None:
        self.vector, self.model = vector, model
        self.scale = 0.0
        self._is_over = False
        _edits.append(ref(self, _edits.remove))

    def _newer(self) -> "list[Edit]":
        """The edits on this model that were made after this one and are not over, the last one first."""
        later = [edit for each in _edits[_edits.index(ref(self)) + 1 :] if (edit := each()) is not None]
        if not later:
            return []
        own = _parts(self.model)
        return [edit for edit in reversed(later) if not own.isdisjoint(_parts(edit.model))]

    @property
    def fingerprint(self) -> str:
        """Tells this edit from any other: the digest of the vector's expression and of what that reads."""
        return self.vector.fingerprint

    def set_scale(self, scale: float) -> None:
        """Move to another λ, always from the untouched original.

        Args:
            scale (`float`):
                λ.

        Raises:
            `BadValueError`: If λ is not finite, or so large that a weight is not finite in its dtype (the model then
                keeps the λ that it had); if the edit is over; or if a newer edit on the model is still open.

        """
        self._check_current()
        before, after = self.scale, checked_scale(scale)
        try:
            self._set(after)
        except BaseException:
            self._set(before)  # some weights may have been written already
            raise
        self.scale = after

    def restore(self) -> None:
        """End the edit: the model is as it was before, bit for bit. Does nothing if the edit is over.

        Raises:
            `BadValueError`: If a newer edit on the model is still open.

        """
        if not self._is_over:
            self._check_current()
            self._restore()
            self._end()

    def keep(self) -> None:
        """End the edit, leaving the model as it is now.

        Raises:
            `BadValueError`: If the edit is attached, so that the weights are as they were; if the edit is over; or if a
                newer edit on the model is still open.

        """
        self._check_current()
        self._keep()
        self._end()

    def _check_current(self) -> None:
        if self._is_over:
            raise BadValueError("this edit is over: it was restored or kept. Make a new one with vector.edit(model).")
        if self._newer():
            raise BadValueError(
                "another edit was made after this one, on this model, a part of it or one that shares weights with it. "
                "Restore or keep that one first."
            )

    def _end(self) -> None:
        self._is_over = True
        _edits.remove(ref(self))

    def __enter__(self) -> "Edit":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            for newer in self._newer():
                newer.__exit__(None, None, None)
        self.restore()

    # What merged and attached edits do in different ways.

    @abstractmethod
    def _set(self, scale: float) -> None: ...

    @abstractmethod
    def _restore(self) -> None: ...

    @abstractmethod
    def _keep(self) -> None: ...


def _parts(model: torch.nn.Module) -> set[Hashable]:
    """What a model consists of, modules and memory: two models with a part in common are not edited independently."""
    from transformers.pytorch_utils import id_tensor_storage

    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel() and not tensor.is_meta]
    return {*map(id, model.modules()), *map(id_tensor_storage, tensors)}


def checked_scale(scale: float) -> float:
    """λ as a float, after making sure that it is finite."""
    value = float(scale)
    if not abs(value) < float("inf"):
        raise BadValueError(f"a model cannot be edited at a scale of {value}.")
    return value
