"""The output folder of an experiment belongs to one config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_taskvec import TaskVectorError
from hf_taskvec.filenames import ADAPTER_RECORD, MODEL_RECORD, VECTOR_RECORD
from hf_taskvec.files.results_folder import open_results_folder


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
    files = {
        "model": MODEL_RECORD,
        "adapter": ADAPTER_RECORD,
        "vector": VECTOR_RECORD,
        "store": f"{'0' * 32}.json",
        "stages": "file",
        "mine": "file",
    }
    for name, file in files.items():
        (folder / name).mkdir()
        (folder / name / file).touch()
    audit = ("audit.json", "audit.md", "audit-attacks.png", "audit-relearning.svg", "audit-inside.png")
    for name in ("report.json", "report.md", "report.html", "scores.png", "notes.txt", *audit):
        (folder / name).touch()
    open_results_folder(folder, {"seed": 0})
    assert (folder / "report.json").exists()
    open_results_folder(folder, {"seed": 1}, force=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "mine", "notes.txt", "stages"]


def test_what_others_put_into_the_results_stays(tmp_path: Path) -> None:
    folder = open_results_folder(tmp_path / "out", {"seed": 0})
    for name in ("model", "store"):
        (folder / name).mkdir()
    (folder / "model" / MODEL_RECORD).touch()
    (folder / "model" / "notes.txt").touch()
    (folder / "report.json").touch()
    with pytest.raises(TaskVectorError, match=r"model holds files that hf_taskvec did not write.*notes\.txt"):
        open_results_folder(folder, {"seed": 1}, force=True)
    assert (folder / "report.json").exists() and (folder / "model" / "notes.txt").exists()
    (folder / "model" / "notes.txt").rename(folder / "store" / "notes.txt")
    open_results_folder(folder, {"seed": 1}, force=True)
    assert sorted(path.name for path in folder.rglob("*")) == ["config.json", "notes.txt", "store"]


def test_neither_a_model_nor_what_a_link_leads_to_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name, text in {"config.json": '{"model_type": "phi"}', "model.safetensors": "", "report.md": "mine"}.items():
        (tmp_path / "model" / name).write_text(text)
    with pytest.raises(TaskVectorError, match="the folder model holds a model"):
        open_results_folder(tmp_path / "model", {"seed": 0}, force=True)
    assert (tmp_path / "model" / "report.md").read_text() == "mine"
    folder = open_results_folder(tmp_path / "out", {"seed": 0})
    (folder / "report.md").touch()
    (tmp_path / "link").symlink_to(folder)
    open_results_folder(tmp_path / "link", {"seed": 0})
    with pytest.raises(TaskVectorError, match="link is a link to a folder with results"):
        open_results_folder(tmp_path / "link", {"seed": 1}, force=True)


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
