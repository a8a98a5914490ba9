"""The checks of the matrix, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from matrix import check_attached, check_export, check_live, check_lora, check_streamed, check_vocabulary
from matrix.outcomes import NOT_BUILT, Outcome, Tally, judge, normalised
from matrix.subjects import Subject

CHECKS: dict[str, Callable[[Subject, Tally], None]] = {
    "streamed": check_streamed.check,
    "live": check_live.check,
    "lora": check_lora.check,
    "attached": check_attached.check,
    "vocabulary": check_vocabulary.check,
    "export": check_export.check,
}

#: those that models of other classes go through as well
CLASS_CHECKS = ("streamed", "live", "attached")


def outcome(model_type: str, check: str, folder: Path) -> Outcome:
    """The outcome of one check of one model type or class, in an empty folder."""
    subject = Subject(model_type, folder)
    try:
        _ = subject.base
    except Exception as error:  # whatever transformers raises
        told = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return Outcome(NOT_BUILT, (normalised(told),), told)
    return judge(partial(CHECKS[check], subject))
