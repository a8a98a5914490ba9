"""`accelerate launch recipes/baselines.py`, shrunk: other methods beside task vectors, in one table."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_taskvec import TaskVectorError
from hf_taskvec.evaluation import UnlearningReport

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "baselines.py"
SMALL = {
    "words": 900,
    "section-words": 150,
    "held-out": 0.3,
    "general-words": 1500,
    "pretrain-epochs": 2,
    "epochs": 6,
    "learning-rate": 4e-3,
    "hidden-size": 32,
    "layers": 2,
    "vocabulary": 700,
    "block-length": 48,
    "block-stride": 24,
    "prompt-length": 8,
    "answer-length": 10,
    "certain": "false",
    "edit": "paper",
}


def flags(output: Path, *more: str) -> list[str]:
    given = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    return [*given, "--scales", "0", "-0.5", "-1", "--output", str(output), "--cache", str(output.parent), *more]


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], UnlearningReport]:
    spec = importlib.util.spec_from_file_location("baselines_recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[list[str]], UnlearningReport] = module.main
    return found


def rows(folder: Path) -> dict[str, list[str]]:
    lines = (folder / "comparison.md").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert len({len(row) for row in cells}) == 1
    return {row[0]: row[1:] for row in cells if not set(row[0]) <= {"-"}}


@pytest.fixture(scope="module")
def done(main: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[UnlearningReport, Path]:
    folder = tmp_path_factory.mktemp("baselines") / "out"
    methods = ["--methods", "grad_diff", "rmu", "--method-learning-rates", "1e-5", "3e-3", "--audit", "true"]
    return main(flags(folder, *methods, "--audit-passages", "6")), folder


def test_every_method_has_a_row_and_every_edit_is_in_the_report(done: tuple[UnlearningReport, Path]) -> None:
    report, folder = done
    names = {report.names.short(scale) for scale in report.scales}
    tried = {f"{method}, {rate}" for method in ("grad_diff", "rmu") for rate in ("1e-05", "0.003")}
    assert names == tried | {"-0.5*forget", "-1*forget", "-0.5*further", "-1*further", "untouched"}
    found = rows(folder)
    assert list(found) == ["method", "untouched", "task vector", "MUSE's task vector", "grad_diff", "rmu", "retrained"]
    heads = found.pop("method")
    untouched, retrained = (dict(zip(heads, found.pop(name), strict=True)) for name in ("untouched", "retrained"))
    assert untouched["R, loss"].startswith("0.00") and untouched["trained, in retrainings"] == "0.00"
    assert retrained["R, loss"].startswith("1.00") and retrained["trained, in retrainings"] == "1.00"
    assert untouched["kept books lost, at most"] == "0%" != retrained["kept books lost, at most"]
    for row in found.values():
        cells = dict(zip(heads, row, strict=True))
        assert cells["edit"] in names
        assert re.fullmatch(r"(as if never seen|still known|over forgotten|cannot tell); .*books.*", cells["verdict"])
        assert re.match(r"−?\d\.\d\d \[", cells["R, loss"]) and re.match(r"[+−]\d\.\d\d \[", cells["AUC − never seen"])
        trained = float(cells["trained, in retrainings"])
        # A vector is trained on one book of one length; a retraining on two.
        assert 0.4 < trained < 0.6
        assert "–" not in cells["memory of the steps"] and cells["seconds"].isdigit()
        assert re.match(r"known under [0-4] of 4", cells["under attack"])
    assert (folder / "audits" / "MUSEs-task-vector" / "audit.json").exists()
    assert UnlearningReport.load(folder).scales == report.scales


def test_the_nearest_edit_of_a_method_stands_for_it(done: tuple[UnlearningReport, Path]) -> None:
    report, folder = done
    assert report.choice is not None
    missed = {report.names.short(each.scale): each.shortfall for each in report.choice.candidates}
    for method, row in rows(folder).items():
        if method in ("grad_diff", "rmu"):
            mine = {name: value for name, value in missed.items() if name.startswith(f"{method}, ")}
            assert len(mine) == 2 and missed[row[0]] == min(mine.values())


def test_what_diverges_is_said_and_what_is_done_is_not_done_again(
    main: Any, done: tuple[UnlearningReport, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = done[1].parent / "wild"
    report = main(flags(folder, "--methods", "ga", "--method-learning-rates", "1e30"))
    printed = capfd.readouterr().out
    for stage in ("base", "joint", "forget", "retrain", "further"):
        assert f"{stage}: done before" in printed
    assert re.search(r"ga, 1e\+30: diverged, .*nothing was saved", printed)
    row = rows(folder)["ga"]
    assert row[0] == "ga, 1e+30" and "diverged" in row and row.count("–") >= 6
    assert "ga, 1e+30" not in {report.names.short(scale) for scale in report.scales}
    assert not list(done[1].parent.glob("ga-*"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--methods", "nop"], "no unlearning method 'nop'"),
        (["--budget", "0"], "budget=0.0 must be a number above 0"),
        (["--method-learning-rates", "-1"], "learning_rate=-1.0"),
        (["--retrain", "false"], "beside a model that never saw the book"),
        (["--push-to-hub", "me/model"], "a comparison makes no model to push"),
        (["--audit-attacks", "quantize"], "Did you mean 'quantise'?"),
        (["--edit", "project"], "needs the other books' vectors"),
        (["--rank", "4"], "--rank is for recipes/unlearn.py"),
        (["--controls", "true"], "--controls is for recipes/unlearn.py"),
    ],
)
def test_what_makes_no_sense_is_refused(main: Any, tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(TaskVectorError, match=re.escape(message)):
        main(flags(tmp_path / "out", *more))
    assert not (tmp_path / "out").exists()


def test_the_settings_are_recorded(done: tuple[UnlearningReport, Path]) -> None:
    text = (done[1] / "config.json").read_text("utf-8")
    assert '"method_learning_rates"' in text and str(done[1].parent) not in text


def test_the_numbers_of_the_table_are_there_for_another(done: tuple[UnlearningReport, Path]) -> None:
    found = {row["method"]: row for row in json.loads((done[1] / "comparison.json").read_text("utf-8"))}
    assert list(found) == list(rows(done[1]))[1:]
    for method, cells in rows(done[1]).items():
        if method != "method":
            assert cells[2].split(" ")[0] == f"{round(found[method]['R']['loss'], 2) + 0.0:.2f}".replace("-", "−")
    assert found["rmu"]["attacks"].keys() >= {"relearn-aligned", "relearn-unrelated"}
    assert not found["retrained"]["attacks"] and set(found["retrained"]["R"].values()) - {None} == {1}


def test_a_search_has_a_row_beside_its_first_try(main: Any, done: tuple[UnlearningReport, Path]) -> None:
    folder = done[1].parent / "searched"
    more = ["--edit", "repair", "--edit-rounds", "2", "--retain-bound", "0.0001", "--methods", "ga"]
    main([*flags(folder, *more, "--method-learning-rates", "1e-5")])
    found = {row["method"]: row for row in json.loads((folder / "comparison.json").read_text("utf-8"))}
    one, whole = found["repair"], found["repair, searched"]
    assert one["retrainings"] > found["task vector"]["retrainings"]  # the vector, and a repair
    assert whole["retrainings"] > one["retrainings"] and whole["seconds"] > one["seconds"]
    assert one["peak_bytes"] > 0
