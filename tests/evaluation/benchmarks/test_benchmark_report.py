"""A benchmark's report: as files, as a table beside the published rows, and what is refused."""

import json

import pytest

from hf_taskvec.errors import CorruptFileError, MissingNameError
from hf_taskvec.evaluation import BenchmarkReport
from hf_taskvec.evaluation.benchmarks.named_benchmarks import DEFINITIONS
from hf_taskvec.evaluation.benchmarks.published_rows import PUBLISHED

NAMES = ("muse/books", "tofu/forget10")


@pytest.mark.parametrize("name", NAMES)
def test_a_report_comes_back_as_it_was_saved(reports, name, tmp_path):
    report = reports[name].known
    assert report.save(tmp_path) == tmp_path
    assert BenchmarkReport.load(tmp_path) == BenchmarkReport.load(tmp_path / "benchmark.json") == report
    assert (tmp_path / "benchmark.md").read_text("utf-8") == str(report)
    assert BenchmarkReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def rows_of(page):
    table = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {cells[0].strip("*"): cells[1:] for cells in table}


def test_the_table_has_the_published_rows_and_the_measured_one(reports):
    report = reports["muse/books"].known
    rows = rows_of(str(report))
    assert rows["NPO (published)"] == ["0.3200", "0.8400", "−54.24", "0.5500"]
    assert rows["retrained (published)"] == ["0.3000", "0.1400", "0.00", "0.6900"]
    assert rows["retrained (measured)"][2] == "0.00"
    assert rows["this model (measured)"][1] == f"{report.metric('forget_verbmem'):.4f}"
    assert "untuned" in str(report) and "open-unlearning" in str(report) and "not comparable" in str(report)
    tofu = rows_of(str(reports["tofu/forget10"].known))
    assert tofu["full (published)"] == ["1.66e−21", "0.6000", "0.4800"]  # a small p-value is not 0
    assert tofu["GradAscent (published)"][:2] == ["1.06e−239", "0.0000"]
    assert tofu["forget quality"][1] == "1.0000"  # of the retrained model, among all metrics


def test_every_published_figure_is_of_a_metric_that_we_report():
    for name, definition in DEFINITIONS.items():
        known = [info.name for info in definition.metrics]
        for row in PUBLISHED[name].rows:
            assert list(row.metrics) == known[: len(row.metrics)], "they come first"


def test_a_metric_that_is_not_there_is_answered_with_the_nearest(reports):
    with pytest.raises(MissingNameError, match=r"no metric 'forget_qualty'\. Did you mean 'forget_quality'\?"):
        reports["tofu/forget10"].known.metric("forget_qualty")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(benchmark="tofu/forget11"), "no benchmark 'tofu/forget11'"),
        (lambda d: d["metrics"].pop("forget_quality"), "its metrics are not those of tofu/forget10"),
        (lambda d: d["retrained"]["metrics"].update(more=1.0), "its metrics are not those"),
        (lambda d: d["parts"].reverse(), "its parts are not those"),
        (lambda d: d["parts"][0].update(items=[]), "part 'forget' lacks items"),
        (lambda d: d["parts"][0]["items"][3]["values"].pop("truth_ratio"), "part 'forget' lacks items, or an item"),
        (
            lambda d: d["parts"][0]["items"][3]["values"].update(truth_ratio="low"),
            "truth_ratio must be a finite number",
        ),
        (lambda d: d.update(version=2), "version 2; this hf_taskvec reads"),
    ],
    ids=["name", "metric", "retrained", "order", "empty", "number", "type", "version"],
)
def test_a_damaged_report_is_refused_with_the_place(reports, tmp_path, change, words):
    content = reports["tofu/forget10"].known.to_dict()
    content = json.loads(json.dumps(content))
    change(content)
    (tmp_path / "benchmark.json").write_text(json.dumps(content))
    with pytest.raises(CorruptFileError, match=words):
        BenchmarkReport.load(tmp_path)
