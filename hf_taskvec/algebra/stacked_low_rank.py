"""A low-rank change of each matrix in a stack: LoRA on experts that are one parameter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from hf_taskvec.algebra.deltas import Delta, DeltaWriter, ReadSource
from hf_taskvec.algebra.sources import Source
from hf_taskvec.errors import MismatchError
from hf_taskvec.typed_values import typed


@dataclass(frozen=True)
class StackedLowRank(Delta):
    """`scaling * left[n] @ right[n]` for each matrix n of a stack, such as LoRA's on fused experts.

    Args:
        left (`Source`):
            Of shape (matrices, rows, rank).
        right (`Source`):
            Of shape (matrices, rank, columns).
        scaling (`float`, *optional*, defaults to 1.0):
            What the products are multiplied by.

    """

    kind = "stacked-low-rank"

    left: Source
    right: Source
    scaling: float = 1.0

    def __post_init__(self) -> None:
        left, right = self.left.shape, self.right.shape
        if len(left) != 3 or len(right) != 3 or left[0] != right[0] or left[2] != right[1]:
            raise MismatchError(
                f"two stacks of factors have shapes {list(left)} and {list(right)}, which cannot be multiplied."
            )

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return (*self.left.shape[:2], self.right.shape[2])

    @property
    @override
    def sources(self) -> tuple[Source, ...]:
        return (self.left, self.right)

    @property
    @override
    def rank(self) -> int:
        return min(self.left.shape[2], *self.shape[1:])

    @override
    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        left, right = self.left.read(), self.right.read()
        for number in range(start, stop):  # whole stacks of factors in fp64 would be many times a tile
            matrix = out[number - start]
            matrix.addmm_(left[number].to(out), right[number].to(out), alpha=weight * self.scaling)

    @override
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any]:
        left, right = writer.source(f"{key}.left", self.left), writer.source(f"{key}.right", self.right)
        return {"kind": self.kind, "scaling": self.scaling, "left": left, "right": right}

    @classmethod
    @override
    def from_record(cls, entry: Mapping[str, Any], source: ReadSource) -> Delta:
        left, right = source(entry["left"]), source(entry["right"])
        return cls(left, right, typed(float, entry["scaling"], "scaling"))
