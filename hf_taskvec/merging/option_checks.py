"""The numbers that merging rules take as options: checks, and schedules over layers."""

import math
import numbers
from collections.abc import Callable, Sequence
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


def checked_below(name: str, value: Any, limit: float) -> float:
    """The value of the option `name`, after making sure that it is a number from 0 to below a limit."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= float(value) < limit:
        raise BadValueError(f"{name}={value!r} must be at least 0 and below {limit:g}.")
    return float(value)


def checked_shares(name: str, value: Any, vectors: int) -> list[float]:
    """A checked share for each vector, from one number for all of them or a list with one for each.

    >>> checked_shares("density", 0.2, vectors=3)
    [0.2, 0.2, 0.2]
    """
    return checked_each(name, value, vectors, checked_share)


def checked_each(name: str, value: Any, vectors: int, check: Callable[[str, Any], float]) -> list[float]:
    """A checked number for each vector, from one for all of them or a list with one for each."""
    if not isinstance(value, list | tuple):
        return [check(name, value)] * vectors
    if len(value) != vectors:
        raise BadValueError(
            f"{name} has {len(value)} numbers for {vectors} vectors. Give one for each, or one for all."
        )
    return [check(name, each) for each in value]


def between(row: Sequence[float], place: float) -> float:
    """The schedule at a place from 0 to 1.

    >>> [between([0.0, 1.0, 0.0], place) for place in (0.0, 0.25, 0.5, 1.0)]
    [0.0, 0.5, 1.0, 0.0]
    """
    position = place * (len(row) - 1)
    left = min(int(position), len(row) - 1)
    right = min(left + 1, len(row) - 1)
    return float(row[left] + (position - left) * (row[right] - row[left]))
