"""Every figure becomes a PNG and an SVG, labelled, and the same bytes each time."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from support.tiny_models import make, tuned_copy
from support.token_rows import rows

from hf_taskvec import TaskVector, analysis
from hf_taskvec.analysis import (
    CorrelationMatrix,
    CosineMatrix,
    EpochGradients,
    GradientAlignment,
    cosine_matrix,
    cross_task_linearity,
    loss_landscape,
    recommend_scales,
    stable_ranks,
)
from hf_taskvec.errors import BadValueError
from hf_taskvec.figures import Plottable, render


@pytest.fixture(scope="module")
def drawn():
    """For each kind of figure a result, and what `figure` and `plot` are asked for."""
    base = make("phi")
    fox, clock = (
        TaskVector.from_finetuned(base, tuned_copy(base, 0.05, seed=s), name=n) for s, n in ((1, "fox"), (2, "clock"))
    )
    cosines = cosine_matrix([fox, clock])
    transfer = recommend_scales(gammas=(0.792, -0.637), margin=0.2).transfer
    return {
        "correlation": (CorrelationMatrix(("fox", "clock"), ((1.0, -0.25), (-0.25, 1.0)), "last pooling"), {}),
        "transfer": (transfer, {}),
        "named transfer": (transfer, {"names": ["fox", "clock"], "high": 4.0}),
        "cosines": (cosines, {}),
        "layers": (cosines, {"view": "layers"}),
        "parts": (cosines, {"view": "parts"}),
        "ranks": (stable_ranks(base), {}),
        "linearity": (cross_task_linearity(base, fox, clock, rows(0)), {}),
        "alignment": (GradientAlignment((0.6, 0.3, 0.1), (1.0, 0.9, 0.8), (0.7, 0.6, 0.5), (0.7, 0.7, 0.65)), {}),
        "epoch gradients": (EpochGradients((3.0, 2.0, 1.0), (1.0, 0.9, 0.8)), {}),
        "landscape": (loss_landscape(base, fox, clock, {"fox": rows(0), "clock": rows(1)}, size=4), {}),
    }


EXPECTED = {
    "correlation": ["Task correlation", "fox", "−0.25"],
    "transfer": ["λ of task 1", "λ of task 2", "closed form"],
    "named transfer": ["λ of fox", "λ of clock"],
    "cosines": ["Cosine between task vectors", "clock"],
    "layers": ["layer", "Frobenius norm", "outside"],
    "parts": ["Cosine between fox and clock", "layer 1", "mlp.fc1", "outside"],
    "ranks": ["stable rank", "QKV", "MLP-2"],
    "linearity": ["coefficient", "addition", "negation of fox", "layer"],
    "alignment": ["epoch", "cosine"],
    "epoch gradients": ["epoch", "cosine with the first", "share of the gradients"],
    "landscape": ["loss on fox", "along the first vector", "across it"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_result_is_drawn_with_labels_and_saved_with_the_same_bytes(drawn, name: str, tmp_path: Path) -> None:
    result, options = drawn[name]
    assert isinstance(result, Plottable) and isinstance(result.figure(**options), Figure)
    files = render({name: partial(result.figure, **options)})
    for file, content in files.items():
        assert result.plot(tmp_path / "plots" / file, **options) == tmp_path / "plots" / file
        assert (tmp_path / "plots" / file).read_bytes() == content
    assert files[f"{name}.png"].startswith(b"\x89PNG")
    picture = files[f"{name}.svg"].decode()
    # Text is drawn as outlines; matplotlib writes what it says beside it, as a comment.
    said = " ".join(re.findall(r"<!-- (.+?) -->", picture))
    for label in EXPECTED[name]:
        assert label in said


def test_an_unknown_view_of_cosines_is_refused(drawn) -> None:
    with pytest.raises(BadValueError, match="view='heads' is not one of total, layers, parts"):
        drawn["cosines"][0].figure("heads")


def test_every_result_with_a_figure_has_the_same_two_methods() -> None:
    classes = [getattr(analysis, name) for name in analysis.__all__ if name[0].isupper() and name != "PRACTICAL_MARGIN"]
    with_figures = [each for each in classes if hasattr(each, "figure") or hasattr(each, "plot")]
    assert len(with_figures) == 8 and all(issubclass(each, Plottable) for each in with_figures)


def test_a_region_of_three_tasks_has_no_plane() -> None:
    with pytest.raises(BadValueError, match="for two tasks, not for 3"):
        recommend_scales(gammas=(0.5, 0.4, 0.3)).transfer.figure()


def test_a_region_names_its_tasks() -> None:
    transfer = recommend_scales(gammas=(0.5, 0.4)).transfer
    axes = transfer.figure(names=["oz", "pride"]).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("λ of oz", "λ of pride")
    with pytest.raises(BadValueError, match="must be two"):
        transfer.figure(names=["oz"])


@pytest.mark.parametrize(
    ("gammas", "beta", "said"),
    [
        ((0.792, -0.637), 0.01, {"Σ λγ", "Σ λγ²", "|λ|", "all three hold", "closed form"}),
        ((0.6, -0.9), 0.02 / 2.35, {"Σ λγ", "Σ λγ²", "|λ|", "all three hold", "least |λ|"}),
        ((-0.5, -0.52), 0.01, {"Σ λγ", "Σ λγ²", "|λ|"}),
        ((0.01, 0.01), 0.01, {"|λ|"}),
    ],
)
def test_a_legend_names_what_is_in_the_picture(gammas: tuple[float, float], beta: float, said: set[str]) -> None:
    transfer = recommend_scales(gammas=gammas, beta=beta).transfer
    axes = transfer.figure().axes[0]
    labels = {text.get_text().split(" = ")[0] for text in axes.get_legend().get_texts()}
    assert labels == said
    marked = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == "X"]
    assert len(marked) == bool(transfer.scales)
    assert all(tuple(point) == pytest.approx(transfer.scales) for point in marked)


def many(count: int, layers: int, outside: bool) -> CosineMatrix:
    """Vectors with a change in each layer."""
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{layer}.mlp.fc1.weight" for layer in range(layers)] + ["lm_head.weight"] * outside
    return cosine_matrix(
        {
            f"book_{i}": TaskVector.from_tensors({n: torch.randn(4, 4, generator=generator) for n in names})
            for i in range(count)
        },
        progress=False,
    )


@pytest.mark.parametrize("count", [2, 4, 5, 8])
@pytest.mark.filterwarnings("error")
def test_layers_are_lines_for_few_pairs_and_heat_maps_for_many(count: int) -> None:
    """Lines that differ, with the legend beside them; more than six pairs are heat maps with a row for each."""
    cosines = many(count, 24, outside=True)
    figure = cosines.figure("layers")
    first, second = figure.axes[:2]
    pairs = count * (count - 1) // 2
    if pairs > 6:
        assert [len(axes.get_yticks()) for axes in (first, second)] == [pairs, count] and not first.lines
    else:
        drawn = [line for line in first.lines if not line.get_label().startswith("_")]
        assert len({(line.get_color(), line.get_marker()) for line in drawn}) == len(drawn) == pairs
        figure.draw_without_rendering()
        for axes in (first, second):
            assert axes.get_legend().get_window_extent().y1 < axes.xaxis.label.get_window_extent().y0
    assert len(render({"layers": partial(cosines.figure, "layers")})) == 2


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 24, 32])
@pytest.mark.parametrize("count", [2, 5])
def test_the_last_layer_has_a_tick(layers: int, outside: bool, count: int) -> None:
    axes = many(count, layers, outside).figure("layers").axes[0]
    labels = [label.get_text().strip() for label in axes.get_xticklabels()]
    assert str(layers - 1) in labels and ("outside" in labels) == outside and len(labels) <= 14


def test_an_expert_that_is_left_alone_hides_no_other() -> None:
    """A matrix of zeros has no stable rank; the mean is over the others."""
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    ranks = stable_ranks(TaskVector.from_tensors({name.format(0): torch.eye(4), name.format(1): torch.zeros(4, 4)}))
    (line,) = ranks.figure().axes[0].lines
    assert line.get_ydata() == pytest.approx([2.0])


def test_values_that_are_not_there_are_drawn_as_gaps() -> None:
    """A layer that one vector leaves alone has no cosine."""
    name = "model.layers.{}.mlp.fc1.weight"
    one = TaskVector.from_tensors({name.format(0): torch.eye(3), name.format(1): torch.eye(3)}, name="one")
    other = TaskVector.from_tensors({name.format(0): torch.eye(3)}, name="other")
    cosines = cosine_matrix([one, other])
    assert cosines.by_layer["1"][0][1] != cosines.by_layer["1"][0][1]  # nan
    assert len(render({view: partial(cosines.figure, view) for view in ("layers", "parts")})) == 4
