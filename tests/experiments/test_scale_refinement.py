"""The sweep tries more λ where the book is just forgotten."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.unlearn_experiment import candidates

from hf_taskvec.evaluation import UnlearningReport
from hf_taskvec.experiments.unlearning import scale_refinement
from hf_taskvec.experiments.unlearning.scale_refinement import _scale_between


@pytest.mark.parametrize(
    ("forget", "middle"),
    [
        ({0.0: 0.5, -0.5: 0.4, -1.0: 0.1}, -0.75),
        ({0.0: 0.5, -1.0: 0.1, -0.5: 0.2}, -0.25),
        ({0.0: 0.5, 0.3: 0.2, -0.5: 0.1}, 0.15),
        ({0.0: 0.5, -0.5: 0.4}, None),  # none forgets enough
        ({0.0: 0.2, -0.5: 0.1}, None),  # there was nothing to forget
        ({}, None),
    ],
)
def test_the_next_scale_halves_the_interval_in_which_the_book_is_forgotten(
    edited: Any, forget: dict[float, float], middle: float | None
) -> None:
    assert _scale_between(candidates(edited.report, forget, 0.3)) == middle


def test_without_a_book_to_forget_there_is_no_next_scale(edited: Any) -> None:
    assert _scale_between(dataclasses.replace(edited.report, choice=None)) is None


def test_the_refined_sweep_halves_the_interval(monkeypatch: pytest.MonkeyPatch, edited: Any, tmp_path: Path) -> None:
    """The forget score is 0.5 + λ/2 here, and 0.3 is the never-seen level: λ = −0.4."""
    asked: list[tuple[list[float], Any]] = []

    def swept(model: Any, edit: Any, scales: list[float], books: Any, **options: Any) -> UnlearningReport:
        asked.append((list(scales), options.get("output")))
        return candidates(edited.report, {scale: 0.5 + scale / 2 for scale in scales}, 0.3)

    monkeypatch.setattr(scale_refinement, "sweep", swept)
    scale_refinement.refined_sweep(None, None, [0.0, -1.0], (), refine=3, output=tmp_path, seed=0)
    assert asked[-1] == ([0.0, -1.0, -0.5, -0.25, -0.375], tmp_path)
    assert all(output is None for _, output in asked[:-1])  # only the last is a report
