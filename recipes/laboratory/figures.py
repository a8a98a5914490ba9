"""The laboratory's figures."""

from typing import Any

from laboratory import decay, gradients, linearity, transformer
from matplotlib.figure import Figure

from hf_taskvec.figures import COLOURS, look


def transformer_figure(result: transformer.Result) -> Figure:
    """Losses of both tasks over λ for each α, with the theorems' regions."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    grid = figure.subplots(1, len(result.curves), sharey=True)
    for axes, (name, curve) in zip(grid, result.curves.items(), strict=True):
        found = transformer.theorems(curve.alpha)
        for region, colour, label in ((found.add, 2, "add: works"), (found.forget, 4, "forget: works")):
            if region is not None and region.low is not None and region.high is not None:
                width = max(region.high, region.low + 0.04)  # visible, however narrow
                axes.axvspan(region.low, width, color=COLOURS[colour], alpha=0.22, linewidth=0, label=label)
        axes.plot(curve.scales, curve.first, label="task 1 (kept)", markersize=4, **look(1))
        axes.plot(curve.scales, curve.second, label="task 2 (added or forgotten)", markersize=4, **look(0))
        axes.set_title(f"α = {curve.alpha:g}: {name}".replace("-", "−"), fontsize=10.5)
        axes.set_xlabel("λ in θ₀ + τ₁ + λτ₂")
        axes.grid(alpha=0.25)
    grid[0].set_ylabel("hinge loss on new data")
    handles, labels = grid[0].get_legend_handles_labels()
    labels = [label.replace(": works", ": λ for which the theorem promises success") for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("The one-layer transformer: Theorems 1 and 2 beside the measured losses", fontsize=12)
    return figure


def transfer_figure(result: transformer.Result) -> Figure:
    """The measured loss on the new task, and Theorem 3's region."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    step = result.axis[1] - result.axis[0]
    ends = (result.axis[0] - step / 2, result.axis[-1] + step / 2)
    image = axes.imshow(result.losses, origin="lower", extent=(*ends, *ends), cmap="cividis_r", vmin=0, vmax=1.5)
    fine = [result.axis[0] + 0.01 * n for n in range(round((result.axis[-1] - result.axis[0]) / 0.01) + 10)]
    inside = [[float(result.transfer.holds((x, y))) for x in fine] for y in fine]
    axes.contour(fine, fine, inside, levels=[0.5], colors=COLOURS[0], linewidths=2.5)
    axes.plot([], [], color=COLOURS[0], linewidth=2.5, label="Theorem 3's region")
    axes.contour(result.axis, result.axis, result.losses, levels=[transformer.SMALL], colors="white", linestyles="--")
    axes.plot([], [], color="0.6", linestyle="--", label=f"measured loss {transformer.SMALL} (white)")
    axes.plot(
        *result.transfer.scales,
        "X",
        color="black",
        markeredgecolor="white",
        markersize=11,
        label="closed form",
        linestyle="",
    )
    axes.set(xlabel="λ of task 1", ylabel="λ of task 2")
    one, other = result.transfer.gammas
    axes.set_title(f"Loss on a new task, γ = ({one:g}, {other:g})".replace("-", "−"), fontsize=11.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False, fontsize=9.5)
    figure.colorbar(image, ax=axes, label="hinge loss")
    return figure


def gradients_figure(result: gradients.Result) -> Figure:
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for number, (epochs, gaps) in enumerate(result.gaps.items()):
        axes.loglog(result.rates, gaps, label=f"{epochs} epochs", **(look(number) | {"linestyle": ""}), markersize=7)
        axes.loglog(result.rates, result.predicted[epochs], color=COLOURS[number], linewidth=1.2)
    axes.plot([], [], color="0.4", linewidth=1.2, label="predicted αη²‖C‖")
    axes.set(xlabel="η", ylabel="distance of θ(task arithmetic) and θ(joint training)")
    axes.set_title("Task arithmetic and joint training part as η²", fontsize=11.5)
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    return figure


def linearity_figure(result: linearity.Result) -> Figure:
    """1 − cosine of the interpolation, with and without a common pretraining."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (label, found) in enumerate((("common pretraining", result.common), ("from scratch", result.apart))):
        measures = found["interpolation α=0.5"]
        style: dict[str, Any] = {"markersize": 6, "linewidth": 2}
        layers = range(measures.layers)
        left.plot(layers, (1 - measures.cosine).median(dim=1).values, label=label, **look(number), **style)
        left.plot(
            layers, (1 - measures.baseline).median(dim=1).values, color=COLOURS[number], linestyle=":", linewidth=1.5
        )
        right.plot(layers, measures.coefficient.median(dim=1).values, label=label, **look(number), **style)
    left.plot([], [], color="0.4", linestyle=":", label="baseline: 1 − cosine of the two models")
    left.set_yscale("log")
    left.set(xlabel="layer", ylabel="1 − cosine (median, log scale)")
    right.axhline(1.0, color="0.4", linestyle=":")
    right.set(xlabel="layer", ylabel="coefficient (median)", ylim=(0, None))
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Features half-way between two models (α = 0.5)", fontsize=12)
    return figure


def decay_figure(result: decay.Result) -> Figure:
    figure = Figure(figsize=(13, 4), layout="constrained")
    ranks, merging, bound = figure.subplots(1, 3, width_ratios=(1, 1.25, 1))
    alive = [(d, value) for d, value in zip(decay.DECAYS, result.harmonic, strict=True) if value is not None]
    ranks.plot(range(len(alive)), [value for _, value in alive], markersize=7, linewidth=2, **look(1))
    ranks.set_xticks(range(len(alive)), [f"{d:g}" for d, _ in alive])
    ranks.set(xlabel="weight decay", ylabel="stable rank (harmonic mean)", title="rank and weight decay")
    names = [name.replace(", ", ",\n").replace(" with other", "\nwith other") for name in result.merging]
    for number, (own, merged) in enumerate(result.merging.values()):
        merging.barh(number - 0.2, own, 0.38, color=COLOURS[1], label="alone" if not number else None)
        merging.barh(number + 0.2, merged, 0.38, color=COLOURS[0], hatch="//", label="merged" if not number else None)
    merging.set_yticks(range(len(names)), names, fontsize=9)
    merging.invert_yaxis()
    merging.set(xlabel="logistic loss", title="summing two networks")
    merging.legend(frameon=False)
    bound.plot(result.steps, result.bound, color=COLOURS[0], linestyle="--", linewidth=2, label="bound of Lemma 5")
    bound.plot(result.steps, result.reached, color=COLOURS[1], linewidth=2, label="measured (largest)")
    bound.set(xlabel="step", ylabel="‖Wₜx′‖", title="inputs of the other task")
    bound.legend(frameon=False)
    for axes in (ranks, merging, bound):
        axes.grid(alpha=0.25)
    return figure
