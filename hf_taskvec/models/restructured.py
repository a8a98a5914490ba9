"""Which part of a live parameter a stored tensor is, where transformers joins or splits tensors as it loads them.

Experts are stored one by one and live in one tensor of three dimensions; some projections are stored in one piece and
live apart. transformers' own conversion moves the elements and computes nothing, so each stored tensor consists of
strided views of live parameters. They are found by running that conversion on tensors without data.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_taskvec.algebra.blocks import Block

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

    def along(self, live: tuple[int, ...]) -> tuple[int | None, ...] | None:
        """For each of its dimensions the one of a live parameter of that shape, `None` for a single element.

        `None` instead of all if it does not lie along dimensions of the parameter.
        """
        first, strides = self._first(live), _strides(live)
        found: list[int | None] = []
        for size, stride in zip(self.shape, self.stride, strict=True):
            fits = (d for d in range(len(live)) if strides[d] == stride and first[d] + size <= live[d])
            dim = next((each for each in fits if each not in found), None)
            if size != 1 and dim is None:
                return None
            found.append(None if size == 1 else dim)
        return tuple(found)

    def _first(self, live: tuple[int, ...]) -> list[int]:
        """Where its first element is, along each dimension of the live parameter."""
        return [self.offset // each % size for each, size in zip(_strides(live), live, strict=True)]

    def held(self, live: tuple[int, ...], block: Block) -> "HeldPart":
        """What of it a process has that holds a block of the live parameter, which has the shape `live`."""
        along, first = self.along(live), self._first(live)
        assert along is not None
        sizes = {dim: size for dim, size in zip(along, self.shape, strict=True) if dim is not None}
        places = [
            range(bisect_left(held, start), bisect_left(held, start + sizes.get(dim, 1)))
            for dim, (start, held) in enumerate(zip(first, block.positions, strict=True))
        ]
        positions: list[list[int]] = [[] for _ in along]
        if all(each for dim, each in enumerate(places) if dim not in sizes):
            positions = [[0] if d is None else [block.positions[d][i] - first[d] for i in places[d]] for d in along]
        return HeldPart(Block.of(positions), along, tuple(places), self.dim)


class HeldPart(NamedTuple):
    """What a process has of a part of a stored tensor, and where that is in its piece of the live parameter."""

    #: which elements of the part
    block: Block
    #: see `Part.along`
    along: tuple[int | None, ...]
    #: for each dimension of the live parameter the places in the piece
    places: tuple[range, ...]
    #: what is held is `narrow(dim, start, block.shape[dim])` of what is held of the stored tensor
    dim: int
    start: int = 0

    def of_live(self, piece: torch.Tensor) -> torch.Tensor:
        """It, of the process's piece of the live parameter."""
        if 0 in self.block.shape:
            return piece.new_empty(self.block.shape)
        for dim, each in enumerate(self.places):
            piece = piece.narrow(dim, each.start, len(each))
        kept = [dim for dim in self.along if dim is not None]
        alone = [dim for dim in range(piece.ndim) if dim not in kept]
        piece = piece.permute(*alone, *kept)[(0,) * len(alone)]
        for place, found in enumerate(self.along):
            piece = piece.unsqueeze(place) if found is None else piece
        return piece

    def of_stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """It, of what is held of the stored tensor."""
        return tensor.narrow(self.dim, self.start, self.block.shape[self.dim]) if self.block.shape else tensor


def can_be_sharded(parts: Sequence[Part], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether what a process holds of a stored tensor is a block, if live parameters of these shapes are sharded alike.

    Args:
        parts (`Sequence[Part]`):
            The stored tensor's.
        shapes (`Sequence[tuple[int, ...]]`):
            Those of the live parameters.
    """
    found = set()
    for part, shape in zip(parts, shapes, strict=True):
        along = part.along(shape)
        if along is None:
            return False
        if len(parts) > 1:  # parts of it are held alike, if they differ in the dimension alone in which they are joined
            if set(along) != set(range(len(shape))):
                return False
            found.add((along, tuple(size for dim, size in enumerate(shape) if dim != along[part.dim])))
    return len(found) <= 1


def held_of_parts(parts: Sequence[Part], held: Sequence[HeldPart]) -> tuple[Block, list[HeldPart]]:
    """What a process holds of a stored tensor, and where each part of that is in it."""
    if len(parts) == 1:
        return held[0].block, list(held)
    dim, placed, positions = parts[0].dim, list[HeldPart](), list[int]()
    for part, each in zip(parts, held, strict=True):
        placed.append(each._replace(start=len(positions)))
        positions += [part.start + place for place in each.block.positions[dim]]
    others = held[0].block.positions
    return Block.of([*others[:dim], positions, *others[dim + 1 :]]), placed


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Those of a contiguous tensor, none of them 0."""
    return [max(1, prod(shape[dim + 1 :])) for dim in range(len(shape))]


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
