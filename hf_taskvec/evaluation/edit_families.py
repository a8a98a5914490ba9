"""Families of edits: combinations of several vectors, each an edit that a sweep compares with the others."""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_taskvec.errors import BadValueError, MismatchError, UnsupportedError, some
from hf_taskvec.evaluation.asking.scalable_edits import NoEdit
from hf_taskvec.evaluation.reporting.report_parts import EditInfo
from hf_taskvec.evaluation.scoring.edit_names import UNTOUCHED

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector

# Names are heads of tables and parts of sentences.
_LONGEST = 200


def edit_grid(
    vectors: "Mapping[str, TaskVector]", coefficients: Mapping[str, Sequence[float]]
) -> "dict[str, TaskVector]":
    """Every combination of coefficients: `{"-0.9*forget + 0.5*keep": vector, ...}`.

    Args:
        vectors (`Mapping[str, TaskVector]`):
            What is combined, by the names that the edits' names shall show.
        coefficients (`Mapping[str, Sequence[float]]`):
            For each of the vectors, the values to try.

    Returns:
        `dict[str, TaskVector]`: For `sweep`, without the edit that changes nothing.

    Raises:
        `BadValueError`: If a vector has no coefficients, or one of them is not a finite number.

    Example:
        >>> import torch
        >>> from hf_taskvec import TaskVector
        >>> vectors = {name: TaskVector.from_tensors({"w": torch.ones(2)}) for name in ("forget", "keep")}
        >>> list(edit_grid(vectors, {"forget": [-0.5, -1], "keep": [0, 0.5]}))
        ['-0.5*forget', '-0.5*forget + 0.5*keep', '-1*forget', '-1*forget + 0.5*keep']

    """
    if set(vectors) != set(coefficients):
        raise BadValueError(
            f"there are vectors {some(vectors)} and coefficients of {some(coefficients)}: give each vector its own."
        )
    points = itertools.product(*(coefficients[name] for name in vectors))
    return _combinations(vectors, [dict(zip(vectors, point, strict=True)) for point in points])


def edit_line(
    vectors: "Mapping[str, TaskVector]", start: Mapping[str, float], end: Mapping[str, float], points: int = 5
) -> "dict[str, TaskVector]":
    """Combinations at equal distances on the way from one to another, both included.

    Args:
        vectors (`Mapping[str, TaskVector]`):
            What is combined.
        start (`Mapping[str, float]`):
            The coefficients at one end; 0 for a vector that is not named.
        end (`Mapping[str, float]`):
            The coefficients at the other end.
        points (`int`, *optional*, defaults to 5):
            How many, at least 2.

    Returns:
        `dict[str, TaskVector]`: For `sweep`, without the edit that changes nothing.

    Raises:
        `BadValueError`: If a coefficient belongs to none of the vectors, or is not a finite number.

    Example:
        >>> import torch
        >>> from hf_taskvec import TaskVector
        >>> vectors = {name: TaskVector.from_tensors({"w": torch.ones(2)}) for name in ("forget", "keep")}
        >>> list(edit_line(vectors, {}, {"forget": -1, "keep": 0.5}, points=3))
        ['-0.5*forget + 0.25*keep', '-1*forget + 0.5*keep']

    """
    unknown = [name for name in (*start, *end) if name not in vectors]
    if unknown:
        raise BadValueError(f"there is no vector {unknown[0]!r} among {some(vectors)}.")
    if points < 2:
        raise BadValueError(f"points={points}: a line has two ends.")
    shares = [number / (points - 1) for number in range(points)]
    way = [
        {name: (1 - share) * start.get(name, 0.0) + share * end.get(name, 0.0) for name in vectors} for share in shares
    ]
    return _combinations(vectors, way)


def edit_simplex(vectors: "Mapping[str, TaskVector]", steps: int = 4, total: float = 1.0) -> "dict[str, TaskVector]":
    """Every way to share a total among the vectors in equal steps, as `1*a`, `0.75*a + 0.25*b` and so on.

    Args:
        vectors (`Mapping[str, TaskVector]`):
            What is combined.
        steps (`int`, *optional*, defaults to 4):
            Into how many parts the total is cut.
        total (`float`, *optional*, defaults to 1.0):
            What the coefficients of an edit add up to; negative to subtract.

    Returns:
        `dict[str, TaskVector]`: For `sweep`.

    Raises:
        `BadValueError`: If there is no vector, or no step.

    Example:
        >>> import torch
        >>> from hf_taskvec import TaskVector
        >>> vectors = {name: TaskVector.from_tensors({"w": torch.ones(2)}) for name in ("a", "b")}
        >>> list(edit_simplex(vectors, steps=2, total=-1))
        ['-1*b', '-0.5*a - 0.5*b', '-1*a']

    """
    if steps < 1 or not vectors:
        raise BadValueError("a simplex has at least one vector and one step.")
    shares = (each for each in itertools.product(range(steps + 1), repeat=len(vectors)) if sum(each) == steps)
    points = [dict(zip(vectors, (total * s / steps for s in each), strict=True)) for each in shares]
    return _combinations(vectors, points)


def _combinations(
    vectors: "Mapping[str, TaskVector]", points: Sequence[Mapping[str, float]]
) -> "dict[str, TaskVector]":
    from hf_taskvec.algebra.task_vector import TaskVector

    edits = {}
    for point in points:
        for name, value in point.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise BadValueError(f"the coefficient {value!r} of {name} is not a finite number.")
        used = {name: float(value) for name, value in point.items() if value}
        if used:
            total = sum((value * vectors[name] for name, value in used.items()), start=TaskVector({}))
            edits[_formula(used)] = total
    return edits


def _formula(coefficients: Mapping[str, float]) -> str:
    # So many digits that two edits of a family never share a name, and none that only rounding makes.
    text = " + ".join(f"{value:.12g}*{name}" for name, value in coefficients.items())
    return text.replace("+ -", "- ")


def named_edits(change: Any) -> "dict[str, TaskVector] | None":
    """The edits of a mapping or a list, by name; `None` if `change` is neither. No tensor is read.

    Args:
        change (`Mapping[str, TaskVector]`, `Sequence[TaskVector]` or anything else):
            What a sweep was given.

    Returns:
        `dict[str, TaskVector]`: Those of a list by their expressions.

    Raises:
        `BadValueError`: If there are none, one is no vector, or two have the same name.
    """
    from hf_taskvec.algebra.task_vector import TaskVector

    if isinstance(change, TaskVector) or not isinstance(change, Mapping | Sequence) or isinstance(change, str):
        return None
    if not change:
        raise BadValueError("there is no edit to compare: give at least one vector.")
    wrong = next((each for each in _vectors(change) if not isinstance(each, TaskVector)), None)
    if wrong is not None:
        raise BadValueError(f"several edits are compared as task vectors, not as a {type(wrong).__name__}.")
    named = list(change.items()) if isinstance(change, Mapping) else [(str(v.expression), v) for v in change]
    check_edit_names([name for name, _ in named])
    return dict(named)


def gentlest_first(edits: "Mapping[str, TaskVector]") -> "tuple[tuple[EditInfo, ...], list[TaskVector]]":
    """What the report says of each edit, and the vectors, in the same order: by how far they move the weights.

    Args:
        edits (`Mapping[str, TaskVector]`):
            By name. They are read, each once.
    """
    found = [(EditInfo(name, str(v.expression), v.fingerprint, v.norm()), v) for name, v in edits.items()]
    found.sort(key=lambda each: each[0].distance)
    return tuple(info for info, _ in found), [vector for _, vector in found]


def check_edit_names(names: Sequence[str]) -> None:
    """Refuse names that a report could not call edits by.

    Args:
        names (`Sequence[str]`):
            Those of all edits that are compared.

    Raises:
        `BadValueError`: If one is empty, too long or that of the untouched model, or two are the same.
    """
    for name in names:
        if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST:
            raise BadValueError(f"{name!r} cannot be the name of an edit: give a text of 1 to {_LONGEST} characters.")
        if name == UNTOUCHED:
            raise BadValueError(f"{name!r} is what the report calls the model without an edit. Take another name.")
        if names.count(name) > 1:
            raise BadValueError(f"two edits are called {name!r}. Give each a name: {{'name': vector, ...}}")


def _vectors(change: Any) -> list[Any]:
    return list(change.values()) if isinstance(change, Mapping) else list(change)


class EditsInTurn:
    """Several vectors, one at a time on a model: λ is the number of the one that is on it, 0 for none.

    Args:
        model (`PreTrainedModel`):
            The model, as it is without any of them.
        vectors (`Sequence[TaskVector]`):
            The first has the number 1.
        merge (`bool`):
            As in `TaskVector.edit`.
    """

    def __init__(self, model: Any, vectors: "Sequence[TaskVector]", merge: bool) -> None:
        self.model, self._vectors, self._merge = model, tuple(vectors), merge
        self._current: Any = None

    @property
    def fingerprint(self) -> str:
        """Tells this list of vectors from any other."""
        every = " ".join(vector.fingerprint for vector in self._vectors)
        return hashlib.sha256(every.encode()).hexdigest()

    def identity(self, scale: float, /) -> tuple[str, float]:
        """What is on the model at a number, whatever other vectors are in the list, and its own λ."""
        return (self._vectors[int(scale) - 1].fingerprint, 1.0) if scale else (NoEdit.fingerprint, 0.0)

    def set_scale(self, scale: float, /) -> None:
        """Take the present vector off, and put the one of this number on."""
        current, self._current = self._current, None
        if current is not None:
            current.restore()
        if scale:
            self._current = self._vectors[int(scale) - 1].edit(self.model, merge=self._merge)


def check_edits_fit(model: Any, vectors: "Mapping[str, TaskVector]", merge: bool) -> None:
    """Refuse vectors that cannot be put on a model, before it is asked for anything; the model is not touched.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The model.
        vectors (`Mapping[str, TaskVector]`):
            By what an error calls them.
        merge (`bool`):
            As in `TaskVector.edit`.

    Raises:
        `MismatchError`: If a vector does not fit the model.
        `UnsupportedError`: If it cannot be attached.
    """
    from hf_taskvec.application.to_live_model import check_editable

    for name, vector in vectors.items():
        try:
            check_editable(vector, model, merge)
        except (MismatchError, UnsupportedError) as error:
            raise type(error)(f"{name}: {error}") from None
