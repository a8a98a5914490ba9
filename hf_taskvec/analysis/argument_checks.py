"""Checks of arguments that several functions of the analysis take."""

import math
import numbers
from typing import Any

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError


def check_model(model: Any, needed: str = "a live model") -> None:
    """Refuse what is no live model, such as the name of one."""
    if not isinstance(model, torch.nn.Module):
        raise BadValueError(
            f"a forward pass needs {needed}, not {type(model).__name__}. Load it with "
            "AutoModelForCausalLM.from_pretrained()."
        )


def check_vectors(*vectors: Any) -> None:
    """Refuse what is no task vector, such as the name of one."""
    for vector in vectors:
        if not isinstance(vector, TaskVector):
            raise BadValueError(
                f"{vector!r} is not a task vector. TaskVector.load(...) reads a saved one, "
                "TaskVector.from_finetuned(base, tuned) makes one."
            )


def check_whole_number(name: str, value: Any) -> None:
    """Refuse what is not a whole number."""
    if not isinstance(value, numbers.Integral):
        raise BadValueError(f"{name}={value!r} must be a whole number.")


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch of no rows."""
    check_whole_number("batch_size", batch_size)
    if batch_size < 1:
        raise BadValueError(f"batch_size={batch_size}: a batch has at least one row.")


def is_finite_number(value: Any) -> bool:
    """Whether it is a number, and neither NaN nor infinite."""
    return isinstance(value, numbers.Real) and math.isfinite(value)
