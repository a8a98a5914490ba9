"""The forward of a model with an attached edit, which must not miss a use of a changed weight."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hf_taskvec.application.layer_changes import LayerChange, instead, is_quantised, is_used
from hf_taskvec.application.live_edit import Edit
from hf_taskvec.application.replaced_forward import ReplacedForward
from hf_taskvec.application.row_scales import RowScales
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.models.sharded_weights import has_fsdp


class WatchedForward(ReplacedForward):
    """In the place of a model's forward: it reads the batch's rows, and refuses uses that an edit would miss.

    A model may use a weight elsewhere than in the weight's own layer (`F.linear(x, self.router.weight)`), where a
    change that is attached to the layer is not added. Watching costs a few microseconds for each operation, so it is
    done for the first call of each kind: with and without gradients, cache, mask, and so on.

    Args:
        model (`torch.nn.Module`):
            The model.
        changes (`Sequence[LayerChange]`):
            What is attached to its layers.
        scales (`RowScales`):
            λ.
        edit (`Edit`):
            The edit, which lives as long as it is on the model, so that a `with` block around it can end it.

    """

    def __init__(self, model: torch.nn.Module, changes: Sequence[LayerChange], scales: RowScales, edit: Edit) -> None:
        super().__init__(model)
        self._model, self._changes, self._scales, self._edit = model, changes, scales, edit
        self._seen: set[Any] = set()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        named = ("input_ids", "inputs_embeds", getattr(self._model, "main_input_name", "input_ids"))
        candidates = (*args, *(kwargs.get(name) for name in named))
        batch = next((each for each in candidates if isinstance(each, torch.Tensor)), None)
        kind = (
            self._model.training,
            torch.is_grad_enabled(),
            len(args),
            frozenset(name for name, value in kwargs.items() if value is not None),
            batch is not None and batch.shape[1:2] == (1,),  # the next token alone
        )
        # A picture or a sound does not tell how many positions the model makes of it.
        tells_positions = batch is not None and (batch.ndim < 3 or batch is kwargs.get("inputs_embeds"))
        with self._scales.in_batch(batch, tells_positions):
            if kind in self._seen or self._scales.are_zero:
                return self.forward(*args, **kwargs)
            output = self._watched(*args, **kwargs)
        self._seen.add(kind)
        return output

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        before = self._times()
        with _Watch(self._parameters, has_fsdp(self._model)) as watch:
            output = self.forward(*args, **kwargs)
        for name in watch.uses - (self._times() - before):
            raise UnsupportedError(
                f"{name}: {type(self._model).__name__} also uses it outside of its own layer, where a change that is "
                f"attached to the layer is not added. {instead(name)}"
            )
        return output

    def _times(self) -> Counter[str]:
        """How often the change of each parameter was added so far."""
        times: Counter[str] = Counter()
        for change in self._changes:
            for name in change.names.values():
                times[name] += change.times
        return times

    def _parameters(self) -> dict[int, tuple[str, torch.Tensor]]:
        return {
            id(tensor): (name, tensor)
            for change in self._changes
            for kind, name in change.names.items()
            if not is_quantised(change.layer) and (tensor := change.layer._parameters.get(kind)) is not None
        }


class _Watch(TorchFunctionMode):
    """A block that counts the uses of some tensors.

    Args:
        find (`Callable`):
            Gives them, by their ids.
        anew (`bool`):
            Whether to ask again at each operation: FSDP puts gathered weights in the place of its parts while a layer
            is at work.
    """

    def __init__(self, find: Callable[[], Mapping[int, tuple[str, torch.Tensor]]], anew: bool) -> None:
        super().__init__()
        self._find, self._anew = find, anew
        self._tensors = find()
        self.uses: Counter[str] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = self._find() if self._anew else self._tensors
        output = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves((args, kwargs)):
            if (found := tensors.get(id(each))) is not None and is_used(found[1], output, each):
                self.uses[found[0]] += 1
        return output
