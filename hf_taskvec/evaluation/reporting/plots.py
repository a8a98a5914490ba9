"""The plots of a report: scores against λ, forget against retain, and sample texts before and after."""

import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hf_taskvec import figures
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.escaping import visible
from hf_taskvec.evaluation.reporting.report_parts import BookInfo, PassageResult
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.scale_choice import Choice
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.texts.books import Split
from hf_taskvec.figures import COLOURS, literal, look, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {"rouge_l": "Rouge-L (F1)", "perplexity": "perplexity (log scale)"}
_LEVEL: Any = {"linestyle": (0, (1, 2)), "linewidth": 1.8}
_WIDTH = 54  # characters in a column of the page of samples


def ensure_matplotlib() -> None:
    """An error now instead of after a long sweep."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "plots need matplotlib: pip install 'hf-taskvec[plots]'; without it, run the sweep without output= and "
            "save its report with plots=False"
        )


def report_figures(report: UnlearningReport, only: Sequence[str] | None = None) -> "dict[str, Figure]":
    """Every plot (or `only` those of some names), by name."""
    ensure_matplotlib()
    pages = {
        "scores": scores_figure,
        "forgetting": forgetting_figure,
        "pareto": pareto_figure,
        "samples": samples_figure,
    }
    if report.choice is None or not any(each.relative for each in report.choice.candidates):
        del pages["forgetting"]  # nothing to forget, or an earlier report
    with figures.styled():
        return {name: draw(report) for name, draw in pages.items() if only is None or name in only}


def plot_files(report: UnlearningReport, only: Sequence[str] | None = None) -> dict[str, bytes]:
    """Every plot (or `only` those of some names) as PNG and SVG, by file name."""
    return figures.render(report_figures(report, only))


def scores_figure(report: UnlearningReport) -> "Figure":
    """Rouge-L and perplexity against λ, seen and held-out passages apart, with bands for the intervals."""
    from matplotlib.ticker import FuncFormatter

    if report.edits:
        return _edits_figure(report)
    splits: list[Split] = [s for s in ("seen", "held_out") if any(x.split == s for x in report.scores)]
    metrics = [info.name for info in report.metrics if info.name in ("rouge_l", "perplexity")]
    figure = new_figure((5.2 * len(splits) + 0.6, 3.6 * len(metrics) + 0.8))
    grid = figure.subplots(len(metrics), len(splits), squeeze=False, sharex=True, sharey="row")
    for row, metric in enumerate(metrics):
        for column, split in enumerate(splits):
            axes = grid[row][column]
            for i, book in enumerate(report.books):
                found = [s for s in report.scores if (s.book, s.split, s.metric) == (book.name, split, metric)]
                found.sort(key=lambda score: score.scale)
                if not found:
                    continue
                x = [score.scale for score in found]
                label = f"{literal(book.name)} ({book.role})"
                axes.plot(x, [s.value.value for s in found], label=label, markersize=6, linewidth=2, **look(i))
                low, high = [s.value.low for s in found], [s.value.high for s in found]
                axes.fill_between(x, low, high, color=COLOURS[i % 7], alpha=0.15, linewidth=0)
                if (level := _never_seen(report, book, metric, split)) is not None:
                    label = literal(f"{book.name}: {report.references[0].name}")
                    axes.axhline(level, label=label, **_LEVEL, color=COLOURS[i % 7])
            if metric == "perplexity":
                axes.set_yscale("log")
                for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                    ticks(FuncFormatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in "125" else ""))
            if metric == metrics[-1]:
                axes.set_xlabel("λ")
            if row == 0:
                axes.set_title("seen passages" if split == "seen" else "held-out passages")
            if column == 0:
                axes.set_ylabel(_NAMES[metric])
            if report.choice is not None and report.choice.scale is not None:
                axes.axvline(report.choice.scale, color="0.4", linestyle=":", linewidth=1.5)
            axes.grid(alpha=0.25)
    grid[0][0].invert_xaxis()  # shared: from λ=0 on the left to the strongest negation on the right
    handles, labels = grid[0][0].get_legend_handles_labels()
    if report.choice is not None and report.choice.scale is not None:
        from matplotlib.lines import Line2D

        handles.append(Line2D([], [], color="0.4", linestyle=":", linewidth=1.5))
        labels.append(f"chosen λ = {report.choice.scale:g}".replace("-", "−"))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    title = f"Scores against λ, with {report.settings.level:.0%} intervals ({literal(report.protocol.id)})"
    figure.suptitle(title, fontsize=12)
    return figure


def forgetting_figure(report: UnlearningReport) -> "Figure":
    """R by every metric against λ, and what the kept books lost: the means on the half that chooses."""
    choice = report.choice
    assert choice is not None
    if report.edits:
        return _forgetting_by_edit(report, choice)
    criteria, candidates = choice.criteria, sorted(choice.candidates, key=lambda each: each.scale)
    figure = new_figure((11, 4.6))
    left, right = figure.subplots(1, 2)
    left.axhspan(criteria.low, criteria.high, color="0.92", zorder=0)
    right.axhspan(0, criteria.retain_bound, color="0.92", zorder=0)
    for number, name in enumerate(criteria.judged):
        info = report.metric(name)
        known = [(each.scale, each.relative[name]) for each in candidates if name in each.relative]
        lost = [(each.scale, each.retained[name]) for each in candidates if name in each.retained]
        for axes, points in ((left, known), (right, lost)):
            if points:
                style = {"label": literal(info.title or name), "markersize": 6, "linewidth": 1.8}
                axes.plot(*zip(*points, strict=True), **style, **look(number))
    left.set_ylabel("R: 0 untouched, 1 as if never seen")
    left.set_title("Forgetting (band: as if never seen)", fontsize=11.5)
    right.set_ylabel("share lost by the kept book that lost most")
    right.set_title("Cost (band: allowed)", fontsize=11.5)
    for axes in (left, right):
        axes.set_xlabel("λ")
        axes.grid(alpha=0.25)
        if choice.judged is not None:
            axes.axvline(choice.judged, color="0.4", linestyle=":", linewidth=1.5)
        axes.invert_xaxis()
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    if choice.judged is not None:
        which = "chosen" if choice.scale is not None else "nearest"
        figure.suptitle(f"Dotted: the {which} λ = {choice.judged:g}".replace("-", "−"), fontsize=11)
    return figure


def pareto_figure(report: UnlearningReport) -> "Figure":
    """The forget books' score against each other book's, a point for each λ, the chosen one ringed."""
    from matplotlib.patheffects import withStroke

    metric = report.metric(report.choice.criteria.headline if report.choice is not None else "rouge_l")
    figure = new_figure((7.5, 6.2 + 0.22 * len(report.edits)))
    axes = figure.subplots()
    forget = [b.name for b in report.books if b.role == "forget"]
    others = [b for b in report.books if b.role != "forget" and b.seen]
    front = report.choice.pareto if report.choice is not None else ()
    for i, book in enumerate(others, start=1):
        for name in forget:
            ours = [report.score(name, s, metric.name) for s in report.scales]
            theirs = [report.score(book.name, s, metric.name) for s in report.scales]
            x, y = [s.value.value for s in ours], [s.value.value for s in theirs]
            label = literal(f"{book.name} ({book.role})" + (f" against {name}" if len(forget) > 1 else ""))
            points: dict[str, Any] = {"linestyle": ""} if report.edits else {}  # edits are on no line
            axes.plot([], [], label=label, **(look(i) | points))
            if not report.edits:
                axes.plot(x, y, linewidth=1.5, **(look(i) | {"marker": ""}))
            for scale, a, b in zip(report.scales, x, y, strict=True):
                inside = {} if scale in front and book.role == "retain" else {"markerfacecolor": "white"}
                axes.plot([a], [b], markersize=8, **(look(i) | {"linestyle": ""} | inside))
                if report.choice is not None and scale == report.choice.scale:
                    axes.plot([a], [b], "o", markersize=17, markerfacecolor="none", markeredgecolor="0.25")
            halo = [withStroke(linewidth=3, foreground="white")]  # legible where lines cross
            offset, side = ((-8, 7), "right") if i % 2 else ((9, -14), "left")
            for text, a, b in _labels([_point(report, s) for s in report.scales], x, y):
                place: dict[str, Any] = {"xytext": offset, "ha": side, "textcoords": "offset points"}
                axes.annotate(text, (a, b), color=COLOURS[i % 7], fontsize=9, path_effects=halo, **place)
    for i, book in enumerate(report.books):
        if (level := _never_seen(report, book, metric.name, "seen")) is not None:
            label = literal(f"{book.name}: {report.references[0].name}")
            axes.axvline(level, label=label, **_LEVEL, color=COLOURS[i % 7])
    if not forget or not others:
        axes.text(0.5, 0.5, "needs a book to forget and one to keep", ha="center", transform=axes.transAxes)
    else:
        axes.margins(0.12)
        axes.legend(frameon=False, loc="best")
        _explain_points(figure, report)
    unit = _NAMES.get(metric.name, metric.name)
    axes.set_xlabel(f"{unit} of the forgotten book: {literal(', '.join(forget))}")
    axes.set_ylabel(f"{unit} of the other books")
    axes.grid(alpha=0.25)
    title = f"What forgetting costs: a point for each {report.names.noun} (filled: Pareto front"
    chosen = report.choice is not None and report.choice.scale is not None
    axes.set_title(title + (f", ringed: chosen {report.names.noun})" if chosen else ")"), fontsize=11.5)
    return figure


def _point(report: UnlearningReport, scale: float) -> str:
    """What a point is called: its λ, or the number of its edit, whose name would run over other points."""
    return f"{scale:g}" if report.edits else report.names.short(scale)


def _explain_points(figure: "Figure", report: UnlearningReport) -> None:
    """What the numbers of edits stand for, below the plot."""
    from matplotlib.lines import Line2D

    if report.edits:
        names = [literal(f"{scale:g}: {report.names.short(scale)}") for scale in report.scales]
        keys = [Line2D([], [], linestyle="", label=name) for name in names]
        figure.legend(handles=keys, loc="outside lower left", frameon=False, fontsize=9.5, handlelength=0)


def samples_figure(report: UnlearningReport, each: int = 2) -> "Figure":
    """A page of texts side by side: the true continuation, the output at λ=0 and at the chosen or last λ."""
    chosen = report.choice.scale if report.choice is not None else None
    scale = chosen or report.scales[-1]  # if λ=0 is chosen there is no "after"
    rows = [p for book in report.books for p in _telling(report, book.name, each)]
    columns = ("prompt (its end)", "true continuation", report.names.head(0.0), _short(report.names.head(scale)))
    cells = [(_wrap(_end(p.prompt)), _wrap(p.answer), _wrap(_at(p, 0.0)), _wrap(_at(p, scale))) for p in rows]
    heights = [max(cell.count("\n") + 1 for cell in row) + 2.2 for row in cells]
    line = 0.155  # inches
    total = sum(heights) * line + 1.1
    figure = new_figure((17, total), layout=None)
    axes = figure.add_axes((0.01, 0.0, 0.98, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, 4)
    axes.set_ylim(total, 0)
    text: dict[str, Any] = {"va": "top", "parse_math": False}
    for i, title in enumerate(columns):
        axes.text(i, 0.5, title, fontsize=12, weight="bold", **text)
    known = "before" if report.edits else "at λ = 0"
    what = f"Sample generations: of each book the seen passages that were known best {known}"
    axes.text(0, 0.15, f"{what} ({report.protocol.id})", fontsize=12, color="0.35", **text)
    y = 0.9
    for passage, row, height in zip(rows, cells, heights, strict=True):
        axes.plot([0, 3.98], [y - 0.06] * 2, color="0.8", linewidth=1)
        score = [next(a.values["rouge_l"] for a in passage.at if a.scale == s) for s in (0.0, scale)]
        label = f"{visible(passage.id)}   Rouge-L {score[0]:.3f} → {score[1]:.3f}"
        colour = COLOURS[[b.name for b in report.books].index(passage.book) % 7]
        axes.text(0, y, label, fontsize=9, color=colour, weight="bold", **text)
        for i, cell in enumerate(row):
            axes.text(i, y + line * 1.2, cell, fontsize=8.5, family="monospace", linespacing=1.15, **text)
        y += height * line
    return figure


def _edits_figure(report: UnlearningReport) -> "Figure":
    """Rouge-L and perplexity of the seen passages, an edit in each row, the gentlest first."""
    metrics = [info.name for info in report.metrics if info.name in ("rouge_l", "perplexity")]
    size = (4.4 * len(metrics) + _name_width(report), 0.62 * len(report.scales) + 2.0)
    figure = new_figure(size)
    panels = figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for i, book in enumerate(report.books):
            wanted = (book.name, "seen", metric)
            found = {s.scale: s.value for s in report.scores if (s.book, s.split, s.metric) == wanted}
            if found:
                rows = {row: found[scale] for row, scale in enumerate(report.scales)}
                _dots(axes, rows, i, len(report.books), f"{literal(book.name)} ({book.role})")
            if (level := _never_seen(report, book, metric, "seen")) is not None:
                label = literal(f"{book.name}: {report.references[0].name}")
                axes.axvline(level, label=label, **_LEVEL, color=COLOURS[i % 7])
        axes.set_xlabel(_NAMES[metric])
        if metric == "perplexity":
            axes.set_xscale("log")
    _name_rows(panels[0], report)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    title = f"Scores of the seen passages, with {report.settings.level:.0%} intervals ({literal(report.protocol.id)})"
    figure.suptitle(title, fontsize=12)
    return figure


def _forgetting_by_edit(report: UnlearningReport, choice: Choice) -> "Figure":
    """R by every metric, and what the kept books lost, an edit in each row: the means on the half that chooses."""
    criteria = choice.criteria
    figure = new_figure((10 + _name_width(report), 0.55 * len(report.scales) + 2.2))
    left, right = figure.subplots(1, 2, sharey=True)
    left.axvspan(criteria.low, criteria.high, color="0.92", zorder=0)
    right.axvspan(0, criteria.retain_bound, color="0.92", zorder=0)
    row_of = {scale: row for row, scale in enumerate(report.scales)}
    for number, name in enumerate(criteria.judged):
        label = literal(report.metric(name).title or name)
        for axes, part in ((left, "relative"), (right, "retained")):
            values = {row_of[each.scale]: getattr(each, part) for each in choice.candidates}
            points = {r: Interval(*[found[name]] * 3) for r, found in values.items() if name in found}
            _dots(axes, points, number, len(criteria.judged), label)
    _cut_at(left, _FAR)
    left.set_xlabel("R: 0 untouched, 1 as if never seen (band: as if never seen)")
    right.set_xlabel("share lost by the kept book that lost most (band: allowed)")
    _name_rows(left, report)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


# An R beyond this is told, not shown to scale: a model that was destroyed would leave no room for the others.
_FAR = 2.5


def _cut_at(axes: Any, most: float) -> None:
    """End an axis where points beyond it would press the others together; their numbers stand at its end."""
    beyond = [
        (x, y, line.get_color())
        for line in axes.get_lines()
        if line.get_marker() not in ("", "None", None)
        for x, y in zip(*line.get_data(), strict=True)
        if x > most
    ]
    if not beyond:
        return
    axes.set_xlim(right=most)
    for x, y, colour in beyond:
        axes.text(most, y, f"{x:.1f} → ", color=colour, ha="right", va="center", fontsize=8)


def _dots(axes: Any, rows: Mapping[int, Interval], number: int, of: int, label: str) -> None:
    """Values with their intervals, one in each row; those of other books or metrics lie a little above or below."""
    shift = (number - (of - 1) / 2) * 0.6 / max(of, 2)
    style = look(number) | {"linestyle": ""}
    axes.plot([v.value for v in rows.values()], [row + shift for row in rows], markersize=6, label=label, **style)
    for row, value in rows.items():
        axes.plot([value.low, value.high], [row + shift] * 2, color=COLOURS[number % 7], linewidth=1.6)


def _name_rows(axes: Any, report: UnlearningReport) -> None:
    """The edits' names beside their rows, the judged one marked."""
    judged = None if report.choice is None else report.choice.judged
    chosen = None if report.choice is None else report.choice.scale
    mark = "chosen: " if chosen is not None else "nearest: "
    names = [(mark if scale == judged else "") + _short(report.names.short(scale)) for scale in report.scales]
    axes.set_yticks(range(len(names)), [literal(name) for name in names])
    axes.invert_yaxis()
    for each in axes.figure.axes:
        each.grid(alpha=0.25)


def _name_width(report: UnlearningReport) -> float:
    """How many inches the edits' names take beside an axis."""
    return 0.9 + 0.085 * max(len(_short(report.names.short(scale))) for scale in report.scales)


def _short(name: str, most: int = 44) -> str:
    """A name that fits beside an axis."""
    return name if len(name) <= most else name[: most - 1] + "…"


def _never_seen(report: UnlearningReport, book: BookInfo, metric: str, split: Split) -> float | None:
    """What the first reference model scores on a book to forget: the level that forgetting aims at."""
    if book.role != "forget" or not report.references:
        return None
    wanted = (report.references[0].name, book.name, metric, split)
    found = (s for s in report.reference_scores if (s.reference, s.book, s.metric, s.split) == wanted)
    return next((score.value.value for score in found), None)


def _labels(texts: Sequence[str], x: list[float], y: list[float]) -> list[tuple[str, float, float]]:
    """A label for each point, one for all that lie too close for two."""
    wide, high = (max(values) - min(values) or 1.0 for values in (x, y))
    found: list[tuple[list[str], float, float]] = []
    for text, a, b in zip(texts, x, y, strict=True):
        for names, c, d in found:
            if abs(a - c) < 0.06 * wide and abs(b - d) < 0.05 * high:
                names.append(text)
                break
        else:
            found.append(([text], a, b))
    return [(literal(", ".join(map(_short, names))), a, b) for names, a, b in found]


def _telling(report: UnlearningReport, book: str, most: int) -> list[PassageResult]:
    """The seen passages that were known best at λ=0: there is something to forget."""
    found = [p for p in report.passages if p.book == book and p.split == "seen"]
    return sorted(found, key=lambda p: -p.at[0].values["rouge_l"])[:most]


def _at(passage: PassageResult, scale: float) -> str:
    return next(found.output for found in passage.at if found.scale == scale) or "(empty)"


def _end(prompt: str, most: int = 220) -> str:
    """The last words of a prompt."""
    return prompt if len(prompt) <= most else "… " + prompt[-most:].split(" ", 1)[-1]


def _wrap(text: str, lines: int = 8) -> str:
    # Control characters and lone surrogates of a broken model's output have no glyph.
    clean = "".join(letter if letter.isprintable() else " " for letter in text)
    return "\n".join(textwrap.wrap(clean.strip(), _WIDTH, max_lines=lines, placeholder=" …")) or "(empty)"
