"""The geometry of task vectors: norms and cosines, in total and layer by layer, in one pass over their files.

The cosine of two vectors is also a cheap proxy of their tasks' correlation: no model, no data. It tells irrelevant
tasks from aligned ones, but its size is another: fine-tunes of one base share directions that have nothing to do with
the task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.parameter_names import layer_of
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.argument_checks import check_vectors
from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError, did_you_mean
from hf_taskvec.escaping import visible
from hf_taskvec.figures import Plottable, save_figure
from hf_taskvec.progress import progress_bar
from hf_taskvec.threads import workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The name of what belongs to no layer: embeddings, the head, the last norm.
OUTSIDE = "outside"
_Matrix = tuple[tuple[float, ...], ...]


#: What a figure of cosines shows: the total; each pair and each norm by layer; or the parts of each layer.
CosineView = Literal["total", "layers", "parts"]


@dataclass(frozen=True)
class CosineMatrix(Plottable):
    """Cosines between vectors, and their norms; made by `cosine_matrix`. `matrix["a", "b"]` is one of them.

    A cosine is nan where a vector does not change the layer or the parameter at all.

    Args:
        names (`tuple[str, ...]`):
            The vectors, in the order of rows and columns.
        total (`tuple[tuple[float, ...], ...]`):
            The cosines of the whole vectors.
        norms (`tuple[float, ...]`):
            The norms of the whole vectors.
        by_layer (`Mapping[str, tuple[tuple[float, ...], ...]]`):
            The cosines within each layer: `"0"`, `"1"`, …, and `"outside"` for embeddings, the head and the last norm.
        layer_norms (`Mapping[str, tuple[float, ...]]`):
            The norms within each layer.
        by_parameter (`Mapping[str, tuple[tuple[float, ...], ...]]`):
            The cosines within each parameter.

    """

    names: tuple[str, ...]
    total: _Matrix
    norms: tuple[float, ...]
    by_layer: Mapping[str, _Matrix]
    layer_norms: Mapping[str, tuple[float, ...]]
    by_parameter: Mapping[str, _Matrix]

    def __getitem__(self, pair: tuple[str, str]) -> float:
        one, other = places_of(pair, self.names, "vector")
        return self.total[one][other]

    def __str__(self) -> str:
        names = [visible(name) for name in self.names]
        width = max(9, *(len(name) + 2 for name in names))
        rows = [[name, *(f"{value:+.3f}" for value in row)] for name, row in zip(names, self.total, strict=True)]
        return "\n".join("".join(cell.rjust(width) for cell in row) for row in [["cosine", *names], *rows])

    def figure(self, view: CosineView = "total") -> "Figure":
        """Draw the cosines.

        Args:
            view (`str`, *optional*, defaults to `"total"`):
                `"total"`: a heat map of the whole vectors. `"layers"`: the cosine of each pair and each vector's norm,
                layer by layer. `"parts"`: a heat map of where the first two vectors agree, layers down and parts of a
                layer across.

        Returns:
            `matplotlib.figure.Figure`: The figure.

        Raises:
            `BadValueError`: If there is no such view.

        """
        from hf_taskvec.analysis.result_figures import heat_map_figure, layers_figure, parts_figure

        if view not in get_args(CosineView):
            raise BadValueError(f"view={view!r} is not one of {', '.join(get_args(CosineView))}.")
        if view == "layers":
            return layers_figure(self)
        if view == "parts":
            return parts_figure(self)
        return heat_map_figure(self.names, self.total, "Cosine between task vectors")

    def plot(self, output: str | Path, view: CosineView = "total") -> Path:
        """Draw the cosines into a file.

        Args:
            output (`str` or `Path`):
                The file to write; its name ends in `.png` or `.svg`.
            view (`str`, *optional*, defaults to `"total"`):
                As for `figure`.

        Returns:
            `Path`: The file that was written.

        """
        return save_figure(partial(self.figure, view), output)


def cosine_matrix(
    vectors: Sequence[TaskVector] | Mapping[str, TaskVector], *, progress: bool | None = None
) -> CosineMatrix:
    """Cosines between two or more vectors, in one pass over what they read and with the memory of a few tiles.

    Low-rank changes are compared by their factors; dense ones are streamed in tiles, each read once for all pairs.

    Args:
        vectors (`Sequence[TaskVector]` or `Mapping[str, TaskVector]`):
            By name; or a sequence, whose expressions are the names.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `CosineMatrix`: Cosines and norms, in total, by layer and by parameter.

    Raises:
        `BadValueError`: If there are fewer than two vectors, or one changes nothing.
        `MismatchError`: If they are of models of different sizes or architectures.

    Example:
        >>> import torch
        >>> from hf_taskvec import TaskVector
        >>> one = TaskVector.from_tensors({"w": torch.tensor([1.0, 0.0])}, name="one")
        >>> other = TaskVector.from_tensors({"w": torch.tensor([3.0, 4.0])}, name="other")
        >>> cosine_matrix([one, other])["one", "other"]
        0.6

    """
    named = named_vectors(vectors)
    if len(named) < 2:
        raise BadValueError(f"a cosine needs two vectors or more, not {len(named)}.")
    check_alike(named)
    empty = [name for name, vector in named.items() if not len(vector)]
    if empty:
        raise BadValueError(f"{empty[0]} changes nothing, so it has no direction.")
    parameters = list(dict.fromkeys(name for vector in named.values() for name in vector))
    layers = {name: OUTSIDE if (found := layer_of(name)) is None else str(found) for name in parameters}
    # Layers in order, then what belongs to none.
    order = sorted(set(layers.values()), key=lambda layer: (layer == OUTSIDE, int(layer) if layer.isdigit() else 0))
    grams = {layer: torch.zeros(len(named), len(named), dtype=torch.float64, device="cpu") for layer in order}
    by_parameter = {}

    def products_of(name: str) -> torch.Tensor:
        return measures.gram(name, [vector[name].terms for vector in named.values() if name in vector])

    with workers() as run:
        found_products = progress_bar(run(products_of, parameters), "Comparing", progress, total=len(parameters))
        for name, products in zip(parameters, found_products, strict=True):
            owners = torch.tensor([i for i, vector in enumerate(named.values()) if name in vector], device="cpu")
            whole = torch.zeros(len(named), len(named), dtype=torch.float64, device="cpu")
            whole[owners[:, None], owners] = products
            grams[layers[name]] += whole
            by_parameter[name] = _cosines(whole)
    total = torch.stack(list(grams.values())).sum(dim=0)
    zero = [name for name, square in zip(named, total.diagonal().tolist(), strict=True) if square <= 0]
    if zero:
        raise BadValueError(f"{zero[0]} changes nothing, so it has no direction.")
    return CosineMatrix(
        tuple(named),
        _cosines(total),
        tuple(total.diagonal().clamp_min(0).sqrt().tolist()),
        {layer: _cosines(gram) for layer, gram in grams.items()},
        {layer: tuple(gram.diagonal().clamp_min(0).sqrt().tolist()) for layer, gram in grams.items()},
        by_parameter,
    )


def _cosines(gram: torch.Tensor) -> _Matrix:
    norms = gram.diagonal().clamp_min(0).sqrt()
    cosines = (gram / (norms[:, None] * norms)).clamp(-1, 1)
    cosines.fill_diagonal_(1.0)
    cosines[norms == 0] = cosines[:, norms == 0] = float("nan")
    return tuple(map(tuple, cosines.tolist()))


def places_of(pair: tuple[str, str], names: Sequence[str], what: str) -> list[int]:
    """Where two names are in a matrix."""
    for name in pair:
        if name not in names:
            raise MissingNameError(f"there is no {what} {name!r}.{did_you_mean(name, names)}")
    return [names.index(name) for name in pair]


def named_vectors(vectors: Sequence[TaskVector] | Mapping[str, TaskVector]) -> dict[str, TaskVector]:
    """Vectors by name; of a sequence the expressions are the names, numbered where they are the same."""
    if isinstance(vectors, TaskVector | str) or not isinstance(vectors, Sequence | Mapping):
        raise BadValueError("give two vectors or more, as a list or by name.")
    check_vectors(*(vectors.values() if isinstance(vectors, Mapping) else vectors))
    if isinstance(vectors, Mapping):
        return dict(vectors)
    named: dict[str, TaskVector] = {}
    for vector in vectors:
        name, number = vector.expression, 2
        while name in named:
            name, number = f"{vector.expression} ({number})", number + 1
        named[name] = vector
    return named


def check_alike(named: Mapping[str, TaskVector]) -> None:
    """Refuse vectors of different architectures or sizes."""
    (first, one), *others = named.items()
    for name, other in others:
        common = [parameter for parameter in one if parameter in other]
        for parameter in common:
            if one.shape(parameter) != other.shape(parameter):
                raise MismatchError(
                    f"{parameter}: {first} has shape {list(one.shape(parameter))}, {name} "
                    f"{list(other.shape(parameter))}. Vectors of models of different sizes cannot be compared."
                )
        kinds = [vector.provenance.architectures for vector in (one, other)]
        if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
            raise MismatchError(
                f"{first} belongs to {', '.join(sorted(kinds[0]))}, {name} to {', '.join(sorted(kinds[1]))}: vectors "
                "of different architectures cannot be compared."
            )
