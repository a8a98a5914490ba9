"""A task vector merged into the weights of a live model, in place.

It writes `original + λ·τ` into the weights, always from the untouched original, and restores that bit for bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from hf_taskvec.algebra.blocks import PartOf
from hf_taskvec.algebra.linear_expression import check_shape
from hf_taskvec.algebra.rounding import FLOATS
from hf_taskvec.algebra.sources import Source, numel
from hf_taskvec.algebra.sums import Sum
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits_live
from hf_taskvec.application.live_edit import Edit
from hf_taskvec.errors import BadValueError, ChangedSourceError, MismatchError, UnsupportedError
from hf_taskvec.models.checkpoint import Checkpoint, open_checkpoint
from hf_taskvec.models.live_model import LiveWeight, live_weights
from hf_taskvec.models.sharded_weights import failed_anywhere, meshes_of, reshard, size_of_whole
from hf_taskvec.threads import workers

_Result = TypeVar("_Result")


class MergedEdit(Edit):
    """The vector merged into the weights. Holds one copy of the changed weights, or none if they can be re-read.

    Of weights that are sharded over processes each process writes, and keeps, its own part. All of them make the edit,
    and move λ, together.

    Args:
        vector (`TaskVector`):
            What to merge.
        model (`torch.nn.Module`):
            The model to change.
        original (`str` or `Path`, *optional*):
            What the model was loaded from, to re-read the weights from.

    """

    def __init__(self, vector: TaskVector, model: torch.nn.Module, original: str | Path | None = None) -> None:
        self._weights = mergeable_weights(vector, model)
        self._meshes = meshes_of(weight.sharded for weight in self._weights.values() if weight.is_sharded)
        self._originals = self._in_all(lambda: self._found_originals(original), "could not begin the edit")
        self._sizes: dict[str, float] = {}
        super().__init__(vector, model)

    def _found_originals(self, original: str | Path | None) -> dict[str, Source]:
        stored = open_checkpoint(original) if original is not None else None
        return {
            name: weight.original() if stored is None else _same(stored, name, weight)
            for name, weight in self._weights.items()
        }

    def __getattr__(self, name: str) -> Any:
        # Python calls this for attributes that do not exist. A method `set_row_scales` that raises would exist, so code
        # that asks with hasattr() or isinstance() whether an edit can have one λ per row, as the evaluation's sweep
        # does, would get the answer yes.
        if name == "set_row_scales":
            raise AttributeError("a merged edit has one λ for the whole model. For one λ per row use merge=False.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def set_vector(self, vector: TaskVector) -> None:
        """Put another vector on the model in place of this one, at the present λ, always from the untouched original.

        Args:
            vector (`TaskVector`):
                It may change the parameters that the edit was made for, and no others.

        Raises:
            `MismatchError`: If it changes another parameter, or one of another shape.
            `BadValueError`: If a weight is not finite in its dtype (the model then keeps the vector that it had); if
                the edit is over; or if a newer edit on the model is still open.

        """
        self._check_current()
        for name in vector:
            if name not in self._weights:
                raise MismatchError(f"the edit was not made for {name}. Make a new one with vector.edit(model).")
            check_shape(name, self._weights[name].shape, vector.shape(name))
        before, self.vector = self.vector, vector
        try:
            self._set(self.scale)
        except BaseException:
            self.vector = before
            self._set(self.scale)  # some weights may have been written already
            raise

    def _set(self, scale: float) -> None:
        if self._meshes:
            reshard(self.model)
            self._find_sizes()
        self._in_all(lambda: self._write(scale), f"could not write its part of the weights at λ = {scale:g}")

    def _in_all(self, work: Callable[[], _Result], otherwise: str) -> _Result:
        """Do it, in all processes that hold parts of the weights: what fails in one of them fails in all."""
        try:
            result = work()
        except Exception:
            failed_anywhere(self._meshes, True)
            raise
        if self._meshes and failed_anywhere(self._meshes, False):
            raise BadValueError(f"another process {otherwise}; see there.")
        return result

    def _find_sizes(self) -> None:
        """The size of matrices of which this process has a part, where `Sum` asks for it: see `Sum.target_size`."""
        for name, weight in self._weights.items():
            if name in self._sizes or name not in self.vector or weight.block is None:
                continue
            if weight.dtype == torch.bfloat16 and any(term.delta.factors for term in self.vector[name].terms):
                whole = weight.sharded, weight.shape, weight.block
                self._sizes[name] = size_of_whole(*whole, self._originals[name].read())

    def _write(self, scale: float) -> None:
        inference = torch.is_inference_mode_enabled()  # which other threads do not know

        def write(item: tuple[str, LiveWeight]) -> None:
            name, weight = item
            with torch.inference_mode(inference):
                self._set_one(name, weight, scale)

        # What is offloaded is held whole while it is written, and a device has queues of its own.
        together = all(weight.is_on_cpu for weight in self._weights.values())
        with workers(None if together else 1) as run:
            largest_first = sorted(self._weights.items(), key=lambda each: -numel(each[1].shape))
            for _ in run(write, largest_first):  # no thread is left with a large one at the end
                pass

    def _set_one(self, name: str, weight: LiveWeight, scale: float) -> None:
        original = self._originals[name]
        if scale == 0.0 or name not in self.vector:
            weight.restore(original)
            return
        direct = weight.is_in_place
        target = weight.value() if direct else torch.empty(original.shape, dtype=original.dtype, device="cpu")
        terms, size = self.vector[name].terms, self._sizes.get(name)
        whole = Sum(weight.shape, terms, original, scale, target.device, weight.block, size)
        whole.into(target, name)
        if not direct:
            weight.write(target)

    def _restore(self) -> None:
        reshard(self.model)
        for name, weight in self._weights.items():
            weight.restore(self._originals[name])

    def _keep(self) -> None:
        self._originals.clear()


def mergeable_weights(vector: TaskVector, model: torch.nn.Module) -> dict[str, LiveWeight]:
    """The weights of a model that a vector changes, by their canonical names; none is copied.

    Args:
        vector (`TaskVector`):
            What is to be merged.
        model (`torch.nn.Module`):
            The model.

    Raises:
        `MismatchError`: If the vector does not fit the model.
        `UnsupportedError`: If a change cannot be merged into one of them.

    """
    weights = live_weights(model)
    check_fits_live(vector, model, weights)
    for name in vector:
        _check_writable(weights[name])
    return {name: weights[name] for name in vector}


def _check_writable(weight: LiveWeight) -> None:
    if weight.dtype not in FLOATS or weight.is_quantised:
        raise UnsupportedError(
            f"{weight.name} is quantised ({weight.dtype}), so a change cannot be merged into it without losing what is "
            "smaller than a quantisation step. Attach a low-rank vector instead: vector.edit(model, merge=False)."
        )


def _same(stored: Checkpoint, name: str, weight: LiveWeight) -> Source:
    """The stored original of a live weight, after making sure that it is just that."""
    source: Source | None = stored.tensors.get(name)
    if source is not None and weight.block is not None:
        source = PartOf(source, weight.block)
    if source is None or not torch.equal(source.read(), weight.value().detach().cpu()):
        raise ChangedSourceError(
            f"{name}: {stored.where} is not what the live model was loaded from. Leave out "
            "original=, and the edit keeps a copy in memory."
        )
    return source
