"""A sweep in TensorBoard, W&B (offline) and trackio: their own readers find the numbers, tables and plots."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiny_books import HeadEdit, make_books, make_tokenizer, tiny_llama

from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.evaluation import protocols, sweep
from hf_taskvec.evaluation.reporting import tracking

SHORT = protocols.get(prompt_length=14, answer_length=8, samples=4)
FAST = {"resamples": 50, "permutations": 50, "likelihood": False}
PLOTS = {"scores", "pareto"}  # nothing was known, so nothing forgotten


def swept(log_with, output):
    model = tiny_llama()
    edit = HeadEdit(model, torch.ones_like(model.lm_head.weight))
    able = {"utility": lambda asked: {"size": float(asked.lm_head.weight.detach().sum())}}
    books = make_books()
    return sweep(
        model, edit, [0, -1], books, SHORT, tokenizer=make_tokenizer(), log_with=log_with, output=output, **able, **FAST
    )


def test_tensorboard_has_numbers_tables_and_plots(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report = swept("tensorboard", tmp_path)
    found = reading.EventAccumulator(str(tmp_path / "hf_taskvec"), size_guidance={"tensors": 0, "images": 0})
    found.Reload()
    series = found.Scalars("lamps/seen/rouge_l")
    assert [each.step for each in series] == [0, 1]
    expected = [report.score("lamps", scale).value.value for scale in (0, -1)]
    assert [each.value for each in series] == pytest.approx(expected)
    assert [each.value for each in found.Scalars("utility/size")] == pytest.approx(
        [score.value.value for score in report.utility], rel=1e-5
    )
    texts = {name: found.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in found.Tags()["tensors"]}
    assert "| lamps |" in texts["table/rouge_l/text_summary"] and "| size |" in texts["table/utility/text_summary"]
    assert set(found.Tags()["images"]) == {f"plot/{name}" for name in PLOTS}
    image = found.Images("plot/pareto")[0]
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width > 300
    assert not any("lamps in room" in text for text in texts.values())  # no passage


def test_wandb_offline_has_numbers_tables_and_plots(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    report = swept("wandb", None)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (table,) = (json.loads(path.read_text()) for path in run.glob("files/media/table/table/scores*.json"))
    assert table["columns"] == list(report.to_pandas().columns) and len(table["data"]) == len(report.to_pandas())
    images = {path.name.split("_")[0] for path in run.glob("files/media/images/plot/*.png")}
    assert images == PLOTS
    assert list(run.glob("*.wandb")) and list(run.glob("files/media/table/table/utility*.json"))


def test_trackio_has_numbers_tables_and_plots(tmp_path):
    """In a process of its own: trackio finds its folder when it is imported."""
    pytest.importorskip("trackio")
    here = Path(__file__).resolve()
    code = (
        f"import sys; sys.path.insert(0, {str(here.parents[1])!r}); sys.path.insert(0, {str(here.parent)!r})\n"
        "from test_tracking import swept\n"
        "print('ROUGE', swept('trackio', None).score('lamps', -1).value.value)"
    )
    settings = {"TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(here.parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (value,) = (float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("ROUGE"))
    (path,) = tmp_path.glob("hf_taskvec*.db")
    with sqlite3.connect(path) as database:
        rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by step, id")]
    assert [row["lamps/seen/rouge_l"] for row in rows if "lamps/seen/rouge_l" in row][1] == pytest.approx(value)
    (shown,) = (row for row in rows if "table/scores" in row)
    assert shown["table/scores"]["_type"] == "trackio.table" and "table/utility" in shown and shown["verdict"]
    assert {name for name in shown if name.startswith("plot/")} == {f"plot/{name}" for name in PLOTS}


def test_what_cannot_log_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: object())
    with pytest.raises(BadValueError, match="'tensorboard' writes files: give output="):
        tracking.check_trackers("tensorboard", None)
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", ["trackio"]):
        with pytest.raises(UnsupportedError, match=r"needs that package: pip install 'hf-taskvec\[trackers\]'"):
            tracking.check_trackers(name, "out")
