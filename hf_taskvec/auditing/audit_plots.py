"""The plots of an audit: R under every attack, relearning curves, and what each layer knows."""

from typing import TYPE_CHECKING, Any

from hf_taskvec import figures
from hf_taskvec.auditing.audit_report import AuditReport
from hf_taskvec.evaluation.reporting.plots import ensure_matplotlib
from hf_taskvec.evaluation.scoring.metrics import METRICS
from hf_taskvec.figures import COLOURS, literal, look, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MODELS = ("untouched", "edited", "reference")
_CURVES = ("rouge_l", "loss")
# R far beyond these says no more than that it is beyond.
_SHOWN = (-0.5, 2.0)


def audit_figures(report: AuditReport) -> "dict[str, Figure]":
    """Every plot for which something was tried, by name."""
    ensure_matplotlib()
    with figures.styled():
        found = {"audit-attacks": attacks_figure(report)}
        if any(finding.group == "relearn" for finding in report.findings):
            found["audit-relearning"] = relearning_figure(report)
        if report.inside is not None:
            found["audit-inside"] = inside_figure(report)
    return found


def attacks_figure(report: AuditReport) -> "Figure":
    """R of every metric, before and under each attack, with its interval; the band is what counts as forgotten."""
    rows = [("before any attack", report.plain.verdict)]
    rows += [(finding.attack, finding.last.verdict) for finding in report.findings]
    names = list(report.criteria.judged)
    figure = new_figure((9, 1.6 + 0.42 * len(rows)))
    axes = figure.subplots()
    axes.axvspan(report.criteria.low, report.criteria.high, color="0.92", zorder=0)
    for mark in (0.0, 1.0):
        axes.axvline(mark, color="0.6", linewidth=1, zorder=1)
    for place, (_, verdict) in enumerate(rows):
        for number, name in enumerate(names):
            for found in verdict.metrics:
                if found.metric != name or found.relative is None:
                    continue
                y = place + 0.16 * (number - (len(names) - 1) / 2)
                low, value, high = (
                    min(max(end, _SHOWN[0]), _SHOWN[1])
                    for end in (found.relative.low, found.relative.value, found.relative.high)
                )
                axes.plot([low, high], [y, y], color=COLOURS[number % 7], linewidth=1.6, zorder=2)
                axes.plot([value], [y], markersize=5, zorder=3, **(look(number) | {"linestyle": ""}))
    for number, name in enumerate(names):
        axes.plot([], [], label=METRICS[name].title or name, **(look(number) | {"linestyle": ""}))
    axes.set_yticks(range(len(rows)), [literal(name) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(_SHOWN[0] - 0.08, _SHOWN[1] + 0.08)
    axes.set_xlabel("R: 0 as the attacked untouched model, 1 as the attacked model that never saw the book")
    axes.set_title("What each attack brings back (band: as if never seen)", fontsize=12)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def relearning_figure(report: AuditReport) -> "Figure":
    """Rouge-L and loss of the three models against training steps, for each text that is relearnt."""
    from matplotlib.ticker import MaxNLocator

    findings = [finding for finding in report.findings if finding.group == "relearn"]
    figure = new_figure((3.6 * len(findings) + 0.6, 6.4))
    grid = figure.subplots(len(_CURVES), len(findings), squeeze=False, sharex="col", sharey="row")
    for column, finding in enumerate(findings):
        for row, metric in enumerate(_CURVES):
            axes = grid[row][column]
            for number, which in enumerate(_MODELS):
                _curve(axes, finding.points, metric, which, number)
            axes.grid(alpha=0.25)
            if row == 0:
                axes.set_title(literal(finding.attack.removeprefix("relearn-")), fontsize=11)
            if column == 0:
                axes.set_ylabel(METRICS[metric].title)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if row == len(_CURVES) - 1:
                axes.set_xlabel("steps")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Relearning: how fast does the book come back?", fontsize=12)
    return figure


def _curve(axes: Any, points: Any, metric: str, which: str, number: int) -> None:
    found = [(p.step, getattr(r, which)) for p in points for r in p.results if r.metric == metric]
    x = [step for step, _ in found]
    axes.plot(x, [value.value for _, value in found], label=which, markersize=5, linewidth=1.8, **look(number))
    low, high = [value.low for _, value in found], [value.high for _, value in found]
    axes.fill_between(x, low, high, color=COLOURS[number % 7], alpha=0.15, linewidth=0)


def inside_figure(report: AuditReport) -> "Figure":
    """The logit lens of the three models over layers, and what their states cost the untouched model."""
    from matplotlib.ticker import MaxNLocator

    inside = report.inside
    assert inside is not None
    figure = new_figure((10, 4.2))
    left, right = figure.subplots(1, 2)
    x = [view.layer for view in inside.lens]
    for number, which in enumerate(_MODELS):
        views = [getattr(view, which) for view in inside.lens]
        left.plot(x, [view.value for view in views], label=which, markersize=5, linewidth=1.8, **look(number))
        left.fill_between(
            x, [v.low for v in views], [v.high for v in views], color=COLOURS[number % 7], alpha=0.15, linewidth=0
        )
    left.set_xlabel("layer (0: embedding)")
    left.set_ylabel("log-probability of a true token")
    left.set_title("Logit lens", fontsize=11.5)
    layers = range(1, len(inside.reference_drops) + 1)
    for number, (label, drops) in enumerate(
        (("reference's states", inside.reference_drops), ("edited model's states", inside.edited_drops)), start=1
    ):
        style = look(3 - number)
        right.plot(layers, drops, label=label, markersize=5, linewidth=1.8, **style)
    right.set_xlabel("layer whose states are replaced")
    right.set_ylabel("cost for the untouched model (nats a token)")
    depth = "" if inside.depth is None else f": {inside.depth.value:.2f}"
    right.set_title(f"Unlearning depth{depth}", fontsize=11.5)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    return figure
