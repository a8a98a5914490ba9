"""The benchmark of the analysis: what its table compares."""

import re
from pathlib import Path

import pytest


def test_each_row_is_beside_its_own_kind_of_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks of a model beside a pass over one file, ranks of a vector beside a pass over two."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    import bench_analysis

    seconds = {"model_pass": 2.0, "one_pass": 5.0, "model_ranks": 14.0, "vector_ranks": 15.0, "dense_cosines": 20.0}

    def run(job: str, folder: Path, times: int = 1) -> dict[str, float]:
        return {"seconds": 1.0, "cpu": seconds.get(job, 1.0), "memory": 1.0, "worst": 0.0, "median": 0.0, "count": 1}

    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").touch()
    monkeypatch.setattr(bench_analysis, "run", run)
    monkeypatch.setattr(bench_analysis, "make_inputs", lambda *args: None)
    monkeypatch.setattr(bench_analysis, "command", lambda *args: 1.0)
    bench_analysis.report(tmp_path, 1)
    table = capsys.readouterr().out
    for row, ratio in (("stable ranks of the model", "7.0×"), ("of a dense vector", "3.0×"), ("of 4 dense", "4.0×")):
        assert re.search(rf"\| [^|]*{row}[^|]* \|[^|]*\|[^|]*\| {ratio}", table)
