"""The output folder of an experiment belongs to one config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_taskvec import TaskVectorError
from hf_taskvec.experiments.results_folder import open_results_folder


def test_a_folder_belongs_to_one_config(tmp_path: Path) -> None:
    folder = open_results_folder(tmp_path / "out", {"seed": 0, "scales": (0.0, -1.0)})
    assert json.loads((folder / "config.json").read_text()) == {"seed": 0, "scales": [0.0, -1.0]}
    (folder / "stages").mkdir()
    open_results_folder(folder, {"seed": 0, "scales": [0.0, -1.0]})  # the same again
    with pytest.raises(TaskVectorError, match=r"another config \(seed: 0 → 1\). Choose another --output"):
        open_results_folder(folder, {"seed": 1, "scales": [0.0, -1.0]})
    open_results_folder(folder, {"seed": 1, "scales": [0.0, -1.0]}, force=True)
    assert json.loads((folder / "config.json").read_text())["seed"] == 1


def test_what_was_there_goes_when_a_folder_is_taken_over(tmp_path: Path) -> None:
    """Nothing of two runs lies side by side: neither models and tables, nor the answers of the earlier models."""
    folder = open_results_folder(tmp_path / "out", {"seed": 0})
    for name in ("model", "adapter", "vector", "store", "stages", "mine"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    for name in ("report.json", "report.md", "scores.png", "notes.txt"):
        (folder / name).touch()
    open_results_folder(folder, {"seed": 0})
    assert (folder / "report.json").exists()
    open_results_folder(folder, {"seed": 1}, force=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "mine", "notes.txt", "stages"]


def test_a_folder_without_results_is_free(tmp_path: Path) -> None:
    """A run that failed before its first stage, or was killed while it wrote its config, keeps nobody out."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".config.json.partial").write_text('{"se')
    open_results_folder(folder, {"seed": 0})
    open_results_folder(folder, {"seed": 1})
    assert json.loads((folder / "config.json").read_text())["seed"] == 1
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(TaskVectorError, match="holds other files"):
        open_results_folder(tmp_path, {"seed": 0})
    with pytest.raises(TaskVectorError, match="is a file"):
        open_results_folder(tmp_path / "thesis.tex", {"seed": 0})
