"""LoRA on parameters that are no layer's weight, experts in one tensor above all: PEFT's `target_parameters`.

PEFT keeps one pair of matrices for all experts of a parameter (E, a, b): `lora_A` has rank times E rows, one expert
after the other, and `lora_B` as many columns, one rank after the other. The change of expert e is the product of its
rows and columns, so it stays a product of two views, whichever part of the parameter a stored tensor is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_taskvec.algebra.deltas import Delta, LowRank
from hf_taskvec.algebra.sources import Source
from hf_taskvec.algebra.stacked_low_rank import StackedLowRank
from hf_taskvec.algebra.views import Strided
from hf_taskvec.errors import CorruptFileError, UnsupportedError
from hf_taskvec.models.layout import Layout
from hf_taskvec.models.restructured import Part


class TargetParameter(NamedTuple):
    """A parameter that PEFT changes as it is."""

    #: the live name
    name: str
    shape: tuple[int, ...]


def wrapped_parameters(config: Mapping[str, Any], layout: Layout) -> dict[str, TargetParameter]:
    """Path of PEFT's wrapper -> the parameter that it changes.

    A module with several targets is wrapped once for each, in the order in which it has them; the last is outermost.
    """
    targets = [str(each) for each in config.get("target_parameters") or ()]
    live = {stored: name for name, stored in layout.renamed.items()}
    every = {live.get(name, name): shape for name, shape in layout.shapes.items() if name.endswith(".weight")}
    modules: dict[str, list[TargetParameter]] = {}
    for name, shape in {**every, **layout.bare}.items():
        if any(name == target or name.endswith(f".{target}") for target in targets):
            modules.setdefault(name.rpartition(".")[0], []).append(TargetParameter(name, shape))
    return {
        module + ".base_layer" * (len(found) - 1 - number): target
        for module, found in modules.items()
        for number, target in enumerate(found)
    }


def changed_tensors(
    target: TargetParameter, down: Source, up: Source, scaling: float, layout: Layout
) -> dict[str, Delta]:
    """Stored name -> change, of everything that is made of the parameter.

    Args:
        target (`TargetParameter`):
            The parameter.
        down (`Source`):
            PEFT's `lora_A`.
        up (`Source`):
            PEFT's `lora_B`.
        scaling (`float`):
            What the products are multiplied by.
        layout (`Layout`):
            The base's.

    Raises:
        `CorruptFileError`: If the factors are not those of the parameter.
        `UnsupportedError`: If the elements are stored in another order, so that no products of views are.
    """
    name, shape = target
    whole = shape if len(shape) == 3 else (1, *shape)
    factors = _Factors.of(name, whole, down, up, name in layout.bare_transposed and len(shape) == 3)
    if name not in layout.restructured:
        stride = (whole[1] * whole[2], whole[2], 1)[3 - len(shape) :]
        return {layout.canonical(name): factors.change(Part(name, shape, stride, 0), scaling)}
    found = {}
    for stored, parts in layout.parts.items():
        if any(part.live == name for part in parts):
            if len(parts) > 1:
                raise _not_in_parts(name, layout)
            found[stored] = factors.change(parts[0], scaling)
    if not found:
        raise _not_in_parts(name, layout)
    return found


def _not_in_parts(name: str, layout: Layout) -> UnsupportedError:
    return UnsupportedError(
        f"the adapter changes {name}, which transformers stores in another order than the live {layout.architecture} "
        "has. Merge the adapter into its base and use from_finetuned()."
    )


@dataclass(frozen=True)
class _Factors:
    """The factors of a parameter (E, a, b): what `sum_r left[e, a, r] right[e, r, b]` reads, as strided views."""

    shape: tuple[int, ...]
    rank: int
    left: Source
    #: of an expert, a row, a rank
    left_stride: tuple[int, int, int]
    right: Source
    #: of an expert, a rank, a column
    right_stride: tuple[int, int, int]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], down: Source, up: Source, is_transposed: bool) -> "_Factors":
        experts, rows, columns = shape
        inputs, outputs = (rows, columns) if is_transposed else (columns, rows)
        count = down.shape[0] if len(down.shape) == 2 else 0
        if not count or count % experts or down.shape != (count, inputs) or up.shape != (outputs, count):
            raise CorruptFileError(
                f"the factors of {name} have shapes {list(down.shape)} and {list(up.shape)}, which are not those of a "
                f"parameter of shape {list(shape)}. Is it the adapter's base?"
            )
        rank = count // experts
        of_down, of_up = (rank * inputs, inputs, 1), (1, experts, count)  # expert, rank, input; expert, rank, output
        if is_transposed:
            left_stride, right_stride = (of_down[0], of_down[2], of_down[1]), of_up
            return cls(shape, rank, down, left_stride, up, right_stride)
        return cls(shape, rank, up, (of_up[0], of_up[2], of_up[1]), down, of_down)

    def change(self, part: Part, scaling: float) -> Delta:
        """The change of a part of the parameter."""
        _, rows, columns = self.shape
        expert, rest = divmod(part.offset, rows * columns)
        row, column = divmod(rest, columns)
        axes = _axes(part, rows, columns)
        step = dict(zip(axes, part.stride, strict=True))
        size = dict(zip(axes, part.shape, strict=True))
        down_rows, over_columns = step.get("row", 0) // columns, step.get("column", 0)
        each = step.get("expert", 0) // (rows * columns)
        left = _View(
            self.left,
            expert * self.left_stride[0] + row * self.left_stride[1],
            {"expert": each * self.left_stride[0], "row": down_rows * self.left_stride[1], "rank": self.left_stride[2]},
        )
        right = _View(
            self.right,
            expert * self.right_stride[0] + column * self.right_stride[2],
            {
                "expert": each * self.right_stride[0],
                "rank": self.right_stride[1],
                "column": over_columns * self.right_stride[2],
            },
        )
        size["rank"] = self.rank
        *stack, one, other = axes
        first, second = (left, right) if one == "row" else (right, left)  # or else it is stored transposed
        kind = StackedLowRank if stack else LowRank
        return kind(first.along([*stack, one, "rank"], size), second.along([*stack, "rank", other], size), scaling)


@dataclass(frozen=True)
class _View:
    """Where a factor is in a stored tensor."""

    source: Source
    offset: int
    stride: Mapping[str, int]

    def along(self, axes: list[str], size: Mapping[str, int]) -> Source:
        return Strided(
            self.source, tuple(size[each] for each in axes), tuple(self.stride[each] for each in axes), self.offset
        )


def _axes(part: Part, rows: int, columns: int) -> list[str]:
    """Along which axis of the live parameter each dimension of a part lies."""
    found: list[str | None] = []
    for size, stride in zip(part.shape, part.stride, strict=True):
        if size == 1:
            found.append(None)  # any that is left
        elif stride % (rows * columns) == 0:
            found.append("expert")
        else:
            found.append("row" if stride % columns == 0 else "column")
    names = ["expert", "row", "column"] if len(found) == 3 else ["row", "column"]
    left = [each for each in names if each not in found]
    return [each or left.pop(0) for each in found]
