"""A report that the version before wrote: read as what it said, and judged anew from its passages.

`report_version_3.json` was written by the code of that version, of tiny models.
"""

import json
import math
from pathlib import Path

import pytest

from hf_taskvec.errors import BadValueError, CorruptFileError
from hf_taskvec.evaluation import Criteria, UnlearningReport
from hf_taskvec.evaluation.reporting.unlearning_report import REPORT_VERSION

FILE = Path(__file__).with_name("report_version_3.json")


@pytest.fixture
def old():
    return json.loads(FILE.read_text("utf-8"))


def test_it_says_what_it_said(old):
    assert old["version"] == 3
    report = UnlearningReport.load(FILE)
    choice, before = report.choice, old["choice"]
    assert (choice.scale, choice.reason) == (before["scale"], before["reason"])
    assert choice.criteria == Criteria(
        metrics=("rouge_l",), rule="margin", margin=before["margin"], retain_bound=before["retain_bound"]
    )
    assert (choice.never_seen.source, choice.never_seen.name) == ("reference", before["reference"])
    (found,) = choice.verdict.metrics
    assert found.after.value == before["confirmation"]["forget"]["value"]
    assert found.never == before["confirmation"]["target"] and found.relative is None
    assert report.score("lamps", -1).value.value == next(
        s["value"]["value"]
        for s in old["scores"]
        if (s["book"], s["split"], s["scale"], s["metric"]) == ("lamps", "seen", -1, "rouge_l")
    )
    again = json.loads(report.to_json())
    assert again["version"] == REPORT_VERSION and UnlearningReport.from_dict(again) == report
    assert "by rouge_l alone" in choice.verdict.sentence and "the rule “margin”" in report.to_markdown()


def test_its_passages_are_judged_anew(old):
    """It took λ = 0 for forgotten, by its margin; the loss, worked out from its perplexities, denies that."""
    assert old["choice"]["scale"] == 0 and old["choice"]["confirmation"]["as_if_never_seen"]
    found = UnlearningReport.load(FILE).rechoose(Criteria())
    assert found.choice.scale is None and found.choice.nearest == -1
    loss = next(m for m in found.choice.verdict.metrics if m.metric == "loss")
    seen = [p for p in old["passages"] if p["book"] == "lamps" and p["split"] == "seen"]
    levels = [
        [math.log(values["perplexity"]) for values in each]
        for each in (
            [p["at"][0]["values"] for p in seen],
            [p["at"][1]["values"] for p in seen],
            [p["references"][0]["values"] for p in seen],
        )
    ]
    whole = found.rechoose(Criteria(metrics=("loss",)))
    candidate = next(c for c in whole.choice.candidates if c.scale == -1)
    assert loss.passages == len(seen) // 2
    # Both halves together are all passages.
    for half, value in zip((candidate.forget, loss.after.value), (levels[1], levels[1]), strict=True):
        assert min(value) <= half <= max(value)
    means = [(candidate.forget + loss.after.value) / 2, sum(levels[1]) / len(levels[1])]
    assert means[0] == pytest.approx(means[1])
    assert loss.relative.value == pytest.approx((loss.before - loss.after.value) / (loss.before - loss.never))
    assert {m.metric for m in found.choice.verdict.metrics} == set(Criteria().metrics)


def test_a_published_one_has_no_passages_and_says_so(old, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**old, "passages": []}))
    report = UnlearningReport.load(path)
    assert report.choice.scale == old["choice"]["scale"] and report.to_markdown()
    with pytest.raises(BadValueError, match="no passages, as those on the Hub"):
        report.rechoose(Criteria())


@pytest.mark.parametrize(
    "change",
    [
        {"choice": {}},
        {"choice": 3},
        {"metrics": None},
        {"metrics": [{"name": []}]},
        {"metrics": [{}]},
        {"passages": [{"at": 3}]},
        {"membership": "none"},
        {"books": [[]]},
    ],
    ids=str,
)
def test_a_damaged_one_is_refused_as_damaged(old, change):
    with pytest.raises(CorruptFileError, match="damaged or no report"):
        UnlearningReport.from_dict({**old, **change})


def test_passages_that_lack_a_value_are_refused_before_they_are_judged(old):
    del old["passages"][0]["at"][1]["values"]["perplexity"]
    with pytest.raises(CorruptFileError, match="has no 'loss' at λ=-1"):
        UnlearningReport.from_dict(old).rechoose(Criteria())
