"""Settings and reports of the unlearning experiment, for tests of its parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hf_taskvec.evaluation import UnlearningReport
from hf_taskvec.evaluation.scoring.scale_choice import Candidate
from hf_taskvec.experiments.config_options import parse_config
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
BOOKS = ["--books", "forget=one.txt", "aligned=two.txt", "retain=three.txt"]


def config(*arguments: str, configs: Path = CONFIGS) -> UnlearnConfig:
    return parse_config(
        UnlearnConfig,
        list(arguments),
        description="The experiment.",
        configs=configs,
        default="default",
        unless=["base_model"],
    )


def candidates(report: UnlearningReport, forget: dict[float, float], target: float) -> UnlearningReport:
    """The report as it would be if the forget book had these scores on the choosing half."""
    assert report.choice is not None
    made = tuple(
        Candidate(scale, score, target, {}, {}, None, score <= target, 0.0, 1.0, False)
        for scale, score in forget.items()
    )
    nearest = min((c for c in made if c.scale), key=lambda c: abs(c.forget - c.target), default=None)
    choice = dataclasses.replace(
        report.choice,
        scale=None,
        nearest=None if nearest is None else nearest.scale,
        reason="no λ qualifies",
        candidates=made,
        verdict=None,
    )
    return dataclasses.replace(report, choice=choice)
