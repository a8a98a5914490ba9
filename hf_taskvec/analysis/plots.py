"""The figures of the analysis. Each function gives one `Figure`; `figures.render` makes files of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_taskvec.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_taskvec.analysis.scales import Transfer


def matrix_figure(names: Sequence[str], values: Sequence[Sequence[float]], title: str) -> "Figure":
    """A heat map of correlations or cosines, with the numbers in it. Violet is negative, orange positive."""
    from matplotlib.figure import Figure

    size = len(names)
    side = max(3.6, 0.85 * size + 1.8)
    figure = Figure(figsize=(side + 0.9, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="PuOr_r", vmin=-1, vmax=1)
    axes.set_xticks(range(size), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(size), names)
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


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def transfer_figure(transfer: "Transfer", low: float, high: float) -> "Figure":
    """Theorem 3's region for two tasks, and its closed form."""
    import numpy
    from matplotlib.figure import Figure

    from hf_taskvec.errors import BadValueError

    if len(transfer.gammas) != 2:
        raise BadValueError(f"the region can be drawn for two tasks, not for {len(transfer.gammas)}.")
    (one, other), needed, most = transfer.gammas, transfer.margin + transfer.c, transfer.c / transfer.beta
    axis = numpy.linspace(low, high, 501)
    x, y = numpy.meshgrid(axis, axis)
    first, second = x * one + y * other, x * one**2 + y * other**2
    inside = (first >= needed) & (second >= needed) & (abs(x) <= most) & (abs(y) <= most)
    figure = Figure(figsize=(6.2, 5.6), layout="constrained")
    axes = figure.subplots()
    axes.contourf(x, y, inside.astype(float), levels=[0.5, 1.5], colors=[COLOURS[0]], alpha=0.35)
    lines: list[tuple[Any, str, str, Any]] = [
        (first, COLOURS[1], f"Σ λγ = {needed:.3g}", "--"),
        (second, COLOURS[2], f"Σ λγ² = {needed:.3g}", "-."),
    ]
    for values, colour, label, dashes in lines:
        axes.contour(x, y, values, levels=[needed], colors=colour, linestyles=[dashes], linewidths=1.8)
        axes.plot([], [], color=colour, linestyle=dashes, label=label)
    axes.plot(
        [-most, most, most, -most, -most],
        [-most, -most, most, most, -most],
        ":",
        color="0.4",
        label=f"|λ| = c/β = {most:.3g}",
    )
    axes.fill_between([], [], color=COLOURS[0], alpha=0.35, label="all three hold")
    axes.plot(*transfer.scales, "X", color="black", markersize=10, label="closed form", clip_on=True)
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="λ of task 1", ylabel="λ of task 2", aspect="equal")
    axes.set_title(f"Where Theorem 3 promises transfer: γ = ({_signed(one)}, {_signed(other)})", fontsize=11.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    axes.grid(alpha=0.2)
    return figure
