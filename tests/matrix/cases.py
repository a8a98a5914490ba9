"""All that the matrix checks, and how one case is run."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from matrix import check_lora_config, lora_cases
from matrix.checks import CHECKS, CLASS_CHECKS, outcome
from matrix.other_classes import CLASSES
from matrix.outcomes import Outcome, judge
from matrix.results import LORA
from matrix.tiny_types import TYPES


def all_cases() -> list[tuple[str, str]]:
    """Row and check of each case."""
    types = [(model_type, check) for model_type in TYPES for check in CHECKS]
    classes = [(name, check) for name in CLASSES for check in CLASS_CHECKS]
    return types + classes + [(LORA, label) for label in _options()]


def _options() -> dict[str, lora_cases.Case]:
    return {**lora_cases.singles(), **lora_cases.pairs()}


def run(row: str, check: str) -> Outcome:
    """The outcome of one case."""
    with tempfile.TemporaryDirectory() as folder:
        if row == LORA:
            case = _options()[check]
            return judge(partial(check_lora_config.check, case, Path(folder)))
        return outcome(row, check, Path(folder))
