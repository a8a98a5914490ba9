"""The figures of the multi-task experiment, after figures 5, 6, 8–9 and 11 of the MIMA paper."""

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hf_taskvec import atomic
from hf_taskvec.experiments.multitask.results import MultitaskResults, RoundsOutcome
from hf_taskvec.experiments.multitask.round_trace import pairs
from hf_taskvec.figures import COLOURS, look, new_figure, render, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled()
def result_figures(results: MultitaskResults) -> "dict[str, Figure]":
    """The figures `gap`, `cosines`, `rounds` and `tasks`."""
    draw = {"gap": _gap, "cosines": _cosines, "rounds": _rounds, "tasks": _tasks}
    return {name: figure(results) for name, figure in draw.items()}


def save_plots(results: MultitaskResults, output: Path) -> None:
    """Write the figures into a folder, each as PNG and SVG."""
    for name, content in render(result_figures(results)).items():
        atomic.write_bytes(output / name, content)


def _figure(width: float, height: float, columns: int = 1, **options: Any) -> "tuple[Figure, Any]":
    figure = new_figure((width, height))
    return figure, figure.subplots(1, columns, squeeze=False, **options)[0]


def _rounds_axis(axes: Any, results: MultitaskResults) -> None:
    numbers = [outcome.rounds for outcome in results.outcomes]
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
    axes.set_xlabel("rounds N (the same steps in all)")


def _gap(results: MultitaskResults) -> "Figure":
    """Figures 4 and 6: scores and the single-task gap against N."""
    figure, (left, right) = _figure(10, 4, 2)
    numbers = [outcome.rounds for outcome in results.outcomes]
    left.plot(numbers, [fmean(o.single) for o in results.outcomes], color="black", marker="*", label="single")
    for number, merged in enumerate(results.outcomes[0].merged):
        same = [o.merged[number] for o in results.outcomes]
        left.plot(numbers, [fmean(m.scores) for m in same], label=merged.rule, **look(number))
        gaps = [o.gap(m) for o, m in zip(results.outcomes, same, strict=True)]
        right.plot(numbers, gaps, label=merged.rule, **look(number))
    left.axhline(fmean(results.base), color="grey", linewidth=1, linestyle=":")
    left.text(1.0, fmean(results.base), " θ₀", transform=left.get_yaxis_transform(), va="center", color="grey")
    right.axhline(0.0, color="grey", linewidth=1)
    for axes, title in ((left, "mean score of the tasks"), (right, "gap: single − merged")):
        _rounds_axis(axes, results)
        axes.set_title(title)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, ncols=6, loc="outside lower center")
    return figure


def _boxes(axes: Any, values: list[list[float]], places: list[float], colour: str, width: Any) -> None:
    """Boxes from the lower to the upper quartile, whiskers to the extremes, all in one colour."""
    drawn = axes.boxplot(values, positions=places, widths=width, patch_artist=True, manage_ticks=False, whis=(0, 100))
    for box in drawn["boxes"]:
        box.set(facecolor=colour, edgecolor=colour, alpha=0.6)
    for line in (*drawn["medians"], *drawn["whiskers"], *drawn["caps"]):
        line.set(color=colour, linewidth=2)


def _cosines(results: MultitaskResults) -> "Figure":
    """Figure 5: cosines of the final task vectors against N."""
    figure, (axes,) = _figure(5.5, 4)
    numbers = [float(outcome.rounds) for outcome in results.outcomes]
    values = [pairs(outcome.trace.rounds[-1].task_cosines) for outcome in results.outcomes]
    _boxes(axes, values, numbers, COLOURS[1], [0.25 * number for number in numbers])
    _rounds_axis(axes, results)
    axes.set_title("cos(τ_i, τ_j) of the final task vectors")
    axes.set_ylim(min(-0.1, *(min(each) for each in values)) - 0.05, 1.05)
    return figure


def _rounds(results: MultitaskResults) -> "Figure":
    """Figure 11: cosines of task vectors and of updates, round by round."""
    several: list[RoundsOutcome] = [outcome for outcome in results.outcomes if outcome.rounds > 1] or [
        results.outcomes[-1]
    ]
    figure, rows = _figure(4.2 * len(several), 4, len(several), sharey=True)
    for axes, outcome in zip(rows, several, strict=True):
        steps = [each.steps for each in outcome.trace.rounds]
        width = 0.3 * outcome.steps_per_round
        for side, kind, colour in ((-1, "task_cosines", COLOURS[1]), (1, "update_cosines", COLOURS[0])):
            values = [pairs(getattr(each, kind)) for each in outcome.trace.rounds]
            _boxes(axes, values, [step + side * width / 2 for step in steps], colour, width)
        axes.axhline(0.0, color="grey", linewidth=1)
        axes.set_xticks(steps, [str(step) for step in steps], rotation=45 if len(steps) > 4 else 0)
        axes.set_xlabel("steps")
        axes.set_title(f"N = {outcome.rounds}")
    for colour, label in ((COLOURS[1], "cos(τ_i, τ_j)"), (COLOURS[0], "cos(δ_i, δ_j)")):
        rows[0].bar([0], [0], color=colour, alpha=0.5, label=label, width=0)
    figure.legend(*rows[0].get_legend_handles_labels(), frameon=False, ncols=2, loc="outside lower center")
    return figure


def _tasks(results: MultitaskResults) -> "Figure":
    """Figures 8 and 9: each task's score by its own model and by the average."""
    figure, (axes,) = _figure(max(6.0, 1.6 * len(results.tasks)), 4)
    first, last = results.outcomes[0], results.outcomes[-1]
    bars = [("θ₀", results.base, "lightgrey")]
    for outcome, dark, light in ((first, COLOURS[0], "#F0B48C"), (last, COLOURS[1], "#8CC0E0"))[
        : len(results.outcomes)
    ]:
        merged = outcome.merged[0]
        bars.append((f"single, N = {outcome.rounds}", outcome.single, light))
        bars.append((f"{merged.rule}, N = {outcome.rounds}", merged.scores, dark))
    width = 0.8 / len(bars)
    for number, (label, scores, colour) in enumerate(bars):
        places = [task + (number - (len(bars) - 1) / 2) * width for task in range(len(results.tasks))]
        axes.bar(places, scores, width=width, color=colour, label=label)
    long = max(map(len, results.tasks)) > 12  # as a book's file may be named
    axes.set_xticks(range(len(results.tasks)), results.tasks, **({"rotation": 15, "ha": "right"} if long else {}))
    axes.set_ylabel("next tokens predicted")
    axes.set_title("held-out text of each task")
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    return figure
