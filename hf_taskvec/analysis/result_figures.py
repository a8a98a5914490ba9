"""How each result of the analysis is drawn: one function for each kind of figure, in the library's style."""

import math
import textwrap
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from hf_taskvec.algebra.matrix_kinds import KINDS
from hf_taskvec.figures import COLOURS, literal, look, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_taskvec.analysis.checkpoint_gradients import EpochGradients
    from hf_taskvec.analysis.cosines import CosineMatrix
    from hf_taskvec.analysis.gradients import GradientAlignment
    from hf_taskvec.analysis.landscapes import Landscape
    from hf_taskvec.analysis.linearity import Linearity
    from hf_taskvec.analysis.ranks import StableRanks
    from hf_taskvec.analysis.scale_theorems import TransferScales


@styled()
def heat_map_figure(names: Sequence[str], values: Sequence[Sequence[float]], title: str) -> "Figure":
    """A heat map of correlations or cosines, with the numbers in it. Violet is negative, orange positive."""
    size = len(names)
    side = max(3.6, 0.85 * size + 1.8)
    figure = new_figure((side + 0.9, side))
    axes = figure.subplots()
    image = axes.imshow(values, cmap="PuOr_r", vmin=-1, vmax=1)
    axes.set_xticks(range(size), [literal(name) for name in names], rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(size), [literal(name) for name in names])
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            colour = "white" if abs(value) > 0.6 else "black"
            axes.text(j, i, _signed(value), ha="center", va="center", color=colour, fontsize=10)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.outline.set_visible(False)
    axes.set_title(title, fontsize=11.5)
    return figure


@styled()
def parts_figure(cosines: "CosineMatrix") -> "Figure":
    """Cosines of two vectors: layers down, parts across; what lies outside the layers has a row of its own."""
    from hf_taskvec.algebra.parameter_names import layer_of, part_of
    from hf_taskvec.analysis.cosines import OUTSIDE

    cells = {}
    for name, matrix in cosines.by_parameter.items():
        layer = layer_of(name)
        cells[OUTSIDE if layer is None else str(layer), part_of(name)] = matrix[0][1]
    rows = list(cosines.by_layer)
    columns = list(dict.fromkeys(part for _, part in sorted(cells, key=lambda place: place[0] == OUTSIDE)))
    figure = new_figure((2.6 + 0.62 * len(columns), 1.9 + 0.34 * len(rows)))
    axes = figure.subplots()
    axes.set_facecolor("0.9")  # where there is nothing to compare; white is a cosine of 0
    values = [[cells.get((row, column), math.nan) for column in columns] for row in rows]
    image = axes.imshow(values, cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), [row if row == OUTSIDE else f"layer {row}" for row in rows])
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "white" if abs(value) > 0.6 else "black"
                axes.text(x, y, _signed(value), ha="center", va="center", color=colour, fontsize=8)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes).outline.set_visible(False)
    (one, other), total = cosines.names[:2], cosines.total[0][1]
    axes.set_title(f"Cosine between {literal(one)} and {literal(other)}: {_signed(total)}", fontsize=11.5)
    return figure


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


@styled()
def transfer_figure(transfer: "TransferScales", low: float, high: float, names: Sequence[str]) -> "Figure":
    """Theorem 3's region for two tasks, and the λ to try; the legend names only what is in the picture."""
    import numpy

    from hf_taskvec.errors import BadValueError

    if len(transfer.gammas) != 2:
        raise BadValueError(f"the region can be drawn for two tasks, not for {len(transfer.gammas)}.")
    if len(names) != 2:
        raise BadValueError(f"names={list(names)} must be two: those of the tasks.")
    (one, other), needed, most = transfer.gammas, transfer.margin + transfer.c, transfer.c / transfer.beta
    low, high = min([low, *(s - 1 for s in transfer.scales)]), max([high, *(s + 1 for s in transfer.scales)])
    axis = numpy.linspace(low, high, 501)
    x, y = numpy.meshgrid(axis, axis)
    first, second = x * one + y * other, x * one**2 + y * other**2
    inside = (first >= needed) & (second >= needed) & (abs(x) <= most) & (abs(y) <= most)
    figure = new_figure((6.2, 5.6))
    axes = figure.subplots()
    lines: list[tuple[Any, str, str, Any]] = [
        (first, COLOURS[1], f"Σ λγ = {needed:.3g}", "--"),
        (second, COLOURS[2], f"Σ λγ² = {needed:.3g}", "-."),
    ]
    for values, colour, label, dashes in lines:
        if not values.min() < needed < values.max():
            continue
        axes.contour(x, y, values, levels=[needed], colors=colour, linestyles=[dashes], linewidths=1.8)
        axes.plot([], [], color=colour, linestyle=dashes, label=label)
    if most < max(-low, high):
        corners = [-most, most, most, -most, -most], [-most, -most, most, most, -most]
        axes.plot(*corners, ":", color="0.4", label=f"|λ| = c/β = {most:.3g}")
    if inside.any():
        axes.contourf(x, y, inside.astype(float), levels=[0.5, 1.5], colors=[COLOURS[0]], alpha=0.35)
        axes.fill_between([], [], color=COLOURS[0], alpha=0.35, label="all three hold")
    if transfer.scales:
        label = "closed form" if transfer.closed_form else "least |λ|"
        axes.plot(*transfer.scales, "X", color="black", markersize=10, label=label, linestyle="")
    labels = {"xlabel": f"λ of {literal(names[0])}", "ylabel": f"λ of {literal(names[1])}"}
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", **labels)
    where = (
        "Where the sums of Theorem 3 are reached" if transfer.scales else "The sums of Theorem 3 are reached nowhere"
    )
    axes.set_title(f"{where}: γ = ({_signed(one)}, {_signed(other)})", fontsize=11.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    axes.grid(alpha=0.2)
    return figure


@styled()
def linearity_figure(linearity: "Linearity") -> "Figure":
    """1 − cosine and its baseline (log scale) above, the coefficient below; a column for each kind, with quartiles."""
    kinds = list(linearity.measures)
    figure = new_figure((2.7 * len(kinds) + 1, 5.4))
    grid = figure.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="row")
    for column, kind in enumerate(kinds):
        found = linearity.measures[kind]
        above, below = grid[0][column], grid[1][column]
        lines = [
            (1 - found.cosine, "1 − cosine of the two sides", 1),
            (1 - found.baseline, "1 − cosine of the mixed", 0),
        ]
        for values, label, colour in lines:
            _quartiles(above, values.clamp_min(1e-12), label, colour)
        _quartiles(below, found.coefficient, "coefficient", 2)
        above.set_yscale("log")
        above.set_title(textwrap.fill(kind, 26, break_long_words=False), fontsize=10.5)
        below.axhline(1.0, color="0.4", linestyle=":", linewidth=1.2)
        below.set_xlabel("layer")
        _whole_ticks(below, range(found.layers))
        for axes in (above, below):
            axes.grid(alpha=0.25)
    grid[0][0].set_ylabel("1 − cosine (log scale)")
    grid[1][0].set_ylabel("coefficient (1 is linear)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    more = grid[1][0].get_legend_handles_labels()
    figure.legend(handles + more[0], labels + more[1], loc="outside lower center", ncols=3, frameon=False)
    title = f"Cross-task linearity: medians and quartiles over {linearity.samples} rows ({linearity.feature} feature)"
    figure.suptitle(title, fontsize=12)
    return figure


def _quartiles(axes: Any, values: Any, label: str, colour: int) -> None:
    """A line for the median of each row of a tensor, and a band between its quartiles."""
    import torch

    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype), dim=1).tolist()
    x = range(len(middle))
    axes.plot(x, middle, label=label, linewidth=2, markersize=5, **look(colour))
    axes.fill_between(x, low, high, color=COLOURS[colour % 7], alpha=0.2, linewidth=0)


# Lines that can still be told apart.
_MOST_LINES = 6


@styled()
def layers_figure(cosines: "CosineMatrix") -> "Figure":
    """Cosines of the pairs and norms of the vectors, by layer: lines, or heat maps where they would be too many."""
    layers = list(cosines.by_layer)
    pairs = {
        literal(f"{cosines.names[i]}, {cosines.names[j]}"): [cosines.by_layer[layer][i][j] for layer in layers]
        for i, j in combinations(range(len(cosines.names)), 2)
    }
    # A layer that is left alone has no place on a logarithmic scale.
    norms = {
        literal(name): [cosines.layer_norms[layer][number] or math.nan for layer in layers]
        for number, name in enumerate(cosines.names)
    }
    draw = _layer_lines if len(pairs) <= _MOST_LINES else _layer_maps
    return draw(layers, pairs, norms)


def _layer_lines(layers: list[str], pairs: dict[str, list[float]], norms: dict[str, list[float]]) -> "Figure":
    figure = new_figure((11, 4.4 + 0.25 * len(pairs)))
    left, right = figure.subplots(1, 2)
    numbered = [i for i, layer in enumerate(layers) if layer.isdigit()]
    apart = [i for i in range(len(layers)) if i not in numbered]  # what belongs to no layer
    for axes, lines in ((left, pairs), (right, norms)):
        for number, (label, values) in enumerate(lines.items()):
            style = {"markersize": 5, "linewidth": 1.8, **look(number)}
            axes.plot(numbered, [values[i] for i in numbered], label=label, **style)
            axes.plot(apart, [values[i] for i in apart], **(style | {"linestyle": "", "markersize": 7}))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False, fontsize=9)
        _layer_ticks(axes, layers)
        axes.grid(alpha=0.25)
    left.set(ylabel="cosine", title="cosine of each pair")
    left.axhline(0, color="0.5", linewidth=0.8)
    right.set(ylabel="Frobenius norm (log scale)", title="norm of each vector", yscale="log")
    _plain_numbers(right.yaxis)
    return figure


def _layer_maps(layers: list[str], pairs: dict[str, list[float]], norms: dict[str, list[float]]) -> "Figure":
    rows = len(pairs), len(norms)
    figure = new_figure((max(8.0, 4 + 0.3 * len(layers)), 2.6 + 0.26 * sum(rows)))
    above, below = figure.subplots(2, 1, height_ratios=rows)
    colours: list[dict[str, Any]] = [{"cmap": "PuOr_r", "vmin": -1, "vmax": 1}, {"cmap": "cividis", "norm": "log"}]
    for axes, lines, style, title in zip(
        (above, below), (pairs, norms), colours, ("cosine of each pair", "Frobenius norm of each vector"), strict=True
    ):
        axes.set_facecolor("0.9")  # a layer that is left alone
        image = axes.imshow(list(lines.values()), aspect="auto", **style)
        axes.set_yticks(range(len(lines)), list(lines), fontsize=9)
        axes.set_title(title)
        _layer_ticks(axes, layers)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        bar = figure.colorbar(image, ax=axes)
        bar.outline.set_visible(False)
    _plain_numbers(bar.ax.yaxis)
    return figure


def _plain_numbers(axis: Any) -> None:
    """On a logarithmic axis 0.02 rather than 2 x 10⁻², and not at every tick."""
    from matplotlib.ticker import FuncFormatter

    for ticks in (axis.set_major_formatter, axis.set_minor_formatter):
        ticks(FuncFormatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in "1235" else ""))


def _whole_ticks(axes: Any, values: Sequence[int]) -> None:
    """Ticks at whole numbers; at the one that there is, if there is only one."""
    if len(values) == 1:
        axes.set_xticks(list(values))
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)


def _layer_ticks(axes: Any, layers: list[str]) -> None:
    """Some layers by number, the last one among them, and what belongs to none by name, below the numbers."""
    last = sum(layer.isdigit() for layer in layers) - 1
    step = max(1, round(len(layers) / 12))
    shown = [i for i in range(len(layers)) if i >= last or (i % step == 0 and i <= last - step)]
    axes.set_xticks(shown, [layers[i] if layers[i].isdigit() else f"\n{layers[i]}" for i in shown])
    axes.set_xlabel("layer", labelpad=4 if last == len(layers) - 1 else -11)  # beside that name, not below it


@styled()
def ranks_figure(ranks: "StableRanks") -> "Figure":
    """Stable ranks and Frobenius norms by layer, a line for each kind; of experts the mean and the span."""
    figure = new_figure((11, 4.6))
    left, right = figure.subplots(1, 2)
    for kind in ranks.kinds:
        number = KINDS.index(kind)  # so that a kind looks the same in the figures of all vectors
        found = ranks.of_kind(kind)
        layers = sorted({matrix.layer for matrix in found})
        for axes, value in ((left, "stable_rank"), (right, "frobenius")):
            # A matrix of zeros has no stable rank.
            at = {layer: [getattr(m, value) for m in found if m.layer == layer] for layer in layers}
            values = [[each for each in at[layer] if not math.isnan(each)] or [math.nan] for layer in layers]
            means = [sum(each) / len(each) for each in values]
            axes.plot(layers, means, label=kind, markersize=5, linewidth=1.8, **look(number))
            axes.fill_between(
                layers,
                list(map(min, values)),
                list(map(max, values)),
                color=COLOURS[number % 7],
                alpha=0.15,
                linewidth=0,
            )
    left.set(ylabel="stable rank ‖W‖_F / ‖W‖₂", title="stable rank")
    right.set(ylabel="‖W‖_F", title="Frobenius norm")
    for axes in (left, right):
        axes.set_ylim(0, None)
        axes.set_xlabel("layer")
        _whole_ticks(axes, sorted({matrix.layer for matrix in ranks.matrices}))
        axes.grid(alpha=0.25)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle(f"Ranks and norms: {literal(ranks.what)}", fontsize=12)
    return figure


@styled()
def alignment_figure(alignment: "GradientAlignment") -> "Figure":
    """Each epoch's share of the updates' norm, and the cosines with the first epoch and with the gradient."""
    figure = new_figure((9.5, 4.2))
    left, right = figure.subplots(1, 2)
    epochs = range(1, len(alignment.update_shares) + 1)
    left.bar(epochs, alignment.update_shares, color=COLOURS[1])
    left.set(xlabel="epoch", ylabel="share of the updates' norm", title="what each epoch contributes", ylim=(0, None))
    lines = [
        (alignment.with_first, "update, with the first epoch's"),
        (alignment.update_with_gradient, "update, with the negative gradient at θ₀"),
        (alignment.vector_with_gradient, "vector so far, with the negative gradient at θ₀"),
    ]
    for number, (values, label) in enumerate(lines):
        if values is not None:
            right.plot(epochs, values, label=label, markersize=6, linewidth=2, **look(number))
    right.set(xlabel="epoch", ylabel="cosine", title="where it points")
    right.axhline(0, color="0.5", linewidth=0.8)
    for axes in (left, right):
        _whole_ticks(axes, epochs)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


@styled()
def epoch_gradients_figure(gradients: "EpochGradients") -> "Figure":
    """Each epoch's share of the gradients' norm, and the cosine with the first."""
    figure = new_figure((9.5, 3.8))
    left, right = figure.subplots(1, 2)
    epochs = range(1, len(gradients.norms) + 1)
    left.bar(epochs, gradients.shares, color=COLOURS[1])
    left.set(xlabel="epoch", ylabel="share of the gradients' norm", title="how long each epoch's gradient is")
    right.plot(epochs, gradients.with_first, markersize=6, linewidth=2, **look(0))
    right.set(xlabel="epoch", ylabel="cosine with the first epoch's gradient", title="where it points")
    right.axhline(0, color="0.5", linewidth=0.8)
    for axes in (left, right):
        _whole_ticks(axes, epochs)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return figure


@styled()
def landscape_figure(landscape: "Landscape") -> "Figure":
    """Contours of the loss on the plane, a panel for each data set, with the three models marked."""
    from matplotlib.patheffects import withStroke

    count = len(landscape.losses)
    figure = new_figure((5.4 * count + 0.4, 4.8))
    for axes, (name, losses) in zip(figure.subplots(1, count, squeeze=False)[0], landscape.losses.items(), strict=True):
        filled = axes.contourf(landscape.x, landscape.y, losses, levels=18, cmap="cividis")
        axes.contour(landscape.x, landscape.y, losses, levels=filled.levels, colors="white", linewidths=0.4, alpha=0.6)
        for number, (label, (x, y)) in enumerate(landscape.points.items()):
            marker = {"marker": look(number)["marker"], "color": "white", "markeredgecolor": "black", "markersize": 9}
            axes.plot([x], [y], linestyle="", **marker)
            beyond = x > (landscape.x[0] + landscape.x[-1]) / 2  # its name goes to the side that is wider
            halo = [withStroke(linewidth=3, foreground="white")]
            axes.annotate(
                literal(label).replace("θ_0", "θ₀"),
                (x, y),
                xytext=(-7 if beyond else 7, 7),
                textcoords="offset points",
                ha="right" if beyond else "left",
                path_effects=halo,
                fontsize=10,
            )
        axes.set(
            xlabel="along the first vector", ylabel="across it, towards the second", title=f"loss on {literal(name)}"
        )
        figure.colorbar(filled, ax=axes, label="mean loss (nats per token)")
    return figure
