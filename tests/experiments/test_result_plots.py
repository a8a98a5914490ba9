"""The multi-task figures of a finished run: nothing lies on top of anything."""

import json
from pathlib import Path

import pytest

from hf_taskvec.experiments.multitask.result_plots import result_figures
from hf_taskvec.experiments.multitask.results import MultitaskResults
from hf_taskvec.typed_values import typed

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "multitask" / "stories15m-80.json"


@pytest.fixture(scope="module")
def figures() -> dict:
    found = json.loads(EVIDENCE.read_text("utf-8"))
    drawn = result_figures(typed(MultitaskResults, found))
    for figure in drawn.values():
        figure.draw_without_rendering()
    return drawn


@pytest.mark.parametrize("name", ["gap", "rounds", "tasks"])
def test_legends_lie_outside_the_axes(figures: dict, name: str) -> None:
    (legend,) = figures[name].legends
    box = legend.get_window_extent()
    for axes in figures[name].axes:
        assert axes.get_legend() is None and not box.overlaps(axes.get_window_extent())


def test_long_names_of_tasks_are_turned(figures: dict) -> None:
    """Side by side they would run into each other."""
    labels = figures["tasks"].axes[0].get_xticklabels()
    assert max(len(label.get_text()) for label in labels) > 12
    assert all(label.get_rotation() > 0 for label in labels)
