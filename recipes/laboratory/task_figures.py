"""Figures of the sections that train on several tasks."""

import torch
from laboratory import averaging, digits, matching, rounds, trajectories
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from hf_taskvec.figures import COLOURS, look


def digits_figure(result: digits.Result) -> Figure:
    """Figure 1 of Li et al. (2025): accuracy on both tasks over λ."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    grid = figure.subplots(1, len(result.sweeps), sharey=True)
    for axes, (case, sweep) in zip(grid, result.sweeps.items(), strict=True):
        for number, values in enumerate(sweep):
            axes.plot(digits.SCALES, values, label=f"task {number + 1}", markersize=4, **look(1 - number))
        axes.set(title=f"{case} (r_o = {digits.CASES[case]:g})", xlabel="λ in θ₀ + τ₁ + λτ₂")
        axes.grid(alpha=0.25)
    grid[0].set_ylabel("accuracy (%)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("Parity of coloured digits", fontsize=12)
    return figure


def digits_transfer_figure(result: digits.Result) -> Figure:
    """Figure 2 of Li et al. (2025): accuracy on a new task over both λ, with Theorem 3's region."""
    figure = Figure(figsize=(6.2, 5.2), layout="constrained")
    axes = figure.subplots()
    low, high = digits.AXIS[0] - 0.1, digits.AXIS[-1] + 0.1
    image = axes.imshow(result.grid, origin="lower", extent=(low, high, low, high), cmap="cividis")
    if result.transfer is not None:
        fine = [digits.AXIS[0] + 0.02 * n for n in range(251)]
        inside = [[float(result.transfer.holds((x, y))) for x in fine] for y in fine]
        axes.contour(fine, fine, inside, levels=[0.5], colors=COLOURS[0], linewidths=2.5)
        axes.plot([], [], color=COLOURS[0], linewidth=2.5, label="Theorem 3's region (0.2 + c)")
    marker = {"markeredgecolor": "white", "markersize": 11, "linestyle": ""}
    axes.plot(*result.best, "X", color="black", label="chosen on other digits", **marker)
    axes.set(xlabel="λ of task 1", ylabel="λ of task 2", title="Accuracy on a new task (%)")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.colorbar(image, ax=axes)
    return figure


def epochs_figure(result: trajectories.Result) -> Figure:
    """Figures 2 and 3 of Zhou et al. (2025): merged accuracy by task, and gradients by epoch."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    bars, shares, cosines = figure.subplots(1, 3)
    names = ("untouched", "one epoch", "all epochs")
    for number, name in enumerate(names):
        places = [task + 0.27 * (number - 1) for task in range(1, len(result.accuracies[name]) + 1)]
        bars.bar(places, result.accuracies[name], 0.25, color=COLOURS[number], label=name)
    bars.set(xlabel="task", ylabel="accuracy (%)", title="task arithmetic", ylim=(0, 115))
    bars.xaxis.get_major_locator().set_params(integer=True)
    bars.legend(frameon=False, fontsize=9, loc="upper center", ncols=3, columnspacing=0.8, handlelength=1.2)
    for number, (share, cosine) in enumerate(zip(result.shares, result.with_first, strict=True)):
        epochs = range(1, len(share) + 1)
        shares.plot(epochs, share, markersize=4, **look(number))
        cosines.plot(epochs, cosine, markersize=4, label=f"task {number + 1}", **look(number))
    cosines.axhline(0.8, color="0.5", linewidth=0.8)
    shares.set(xlabel="epoch", ylabel="share of the gradients' norm", title="how long each epoch's gradient is")
    cosines.set(xlabel="epoch", ylabel="cosine with the first", title="where it points")
    cosines.legend(frameon=False, fontsize=9)
    for axes in (bars, shares, cosines):
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return figure


def paths_figure(result: trajectories.Result) -> Figure:
    """Figure 4 of Zhou et al. (2025): merged checkpoints, epoch by epoch, in two principal components."""
    figure = Figure(figsize=(6.6, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, (name, path) in enumerate(result.paths.items()):
        x, y = path.T.tolist()
        label = f"{name} (loss {result.final[name]:.2f})"
        axes.plot(x, y, markersize=4, label=label, **look(number))
    axes.plot(x[:1], y[:1], "k*", markersize=13, linestyle="", label="θ₀")
    axes.set(xlabel="first principal component", ylabel="second", title="Merged models, epoch by epoch")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    return figure


def averaging_figure(result: averaging.Result) -> Figure:
    """Figures 4, 9, 10, 12 of Zhou et al. (2024)."""
    figure = Figure(figsize=(13, 7), layout="constrained")
    (soup, both, task), (own, layers, bound) = figure.subplots(2, 3)
    soup.plot(*zip(*result.points, strict=True), markersize=5, **(look(1) | {"linestyle": ""}))
    soup.set(
        xlabel="accuracy of the average (%)", ylabel="accuracy of the ensemble (%)", title="three models (figure 4)"
    )
    for number, (name, pairs) in enumerate(result.stitched.items()):
        both.plot(*zip(*pairs, strict=True), label=name, markersize=4, **look(number))
    both.set(xlabel="accuracy on task 1 (%)", ylabel="accuracy on task 2 (%)", title="stitched, λ to 1 (figure 9)")
    both.legend(frameon=False, fontsize=9)
    for number, (name, pairs) in enumerate(result.negated.items()):
        for axes, values in zip((task, own), zip(*pairs, strict=True), strict=True):
            axes.plot((0.0, *averaging.SCALES), values, label=name.replace("_0", "₀"), markersize=4, **look(number))
    task.set(xlabel="λ", ylabel="accuracy on the task (%)", title="stitched negation (figure 10)")
    own.set(xlabel="λ", ylabel="accuracy on pretraining (%)", title="stitched negation (figure 10)")
    task.legend(frameon=False, fontsize=9)
    for number, (name, (cosine, baseline)) in enumerate(result.pretrainings.items()):
        places = range(1, len(cosine) + 1)
        layers.plot(places, cosine, label=name, markersize=5, **look(number))
        layers.plot(places, baseline, color=COLOURS[number], linestyle=":", linewidth=1.5)
    layers.plot([], [], color="0.4", linestyle=":", label="baselines")
    layers.set(xlabel="layer", ylabel="1 − cosine", yscale="log", title="pretraining (figure 12)")
    layers.xaxis.get_major_locator().set_params(integer=True)
    layers.legend(frameon=False, fontsize=9)
    delta, _, _, product = zip(*result.bounds, strict=True)
    bound.loglog(product, delta, markersize=5, **(look(2) | {"linestyle": ""}))
    ends = (min(product), max(product))
    bound.loglog(ends, ends, color="0.4", linewidth=1, label="equal")
    bound.xaxis.set_minor_formatter(NullFormatter())  # they overlap
    bound.set(xlabel="λ_max‖θᵢ − θⱼ‖²/8", ylabel="δ", title="Theorem 1")
    bound.legend(frameon=False, fontsize=9)
    for axes in (soup, both, task, own, layers, bound):
        axes.grid(alpha=0.25)
    return figure


def matching_figure(result: matching.Result) -> Figure:
    """Figure 11 of Zhou et al. (2024): features half-way between two models, by hidden layer."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    far, factor = figure.subplots(1, 2)
    places = range(1, len(result.baseline) + 1)
    for number, (name, (cosine, coefficient)) in enumerate(result.curves.items()):
        far.plot(places, cosine, label=name, **look(number))
        factor.plot(places, coefficient, **look(number))
    far.plot(places, result.baseline, color="0.4", linestyle=":", label="baseline: 1 − cosine of the unmatched models")
    factor.axhline(1, color="0.4", linestyle=":")
    far.set(ylabel="1 − cosine (median)", yscale="log")
    factor.set(ylabel="coefficient (median)")
    for axes in (far, factor):
        axes.set_xlabel("hidden layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
    figure.suptitle("Features half-way between two models (α = 0.5)", fontsize=12)
    figure.legend(*far.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def rounds_figure(result: rounds.Result) -> Figure:
    """Figures 4 to 6 and 11 of MIMA: accuracies, λ and cosines over N; cosines over the rounds of the largest N."""
    figure = Figure(figsize=(16, 3.9), layout="constrained")
    accuracy, scale, gap, cosine, rising = figure.subplots(1, 5)
    counts = list(result.outcomes)
    places = range(len(counts))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    every = list(result.outcomes.values())
    accuracy.plot(places, [mean([e.own for e in each]) for each in every], color="0.4", label="own models")
    accuracy.plot(places, [mean([e.average for e in each]) for each in every], label="average", **look(0))
    for number, rule in enumerate(rounds.FIXED, 1):
        tuned = [mean([e.best[rule][1] for e in each]) for each in every]
        fixed = [mean([e.fixed[rule] for e in each]) for each in every]
        accuracy.plot(places, tuned, label=rule, **(look(number) | {"linestyle": "-"}))
        label = f"{rule}, λ = {rounds.FIXED[rule]:g}"
        accuracy.plot(places, fixed, label=label, **(look(number) | {"linestyle": ":"}))
        scale.plot(places, [mean([e.best[rule][0] for e in each]) for each in every], label=rule, **look(number))
    gap.plot(places, [mean([e.own - e.average for e in each]) for each in every], **look(0))
    cosine.plot(places, [mean([e.vectors for e in each]) for each in every], label="task vectors", **look(1))
    cosine.plot(places, [mean([e.updates for e in each]) for each in every], label="|updates|", **look(0))
    for number, label in ((1, "task vectors"), (0, "|updates|")):
        rows = [each.by_round[1 - number] for each in every[-1]]
        means = [mean(list(values)) for values in zip(*rows, strict=True)]
        rising.plot(range(1, len(means) + 1), means, label=label, markersize=4, **look(number))
    rising.set(xlabel="round", title=f"N = {counts[-1]} (figure 11)", ylim=(0, 1))
    rising.xaxis.get_major_locator().set_params(integer=True)
    rising.grid(alpha=0.25)
    accuracy.set(ylabel="accuracy (%)", title="merged (figure 4)")
    scale.set(ylabel="best λ", title="Tables 2, 3")
    gap.set(ylabel="points", title="single-task gap (figure 6)")
    cosine.set(ylabel="cosine between tasks", title="at the end (figure 5)", ylim=(0, 1))
    for axes in (accuracy, scale, gap, cosine):
        axes.set_xticks(places, [str(count) for count in counts])
        axes.set_xlabel("rounds N")
        axes.grid(alpha=0.25)
    scale.legend(frameon=False, fontsize=9)
    cosine.legend(frameon=False, fontsize=9)
    figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def rounds_landscape_figure(result: rounds.Result) -> Figure:
    """Figures 7 and 12 of MIMA: errors on the plane through θ_0 and two tasks' models, over N."""
    figure = Figure(figsize=(12, 3.6 * len(result.landscapes)), layout="constrained")
    rows = figure.subplots(len(result.landscapes), 3, squeeze=False)
    for row, (count, found) in zip(rows, result.landscapes.items(), strict=True):
        panels = (*found.errors, torch.stack(found.errors).mean(dim=0))
        for axes, errors, name in zip(row, panels, ("task 1", "task 2", "mean of both"), strict=True):
            image = axes.contourf(found.x, found.y, errors, levels=15, cmap="cividis")
            for number, (label, point) in enumerate(found.points.items()):
                marker = {"markeredgecolor": "black", "markersize": 9, "linestyle": ""}
                axes.plot(*point, color="white", marker=look(number)["marker"], label=label, **marker)
            axes.set(title=f"N = {count}, {found.degrees:.0f}°: {name}", aspect="equal")
            axes.set(xlabel="along τ₁", ylabel="across it")
            figure.colorbar(image, ax=axes, shrink=0.6, label="error (%)")
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
