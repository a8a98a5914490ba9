"""Stored tensors seen in another form: strided views, and several in one piece."""

from dataclasses import dataclass
from functools import cached_property

import torch
from typing_extensions import override

from hf_taskvec.algebra.sources import Source, View, numel
from hf_taskvec.errors import MismatchError


@dataclass(frozen=True)
class Strided(View):
    """Some elements of a stored tensor, as a view: an expert of several, a block of rows, their transpose.

    Args:
        source (`Source`):
            The stored tensor, whose elements are counted as if it were contiguous.
        size (`tuple[int, ...]`):
            The view's shape.
        stride (`tuple[int, ...]`):
            How many elements lie between neighbours along each dimension.
        offset (`int`, *optional*, defaults to 0):
            The first element.

    Example:
        >>> from hf_taskvec.algebra.sources import InMemory
        >>> Strided(InMemory(torch.arange(12.0)), (2, 2), (1, 6), 3).read()
        tensor([[ 3.,  9.],
                [ 4., 10.]])

    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        last = self.offset + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))
        if numel(self.size) and not 0 <= last < numel(self.source.shape):
            raise MismatchError(
                f"a view of shape {list(self.size)} does not lie within a tensor of shape {list(self.source.shape)}."
            )

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.size

    @override
    def read(self) -> torch.Tensor:
        tensor = self.source.read().contiguous()
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    @property
    @override
    def place(self) -> str:
        return f"[{self.size}, {self.stride}, {self.offset}]"


@dataclass(frozen=True)
class Joined(Source):
    """Several stored tensors in one piece, one after the other along a dimension. Reading it makes a copy."""

    sources: tuple[Source, ...]
    dim: int = 0

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        shape = list(self.sources[0].shape)
        shape[self.dim] = sum(source.shape[self.dim] for source in self.sources)
        return tuple(shape)

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.sources[0].dtype

    @override
    def read(self) -> torch.Tensor:
        return torch.cat([source.read() for source in self.sources], dim=self.dim)

    @cached_property
    @override
    def handle(self) -> str:
        return f"{'+'.join(source.handle for source in self.sources)}|{self.dim}"

    @property
    @override
    def roots(self) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(root for source in self.sources for root in source.roots))
