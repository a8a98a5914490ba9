"""Which part of a live parameter a stored tensor is, where transformers joins or splits tensors as it loads them.

Experts are stored one by one and live in one tensor of three dimensions; some projections are stored in one piece and
live apart. transformers' own conversion moves the elements and computes nothing, so each stored tensor consists of
strided views of live parameters. They are found by running that conversion on tensors without data.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class Part(NamedTuple):
    """A part of a stored tensor, and where it is in a contiguous live parameter."""

    #: the live parameter
    live: str
    #: shape, strides and first element of the view
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    #: the part is `narrow(dim, start, shape[dim])` of the stored tensor
    dim: int = 0
    start: int = 0

    def of_live(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part, of the live parameter."""
        return parameter.as_strided(self.shape, self.stride, parameter.storage_offset() + self.offset)

    def of_stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part, of the stored tensor."""
        return tensor.narrow(self.dim, self.start, self.shape[self.dim]) if self.shape else tensor


def stored_parts(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, tuple[Part, ...]]]:
    """What a model on the meta device has, what is stored of it, and how the one is made of the other.

    Args:
        model (`PreTrainedModel`):
            A model on the meta device.

    Returns:
        `tuple`: Live name -> tensor; stored name -> tensor, the same one where it is stored as it is; stored name ->
        its parts, where it is not and the conversion only moves elements.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # Tensors that are stored as they are come through the conversion as the same objects, so each gets one of its own.
    live = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    with torch.no_grad(), _Views() as views:
        disk = revert_weight_conversion(model, dict(live))
    names = {_memory(tensor): name for name, tensor in live.items()}
    same = {id(tensor) for tensor in live.values()}
    parts = {name: views.parts(tensor, names) for name, tensor in disk.items() if id(tensor) not in same}
    return live, disk, {name: found for name, found in parts.items() if found}


class _Views(TorchDispatchMode):
    """A block in which copies stay views of what is copied, and what is joined remembers its parts."""

    def __init__(self) -> None:
        super().__init__()
        #: the memory of something that was joined -> it, its parts, and along which dimension
        self._joined: dict[int, tuple[torch.Tensor, list[torch.Tensor], int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _aten.clone.default:
            return args[0]
        if function in (_aten.view.default, _aten._unsafe_view.default):
            try:
                return _aten.view.default(*args)
            except RuntimeError:  # of a copy that is a view here: it cannot be followed further
                return torch.empty(args[1], dtype=args[0].dtype, device="meta")
        made = function(*args, **(kwargs or {}))
        if function is _aten.cat.default:
            self._joined[_memory(made)] = (made, list(args[0]), args[1] if len(args) > 1 else 0)
        return made

    def parts(self, tensor: torch.Tensor, names: Mapping[int, str]) -> tuple[Part, ...]:
        """The parts of a stored tensor, by the memory that live parameters have; none if they are not known."""
        if (name := names.get(_memory(tensor))) is not None:
            return (_part(name, tensor),)
        whole, joined, dim = self._joined.get(_memory(tensor), (None, [], 0))
        if whole is None or tensor.shape != whole.shape or tensor.stride() != whole.stride():
            return ()
        found, start = [], 0
        for each in joined:
            if (name := names.get(_memory(each))) is None:
                return ()
            found.append(_part(name, each)._replace(dim=dim % tensor.ndim, start=start))
            start += each.shape[dim]
        return tuple(found)


def _part(name: str, view: torch.Tensor) -> Part:
    return Part(name, tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
