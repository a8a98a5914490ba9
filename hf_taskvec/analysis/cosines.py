"""The geometry of task vectors: norms and cosines, in total and layer by layer, in one pass over their files.

The cosine of two vectors is also a cheap proxy of their tasks' correlation: no model, no data. It tells irrelevant
tasks from aligned ones, but its size is another: fine-tunes of one base share directions that have nothing to do with
the task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.parameter_names import layer_of
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.token_batches import check_vectors, progress_bar
from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError, did_you_mean
from hf_taskvec.threads import workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The name of what belongs to no layer: embeddings, the head, the last norm.
OUTSIDE = "outside"
_Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CosineMatrix:
    """Cosines between vectors, and their norms, in total, by layer (`"0"`, `"1"`, …, `"outside"`) and by parameter.

    A cosine is nan where a vector does not change the layer or the parameter at all.
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

    def figure(self) -> "Figure":
        """A heat map of the total."""
        from hf_taskvec.analysis.plots import matrix_figure

        return matrix_figure(self.names, self.total, "Cosine between task vectors")

    def layer_figure(self) -> "Figure":
        """The cosine of each pair, and each vector's norm, layer by layer."""
        from hf_taskvec.analysis.plots import layers_figure

        return layers_figure(self)

    def parts_figure(self) -> "Figure":
        """A heat map of where the first two vectors agree: layers down, parts of a layer across."""
        from hf_taskvec.analysis.plots import parts_figure

        return parts_figure(self)


def cosine_matrix(
    vectors: Sequence[TaskVector] | Mapping[str, TaskVector], *, progress: bool | None = None
) -> CosineMatrix:
    """Cosines between two or more vectors, in one pass over what they read and with the memory of a few tiles.

    Low-rank changes are compared by their factors; dense ones are streamed in tiles, each read once for all pairs.

    Args:
        vectors: by name; or a sequence, whose expressions are the names.
        progress: show a progress bar; by default on a terminal.
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
    grams = {layer: torch.zeros(len(named), len(named), dtype=torch.float64) for layer in order}
    by_parameter = {}

    def products_of(name: str) -> torch.Tensor:
        return measures.gram(name, [vector[name] for vector in named.values() if name in vector])

    with workers() as run:
        found_products = progress_bar(run(products_of, parameters), "Comparing", progress, total=len(parameters))
        for name, products in zip(parameters, found_products, strict=True):
            owners = torch.tensor([i for i, vector in enumerate(named.values()) if name in vector])
            whole = torch.zeros(len(named), len(named), dtype=torch.float64)
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
                    f"{parameter}: {first} has shape {list(one.shape(parameter))}, {name} {list(other.shape(parameter))}. Vectors of "
                    "models of different sizes cannot be compared."
                )
        kinds = [vector.provenance.architectures for vector in (one, other)]
        if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
            raise MismatchError(
                f"{first} belongs to {', '.join(sorted(kinds[0]))}, {name} to {', '.join(sorted(kinds[1]))}: vectors of different "
                "architectures cannot be compared."
            )
