"""Cosines as a heat map: all pairs of several vectors, or layer by part of the model for two of them."""

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_taskvec.errors import UnsupportedError

if TYPE_CHECKING:
    from hf_taskvec.vector import TaskVector


@dataclass(frozen=True)
class LayerCosines:
    """The cosines of two vectors: for each layer, and for each parameter (none where one side is zero)."""

    layers: dict[str, float]
    parameters: dict[str, float]


def layer_and_part(name: str) -> tuple[str, str]:
    """A parameter's layer and its part within the layer.

    >>> layer_and_part("model.layers.3.mlp.up_proj.weight")
    ('layer 3', 'mlp.up_proj')
    >>> layer_and_part("lm_head.weight")
    ('other', 'lm_head')
    """
    found = re.search(r"\.(\d+)\.(.+)$", f".{name}")
    if found is None:
        return "other", name.removesuffix(".weight").removeprefix("model.")
    return f"layer {int(found[1])}", found[2].removesuffix(".weight")


def layer_cosines(one: "TaskVector", other: "TaskVector") -> LayerCosines:
    """Where two vectors agree."""
    dots = one.dots(other)
    sums: dict[str, list[float]] = {}
    parameters = {}
    for name, dot in dots.items():
        squares = (one.norm(name) ** 2, other.norm(name) ** 2)
        if all(squares):
            parameters[name] = dot / (squares[0] * squares[1]) ** 0.5
        total = sums.setdefault(layer_and_part(name)[0], [0.0, 0.0, 0.0])
        for place, value in enumerate((dot, *squares)):
            total[place] += value
    order = sorted(sums, key=lambda layer: (layer == "other", int(re.sub(r"\D", "", layer) or 0)))
    layers = {k: sums[k][0] / (sums[k][1] * sums[k][2]) ** 0.5 for k in order if sums[k][1] and sums[k][2]}
    return LayerCosines(layers, parameters)


def draw(names: list[str], matrix: list[list[float]], grid: LayerCosines | None) -> bytes:
    """The heat map as PNG. The scale is always −1 to 1, so that two plots can be compared."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("plots need matplotlib: pip install 'hf-taskvec[plots]'") from error
    rows, columns, cells = (names, names, matrix) if grid is None else _cells(grid)
    title = "Cosines of task vectors" if grid is None else f"Cosine of {names[0]} and {names[1]}: {matrix[0][1]:+.3f}"
    figure = Figure(figsize=(2.6 + 0.62 * len(columns), 1.9 + 0.34 * len(rows)), layout="constrained")
    axes: Any = figure.subplots()
    axes.set_facecolor("0.9")  # where there is nothing to compare; white is a cosine of 0
    image = axes.imshow(cells, vmin=-1, vmax=1, cmap="RdBu_r", aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(title, loc="left", fontsize=11)
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            if value == value:  # not NaN: the layer has that part
                colour = "white" if abs(value) > 0.6 else "black"
                axes.text(x, y, f"{value:+.2f}".replace("-", "−"), ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, label="cosine")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def _cells(grid: LayerCosines) -> tuple[list[str], list[str], list[list[float]]]:
    """Layers down, parts across; embeddings, head and final norm have a row of their own."""
    places = {layer_and_part(name): value for name, value in grid.parameters.items()}
    rows = list(grid.layers)
    columns = list(dict.fromkeys(part for _, part in sorted(places, key=lambda place: place[0] == "other")))
    return rows, columns, [[places.get((row, column), float("nan")) for column in columns] for row in rows]
