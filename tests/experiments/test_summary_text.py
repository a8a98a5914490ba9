"""The text that ends a run, and what theory said in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from support.unlearn_experiment import candidates

from hf_taskvec.analysis import recommend_scales
from hf_taskvec.evaluation import UnlearningReport
from hf_taskvec.experiments.unlearning.book_similarity import BookSimilarity
from hf_taskvec.experiments.unlearning.summary_text import summary_text


def test_the_summary_says_so_if_no_scale_was_chosen(edited: Any) -> None:
    scales = list(edited.report.scales)
    none = candidates(edited.report, {0.0: 0.5, -0.5: 0.4, -1.0: 0.1}, 0.15)
    said = summary_text(none, {}, scales, "vector", {"the report": Path("report.md")})
    assert "no λ qualifies." in said and " *" not in said
    assert "before and after (λ = −1, the nearest)" in said
    nothing = summary_text(dataclasses.replace(none, choice=None), {}, scales, "vector", {})
    assert "No λ was chosen: no book is to be forgotten." in nothing and "(λ = −1):" in nothing


def test_what_theory_said_is_in_report_table_and_summary(edited: Any, tmp_path: Path) -> None:
    report = edited.report
    alike = BookSimilarity("lamps", {"boats": 0.4}, recommend_scales(0.4))  # λ = −1 of a sweep, if it is near 0.4
    judged = dataclasses.replace(report, theory=alike.judged(report))
    assert judged.theory.scale == -1.0 and judged.theory.verdict == "hard"
    assert judged.theory.judged.sentence == str(report.judge(alike.recommendation.sweep_scale))
    judged.save(tmp_path, plots=False)
    assert UnlearningReport.load(tmp_path) == judged
    for text in (judged.to_markdown(), summary_text(judged, {}, list(report.scales), "vector", {})):
        for words in ("lamps and boats: +0.400", "The tasks are aligned", "Theory recommended λ=-1"):
            assert words in text
    assert "What theory said" not in report.to_markdown()


def test_a_theory_that_recommends_nothing_is_not_judged(edited: Any) -> None:
    theory = BookSimilarity("lamps", {"boats": 0.99}, recommend_scales(0.99)).judged(edited.report)
    assert (theory.verdict, theory.scale, theory.judged) == ("impossible", None, None)
    assert "nearly the same" in theory.verdicts[0] and len(theory.verdicts) == 1


def test_a_report_from_before_theory_is_read(edited: Any, tmp_path: Path) -> None:
    content = edited.report.to_dict()
    del content["theory"]
    assert UnlearningReport.from_dict(json.loads(json.dumps(content))) == edited.report
