"""Planted truths: what an audit must say of models whose past is known."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.memorised_books import filtered

from hf_taskvec import TaskVector
from hf_taskvec.auditing import AuditReport, Relearning, audit
from hf_taskvec.auditing.audit_parts import MembershipFinding
from hf_taskvec.auditing.audit_report import AUDIT_VERSION
from hf_taskvec.errors import BadValueError, CorruptFileError, MissingFileError, MissingNameError
from hf_taskvec.evaluation import Criteria, protocols
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.merging.rule_registry import _RULES
from hf_taskvec.models.fingerprints import full_fingerprint

ASKED = protocols.get(prompt_length=8, answer_length=8)
BUDGET = Relearning(learning_rate=1e-3, block_length=32, points=2)


def audited_by(audited, change, *attacks, **more):
    options = {"relearning": BUDGET, "resamples": 300, "samples": 16, "tokenizer": audited.tokenizer, **more}
    options = {"reference": audited.reference, **options}
    return audit(audited.untouched, change, audited.books, ASKED, attacks=attacks, **options)


def outcomes(finding):
    return {found.metric: found.outcome for found in finding.last.verdict.metrics}


def test_a_retrained_model_passes_as_if_it_were_an_edit(audited, tmp_path):
    before = full_fingerprint(audited.untouched)
    report = audited_by(audited, audited.twin, "relearn", "sample", "inside", "membership", output=tmp_path)
    assert report.plain.verdict.outcome == "as_if_never_seen" and not report.came_back and report.passed
    assert report.inside.depth.low > 0.8
    assert report.inside.depth_untouched == pytest.approx(0, abs=1e-6)
    assert report.inside.depth_reference == pytest.approx(1, abs=1e-6)
    assert {found.test for found in report.membership} == {"loss", "zlib", "min_k", "min_k_plus_plus", "reference"}
    assert not any(found.outcome == "known" for found in report.membership)
    assert full_fingerprint(audited.untouched) == before
    assert AuditReport.load(tmp_path) == report
    text = (tmp_path / "audit.md").read_text("utf-8")
    assert "## What came back" in text and "## What this does not show" in text
    assert "Attacks tried: 5; none surely brought it back" in text
    for plot in ("audit-attacks", "audit-relearning", "audit-inside"):
        assert (tmp_path / f"{plot}.png").stat().st_size > 10_000


def test_the_untouched_model_fails_every_attack(audited):
    report = audited_by(audited, copy.deepcopy(audited.untouched), "relearn", "sample", "inside", "membership")
    assert report.plain.verdict.outcome == "still_known" and not report.passed
    assert len(report.came_back) == len(report.findings) == 5
    assert report.inside.depth.high < 0.01
    assert any(found.outcome == "known" for found in report.membership)


def test_a_model_that_merely_refuses_is_found_out_by_everything_but_rouge(audited):
    silent = filtered(audited.untouched, audited.tokenizer, audited.books[0].text)
    report = audited_by(audited, silent, "relearn", "sample", "inside")
    assert "generates it no more, but still predicts it" in report.plain.verdict.sentence
    by = {found.metric: found.outcome for found in report.plain.verdict.metrics}
    assert by["rouge_l"] == "forgotten" and by["loss"] == "known"
    assert outcomes(report.finding("relearn-forget"))["loss"] == "known"
    assert outcomes(report.finding("relearn-forget"))["rouge_l"] == "known"  # the weights have no filter
    assert outcomes(report.finding("sample")) == {"rouge_l": "known"}  # what is nearly the book passes the filter
    assert report.inside.depth.high < 0.01


def test_forgetting_too_much_fails_upwards(audited):
    broken = copy.deepcopy(audited.reference)
    with torch.no_grad():
        broken.lm_head.weight.mul_(3)
    report = audited_by(audited, broken, "membership")
    assert report.plain.verdict.outcome == "over_forgotten" and not report.passed


def test_the_right_vector_passes_and_noise_of_its_size_does_not(audited):
    vector = TaskVector.from_finetuned(audited.reference, audited.untouched, name="book")
    right = audited_by(audited, -1 * vector, "sample")
    assert right.plain.verdict.outcome == "as_if_never_seen" and right.passed
    assert all(found.relative.value == pytest.approx(1, abs=1e-3) for found in right.plain.verdict.metrics)
    wrong = audited_by(audited, -1 * vector.noise(seed=1), "sample")
    # A destroyed model knows no book: what it lost with this one tells it from one that has forgotten.
    assert not wrong.passed and wrong.plain.verdict.kept == "lost" and "surely lost with it" in wrong.sentence


def test_quantising_and_other_prompts_are_made_on_all_three(audited):
    report = audited_by(audited, copy.deepcopy(audited.untouched), "quantise", "prompt")
    tried = {finding.attack for finding in report.findings}
    assert {"quantise-nf4", "quantise-fp8", "quantise-int4"} <= tried | set(report.not_tried)
    assert {"prompt-longer_prefix", "prompt-recased", "prompt-perturbed"} <= tried
    for finding in report.findings:  # under the same attack, the same model says the same
        assert all(found.relative is None or found.relative.value == 0 for found in finding.last.verdict.metrics)
        assert finding.robustness or finding.group == "prompt"


def test_an_interrupted_audit_goes_on_and_says_the_same(audited, tmp_path):
    whole = audited_by(audited, audited.twin, "relearn", "sample", store=tmp_path / "a")
    parts = audited_by(audited, audited.twin, "sample", store=tmp_path / "b")
    kept = sorted(path.name for path in (tmp_path / "b").iterdir())
    again = audited_by(audited, audited.twin, "relearn", "sample", store=tmp_path / "b")
    assert set(kept) <= {path.name for path in (tmp_path / "b").iterdir()}
    assert replace(again, seconds={}) == replace(whole, seconds={}) and parts.plain == whole.plain


def test_what_cannot_be_tried_is_listed_with_its_reason(audited):
    alone = [audited.books[0]]
    report = audit(
        audited.untouched,
        audited.twin,
        alone,
        ASKED,
        reference=audited.reference,
        attacks=["relearn"],
        tokenizer=audited.tokenizer,
        relearning=BUDGET,
        resamples=100,
    )
    assert set(report.not_tried) == {"relearn-aligned", "relearn-unrelated"}
    assert "no book of the role aligned" in report.not_tried["relearn-aligned"]
    assert "Not tried: relearn-aligned, relearn-unrelated" in report.sentence
    with pytest.raises(BadValueError, match="was not tried: there is no book"):
        report.finding("relearn-aligned")


def test_a_reference_that_knows_the_book_is_refused_before_any_attack(audited):
    knows = copy.deepcopy(audited.untouched)
    with pytest.raises(BadValueError, match="the reference model knows lost"):
        audited_by(audited, audited.twin, "relearn", reference=knows)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"attacks": ["relern"]}, MissingNameError, "Did you mean 'relearn'"),
        ({"passages": 0}, BadValueError, "passages=0"),
        ({"reference": "base"}, BadValueError, "must be a live model"),
        ({"change": "vector"}, BadValueError, "must be a task vector"),
        ({"criteria": Criteria(metrics=("my_own",))}, MissingNameError, "no memory metric 'my_own'"),
    ],
)
def test_bad_input_is_told_before_any_work(audited, more, error, message):
    given = {"attacks": ["sample"], "reference": audited.reference, "change": audited.twin, **more}
    change = given.pop("change")
    with pytest.raises(error, match=message):
        audit(audited.untouched, change, audited.books, ASKED, tokenizer=audited.tokenizer, **given)
    with pytest.raises(BadValueError, match="a book to forget"):
        audit(audited.untouched, audited.twin, audited.books[1:], ASKED, reference=audited.reference)
    namesakes = [audited.books[0], replace(audited.books[2], name=audited.books[0].name)]
    with pytest.raises(BadValueError, match="two books are called 'lost'"):  # their passages would have the same ids
        audit(audited.untouched, audited.twin, namesakes, ASKED, reference=audited.reference)
    with pytest.raises(BadValueError, match="'ssu-v1-authors' joins NLTK's tokens"):
        audit(audited.untouched, audited.twin, audited.books, "ssu-v1-authors", reference=audited.reference)


def test_a_damaged_report_is_an_error_of_ours(audited, tmp_path):
    report = audited_by(audited, audited.twin, "sample")
    report.save(tmp_path, plots=False)
    path = tmp_path / "audit.json"
    text = path.read_text("utf-8")
    for wrong in (text[:-40], text.replace(f'"version": {AUDIT_VERSION}', '"version": 99', 1), "[]", '{"schema": 3}'):
        path.write_text(wrong, "utf-8")
        with pytest.raises(CorruptFileError):
            AuditReport.load(tmp_path)
    with pytest.raises(MissingFileError, match="no audit at"):
        AuditReport.load(tmp_path / "nowhere")


def test_a_margin_means_the_same_whatever_the_scores_go_up_to(audited):
    criteria = Criteria(rule="margin", margin=0.1)
    three = (audited.untouched, audited.twin, audited.books)
    more = {"reference": audited.reference, "tokenizer": audited.tokenizer, "attacks": [], "resamples": 100}
    plain, percent = (
        audit(*three, replace(ASKED, score_factor=factor), criteria=criteria, **more) for factor in (1.0, 100.0)
    )
    assert plain.plain.verdict.outcome == percent.plain.verdict.outcome == "as_if_never_seen"
    assert percent.criteria == criteria


def test_to_avoid_a_book_conspicuously_fails_an_audit(audited):
    report = audited_by(audited, audited.twin)
    auc = Interval(0.2, 0.1, 0.3)
    avoided = MembershipFinding("lost", "min_k", auc, auc, auc, auc, 60.0, "overdone")
    found = replace(report, membership=(avoided,))
    assert report.passed and not found.passed and "conspicuously avoided: Min-K %" in found.sentence


def test_a_handful_of_passages_and_other_books_say_nothing_of_membership(audited):
    report = audited_by(audited, audited.twin, "membership", passages=3)
    assert {found.outcome for found in report.membership} == {"unsure"} and not report.passed
    assert report.reference_auc == {} and "could not be checked" in report.to_markdown()
    lost, near, kept = audited.books
    kept = replace(kept, sections=tuple(replace(section, split="held_out") for section in kept.sections))
    report = audited_by(replace(audited, books=(lost, near, kept)), audited.twin)
    assert [(book.seen, book.held_out) for book in report.books if book.name == "kept"] == [(0, 0)]


def test_relearning_that_diverges_is_not_the_end_of_the_audit(audited):
    report = audited_by(audited, audited.twin, "relearn", relearning=replace(BUDGET, learning_rate=1e30))
    assert not report.findings and set(report.not_tried) >= {"relearn-forget", "relearn-unrelated"}


def test_an_attack_of_another_package_is_made_and_reported(audited, tmp_path, monkeypatch):
    """`tests/foundation/test_plugins.py` has a real package; here its function stands in for its entry point."""
    from support.example_plugins.example_plugins import ask_again

    from hf_taskvec import plugins

    entry = SimpleNamespace(name="again", value="somewhere:again", dist=None, load=lambda: ask_again)
    monkeypatch.setattr(plugins, "_found", lambda kind: {"again": [entry]} if kind == "attacks" else {})
    try:
        report = audited_by(audited, audited.twin, "again", output=tmp_path)
    finally:
        _RULES.pop("strongest", None)  # which the module registers
    (finding,) = report.findings
    assert finding.group == "again" and finding.last.verdict.metrics == report.plain.verdict.metrics
    assert AuditReport.load(tmp_path) == report
    assert "## again" in (tmp_path / "audit.md").read_text("utf-8")
