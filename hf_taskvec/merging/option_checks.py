"""Checks of the numbers that merging rules take as options."""

import math
import numbers
from typing import Any

from hf_taskvec.errors import BadValueError


def checked_number(name: str, value: Any) -> float:
    """The value of the option `name`, after making sure that it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise BadValueError(f"{name}={value!r} must be a finite number.")
    return float(value)


def checked_share(name: str, value: Any) -> float:
    """The value of the option `name`, after making sure that it is a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 < float(value) <= 1.0:
        raise BadValueError(f"{name}={value!r}: a share must be above 0 and at most 1.")
    return float(value)


def checked_shares(name: str, value: Any, vectors: int) -> list[float]:
    """A checked share for each vector, from one number for all of them or a list with one for each.

    >>> checked_shares("density", 0.2, vectors=3)
    [0.2, 0.2, 0.2]
    """
    if not isinstance(value, list | tuple):
        return [checked_share(name, value)] * vectors
    if len(value) != vectors:
        raise BadValueError(
            f"{name} has {len(value)} numbers for {vectors} vectors. Give one for each, or one for all."
        )
    return [checked_share(name, each) for each in value]
