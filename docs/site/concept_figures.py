"""The figures of the concepts' pages, drawn anew.

    python docs/site/concept_figures.py PLAY      # PLAY: where the playground's tiny models are, or shall be made

The second one shows what was measured on these models, not a sketch.
"""

import sys
from pathlib import Path

from hf_taskvec import TaskVector
from hf_taskvec.evaluation import score_scales
from hf_taskvec.experiments.playground import Playground, make_playground
from hf_taskvec.figures import COLOURS, new_figure, render, styled
from hf_taskvec.models.loading import load_for_evaluation
from hf_taskvec.training import block_losses

FOLDER = Path(__file__).resolve().parents[1] / "concepts"


@styled()
def arrows():
    """Fine-tunes as points, and what is done with the ways between them."""
    figure = new_figure((11, 3.6))
    axes = figure.subplots(1, 3)
    base, one, two = (0.0, 0.0), (2.0, 0.6), (0.4, 1.7)

    def arrow(on, start, end, label, colour, side=(0.0, 0.0), style="-|>"):
        on.annotate(
            "", end, start, arrowprops={"arrowstyle": style, "color": colour, "lw": 2, "shrinkA": 0, "shrinkB": 0}
        )
        middle = ((start[0] + end[0]) / 2 + side[0], (start[1] + end[1]) / 2 + side[1])
        on.text(*middle, label, color=colour, ha="center", va="center")

    def point(on, at, label, side=(0.0, -0.28)):
        on.plot(*at, "o", color="black", markersize=6)
        on.text(at[0] + side[0], at[1] + side[1], label, ha="center", va="center")

    titles = ("a task vector: τ = θ − θ₀", "adding skills: θ₀ + τ₁ + τ₂", "forgetting: θ′ + λτ, λ < 0")
    for on, title in zip(axes, titles, strict=True):
        on.set_title(title)
        on.set(xlim=(-2.2, 3.0), ylim=(-1.2, 2.9), xticks=[], yticks=[])
        on.spines[:].set_visible(False)
        point(on, base, "θ₀, the base")
    left, middle, right = axes
    arrow(left, base, one, "τ", COLOURS[0], (0.0, 0.28))
    point(left, one, "θ, fine-tuned", (0.0, 0.3))
    both = (one[0] + two[0], one[1] + two[1])
    arrow(middle, base, one, "τ₁", COLOURS[0], (0.1, -0.3))
    arrow(middle, base, two, "τ₂", COLOURS[1], (-0.35, 0.1))
    middle.plot([one[0], both[0], two[0]], [one[1], both[1], two[1]], ":", color="0.5")
    point(middle, both, "knows both", (0.0, 0.3))
    known = (0.4, 1.7)
    end = (known[0] - 0.8 * one[0], known[1] - 0.8 * one[1])
    arrow(right, base, one, "τ", COLOURS[0], (0.0, 0.28))
    point(right, known, "θ′, knows the book, too", (0.3, 0.35))
    arrow(right, known, end, "λτ", COLOURS[0], (0.15, -0.3))
    point(right, end, "has forgotten it?", (-0.2, -0.35))
    return figure


def measured(play: Playground):
    """The losses of a book and of another at each λ, and of the model that never saw the first."""
    first, _, other = play.books
    vector = TaskVector.from_finetuned(play.base, play.tuned, name="one")
    model, never = load_for_evaluation(play.library), load_for_evaluation(play.without)
    blocks = {"the book to forget": play.blocks(first), "an unrelated book": play.blocks(other)}

    def losses(model):
        return {name: float(block_losses(model, rows).mean()) for name, rows in blocks.items()}

    scales = [round(-0.1 * step, 1) + 0.0 for step in range(11)]
    return scales, score_scales(model, vector, scales, losses), losses(never)


@styled()
def curves(play: Playground):
    """What each λ takes from the book, and from another one."""
    scales, scores, never = measured(play)
    figure = new_figure((8, 4.2))
    axes = figure.subplots()
    for number, (name, level) in enumerate(never.items()):
        found = scores.of(name)
        axes.plot(scales, [found[scale] for scale in scales], "o-", color=COLOURS[number], label=name)
        axes.axhline(level, color=COLOURS[number], linestyle=":", label=f"{name}: a model that never saw the first")
    axes.set(xlabel="λ", ylabel="loss of the text", title="θ′ + λτ on the playground's models")
    axes.invert_xaxis()
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Draw both."""
    play = make_playground(sys.argv[1])
    for name, content in render({"vectors": arrows(), "scales": curves(play)}).items():
        if name.endswith(".png"):
            (FOLDER / name).write_bytes(content)


if __name__ == "__main__":
    main()
