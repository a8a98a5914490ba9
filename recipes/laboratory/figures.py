"""The laboratory's figures."""

import math
from typing import Any

from laboratory import (
    bounds,
    decay,
    figure3,
    gradients,
    lemmas,
    linearity,
    proofs,
    stationary,
    thresholds,
    transformer,
)
from matplotlib.figure import Figure

from hf_taskvec.figures import COLOURS, look


def transformer_figure(result: transformer.Result) -> Figure:
    """Losses of both tasks over λ for each α, with the theorems' regions: at margin 1, and below at the larger one."""
    figure = Figure(figsize=(13, 6.6), layout="constrained")
    rows = figure.subplots(2, len(result.curves), sharey=True, sharex=True)
    for grid, curves, setting in zip(rows, (result.curves, result.before), ("margin 1", "larger margin"), strict=True):
        for axes, (name, curve) in zip(grid, curves.items(), strict=True):
            found = transformer.theorems(curve.alpha)
            for region, colour, label in ((found.add, 2, "add: works"), (found.forget, 4, "forget: works")):
                if region is not None and region.low is not None and region.high is not None:
                    width = max(region.high, region.low + 0.04)  # visible, however narrow
                    axes.axvspan(region.low, width, color=COLOURS[colour], alpha=0.22, linewidth=0, label=label)
            for number, (mean, label) in enumerate(
                ((curve.second, "task 2 (added or forgotten)"), (curve.first, "task 1 (kept)"))
            ):
                draws = curve.losses[1 - number]
                axes.plot(curve.scales, mean, label=label, markersize=3, **look(number))
                axes.fill_between(
                    curve.scales, draws.amin(0).tolist(), draws.amax(0).tolist(), color=COLOURS[number], alpha=0.25
                )
            expected = [transformer.promised(curve.alpha, scale) for scale in curve.scales]
            axes.plot(curve.scales, expected, color="0.3", linewidth=1, label="1 − α − λ (task 2, in the proofs)")
            axes.set(xlim=(-4.6, 2.4), ylim=(-0.1, 4))
            axes.grid(alpha=0.25)
            if curves is result.curves:
                axes.set_title(f"α = {curve.alpha:g}: {name}".replace("-", "−"), fontsize=10.5)
            else:
                axes.set_xlabel("λ in θ₀ + τ₁ + λτ₂")
        grid[0].set_ylabel(f"hinge loss, {setting}")
    handles, labels = rows[0][0].get_legend_handles_labels()
    labels = [label.replace(": works", ": λ for which the theorem promises success") for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
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
    axes.contour(result.axis, result.axis, result.losses, levels=[thresholds.SMALL], colors="white", linestyles="--")
    axes.plot([], [], color="0.6", linestyle="--", label=f"measured loss {thresholds.SMALL} (white)")
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
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
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
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    ranks, merging, bound = figure.subplots(1, 3, width_ratios=(1, 1.4, 1))
    for number, (frequency, found) in enumerate(result.ranks.items()):
        alive = [(n, value) for n, value in enumerate(found.harmonic) if value is not None]
        ranks.plot(*zip(*alive, strict=True), markersize=7, linewidth=2, label=f"frequency {frequency}", **look(number))
    ranks.set_xticks(range(len(decay.DECAYS)), [f"{d:g}" for d in decay.DECAYS], fontsize=9)
    ranks.set(xlabel="weight decay", ylabel="stable rank (harmonic mean)", title="rank and weight decay")
    ranks.legend(frameon=False)
    names = [name.replace(", ", ",\n").replace(" with other", "\nwith other") for name in decay.MERGES]
    height = 0.8 / (len(decay.INITIAL) + 1)
    for number, name in enumerate(decay.MERGES):
        own = result.merging[decay.INITIAL[0], name][0]
        merging.barh(number - 0.3, own, height, color="0.6", label="alone (×1)" if not number else None)
        for place, scale in enumerate(decay.INITIAL, 1):
            label = f"merged, initial weights ×{scale}" if not number else None
            merged = min(result.merging[scale, name][1], 4.0)
            merging.barh(number - 0.3 + height * place, merged, height, color=COLOURS[place - 1], label=label)
    merging.set_yticks(range(len(names)), names, fontsize=9)
    merging.invert_yaxis()
    merging.set(xlabel="logistic loss (cut at 4)", title="summing two networks")
    merging.legend(frameon=False, fontsize=9)
    bound.plot(result.steps, result.bound, color=COLOURS[0], linestyle="--", linewidth=2, label="bound of Lemma 5")
    bound.plot(result.steps, result.reached, color=COLOURS[1], linewidth=2, label="measured (largest)")
    bound.set(xlabel="step", ylabel="‖Wₜx′‖", title="inputs of the other task")
    bound.legend(frameon=False)
    for axes in (ranks, merging, bound):
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return figure


def stationary_figure(result: stationary.Result) -> Figure:
    """Layers' norms at the end of training, and what summing two networks does over time."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    norms, gaps = figure.subplots(1, 2)
    for number, (kind, found) in enumerate(result.stationary.items()):
        relative = (found.norms / found.expected[:, None]).mean(dim=0).tolist()
        norms.plot(range(1, len(relative) + 1), relative, label=kind, markersize=7, **look(number))
    norms.set(xlabel="layer", ylabel="‖W‖² over Lemma 3's", title="norms of the layers", ylim=(0, None))
    norms.xaxis.get_major_locator().set_params(integer=True)
    norms.legend(frameon=False)
    for number, (name, found) in enumerate(result.merged.items()):
        gaps.semilogy(found.times, found.gap, color=COLOURS[number], linewidth=2, label=f"{name}: sum of weights")
        gaps.semilogy(found.times, found.across, color=COLOURS[number], linestyle=":", linewidth=2)
    gaps.plot([], [], color="0.4", linestyle=":", label="the other network's own output")
    gaps.set(xlabel="time ηt", ylabel="relative to the outputs", title="orthogonal inputs", ylim=(1e-8, 10))
    gaps.legend(frameon=False, fontsize=9)
    for axes in (norms, gaps):
        axes.grid(alpha=0.25)
    return figure


def proofs_figure(result: proofs.Result) -> Figure:
    """Lemma 6 of Kuzborskij and Abbasi Yadkori (2025): an integral over its bound, over time."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for number, (label, values) in enumerate(
        zip(("as printed", "with 1/‖w‖² in eq. (4)"), result.bounded, strict=True)
    ):
        times = [proofs.RATE * step for step in range(1, len(values) + 1)]
        axes.loglog(times, values, linewidth=2, label=label, **(look(number) | {"marker": ""}))
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set(xlabel="time ηt", ylabel="the integral over its bound", title="Lemma 6: above 1 it is wrong")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def bounds_figure(result: bounds.Result) -> Figure:
    """What Theorem 2 of Zhou et al. (2025) bounds, over its bounds."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, found, name in zip(panels, (result.bounds, result.relu), ("tanh (i)", "ReLU (ii)"), strict=True):
        lines = {
            "gradient, as printed": [each.gradient / each.printed_gradient for each in found],
            "gradient, with Π/s_ℓ": [each.gradient / each.corrected_gradient for each in found],
            "Hessian, as printed": [each.hessian / each.printed_hessian for each in found],
            "‖C‖, whole bound": [each.c / each.printed for each in found],
            "‖C‖, measured maxima": [each.c / each.structural for each in found],
        }
        for number, (label, values) in enumerate(lines.items()):
            axes.loglog([each.factor for each in found], values, label=label, markersize=6, **look(number))
        axes.axhline(1, color="0.4", linewidth=1)
        axes.set(xlabel="initial weights ×", title=name)
        axes.set_xticks([each.factor for each in found], [f"{each.factor:g}" for each in found])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("measured over bound")
    figure.suptitle("Theorem 2: above 1 a bound is wrong", fontsize=12)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def lemmas_figure(result: lemmas.Result) -> Figure:
    """Corollary 2 of Li et al. (2025): small rows over large ones, beside √(log B / B)."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, ((what, value), found) in enumerate(result.ratios.items()):
        batches = lemmas.BATCHES[: len(found)]
        axes.loglog(batches, found, label=f"{what} = {value:g}", markersize=6, **look(number))
    axes.loglog(batches, [math.sqrt(math.log(b) / b) for b in batches], color="0.4", label="√(log B / B)")
    axes.set(xlabel="batch size B", ylabel="norm of small rows over large ones", title="Corollary 2")
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False, fontsize=9)
    return figure


def figure3_figure(result: figure3.Result) -> Figure:
    """Figure 3 of Kuzborskij and Abbasi Yadkori (2025): losses and stable ranks over steps."""
    figure = Figure(figsize=(13, 3.9), layout="constrained")
    *panels, ranks = figure.subplots(1, 4)
    for axes, name in zip(panels, result.own, strict=True):
        axes.loglog(result.steps, result.own[name], label="alone", **(look(1) | {"marker": ""}))
        axes.loglog(result.steps, result.merged[name], label="merged", **(look(0) | {"marker": ""}))
        axes.set(xlabel="step", title=name.replace(", ", ",\n"))
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("logistic loss")
    panels[0].legend(frameon=False)
    for number, (name, found) in enumerate(result.ranks.items()):
        for layer, values in enumerate(zip(*found, strict=True), 1):
            style = look(number) | {"marker": "", "linestyle": "-" if layer == 1 else ":"}
            ranks.semilogx(result.steps, values, label=f"{name}, layer {layer}", **style)
    ranks.set(xlabel="step", title="stable rank", ylim=(-0.5, 8))
    ranks.legend(frameon=False, fontsize=9, loc="lower left")
    ranks.grid(alpha=0.25)
    return figure
