"""The loss around a model, on the plane through it and two of its fine-tunes."""

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec import atomic
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.argument_checks import check_batch_size, check_model, check_whole_number
from hf_taskvec.analysis.cosines import cosine_matrix
from hf_taskvec.analysis.token_batches import mean_loss
from hf_taskvec.analysis.token_rows import Data, TokenRows, check_predictable, check_rows, is_columns, token_rows
from hf_taskvec.errors import BadValueError, CorruptFileError, OutputError
from hf_taskvec.figures import Plottable
from hf_taskvec.json_files import parse_json
from hf_taskvec.models.live_model import live_checkpoint
from hf_taskvec.models.model_facts import evaluation_mode
from hf_taskvec.progress import progress_bar
from hf_taskvec.typed_values import typed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Landscape(Plottable):
    """Mean losses on a grid, made by `loss_landscape`: `losses[name][row][column]` at `y[row]`, `x[column]`.

    x runs along the first vector, y along what of the second is orthogonal to it, both in the weights' own units.

    Args:
        x (`tuple[float, ...]`):
            The coordinates of the columns.
        y (`tuple[float, ...]`):
            The coordinates of the rows.
        losses (`Mapping[str, tuple[tuple[float, ...], ...]]`):
            For each data set the mean loss at each point.
        points (`Mapping[str, tuple[float, float]]`):
            Where θ_0 and the two fine-tunes lie.

    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    losses: Mapping[str, tuple[tuple[float, ...], ...]]
    points: Mapping[str, tuple[float, float]]

    def figure(self) -> "Figure":
        """Contours, a panel for each data set.

        Returns:
            `matplotlib.figure.Figure`: The figure.

        Raises:
            `UnsupportedError`: If matplotlib is not installed.

        """
        from hf_taskvec.analysis.result_figures import landscape_figure

        return landscape_figure(self)


@dataclass(frozen=True)
class _Plane:
    """`x u + y v`, with orthonormal u and v, in terms of the two vectors."""

    norm_a: float
    along: float  # of the second vector, along u
    across: float  # and along v

    def scales(self, x: float, y: float) -> tuple[float, float]:
        """What of each vector makes the point."""
        of_b = y / self.across
        return (x - of_b * self.along) / self.norm_a, of_b


def loss_landscape(
    model: torch.nn.Module,
    vector_a: TaskVector,
    vector_b: TaskVector,
    data: "Data | Mapping[str, Data]",
    *,
    size: int = 11,
    margin: float = 0.4,
    output: str | Path | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    tokenizer: Any = None,
    merge: bool = True,
    progress: bool | None = None,
) -> Landscape:
    """The mean next-token loss on a grid over the plane through a model and two fine-tunes of it.

    Args:
        model (`torch.nn.Module`):
            The live base θ_0. It is edited in place, and is as before, bit for bit, when this returns or raises.
        vector_a (`TaskVector`):
            The task vector of one fine-tune.
        vector_b (`TaskVector`):
            The task vector of the other; it must not be parallel to the first.
        data (`Dataset`, an iterable of token-id sequences or texts, or a `Mapping` of several by name):
            Rows of text, or several data sets by name (`{"fox": …, "clock": …}`): each point is measured on all.
        size (`int`, *optional*, defaults to 11):
            Points along each side of the grid.
        margin (`float`, *optional*, defaults to 0.4):
            How far the grid goes beyond the three models, as a share of its size.
        output (`str` or `Path`, *optional*):
            A folder to which finished points are written: an interrupted run continues there, and a run with another
            model, vectors, data or grid writes its own file beside them.
        batch_size (`int`, *optional*, defaults to 8):
            Rows in a forward pass.
        max_length (`int`, *optional*):
            Cut rows to this many tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For texts.
        merge (`bool`, *optional*, defaults to `True`):
            See `TaskVector.edit`.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `Landscape`: The losses on the grid, and where the three models lie.

    Raises:
        `BadValueError`: If the vectors are parallel, an argument is out of range, or a loss is not finite.
        `CorruptFileError`: If the file of finished points is damaged.
        `OutputError`: If `output` cannot be written to.

    Example:
        >>> found = loss_landscape(model, vector_a, vector_b, texts, tokenizer=tokenizer)  # doctest: +SKIP
        >>> found.plot("landscape.png")  # doctest: +SKIP

    """
    check_whole_number("size", size)
    if size < 2:
        raise BadValueError(f"size={size}: a grid has two points along a side at least.")
    if not (margin >= 0 and math.isfinite(margin)):
        raise BadValueError(f"margin={margin} must not be negative.")
    check_model(model)
    check_batch_size(batch_size)
    sets: Mapping[str, Data] = data if isinstance(data, Mapping) and not is_columns(data) else {"data": data}
    if not sets:
        raise BadValueError("the data is empty: give one data set at least.")
    rows = {name: token_rows(each, tokenizer, max_length, name) for name, each in sets.items()}
    for name, each in rows.items():
        check_rows(each, model, name)
        check_predictable(each, name)
    plane = _plane(vector_a, vector_b)
    names = (vector_a.expression, vector_b.expression)
    if names[0] == names[1]:
        names = (f"{names[0]} (a)", f"{names[1]} (b)")
    points = {"θ_0": (0.0, 0.0), names[0]: (plane.norm_a, 0.0), names[1]: (plane.along, plane.across)}
    x, y = (_axis([point[i] for point in points.values()], size, margin) for i in (0, 1))
    key = _key(model, vector_a, vector_b, rows, x, y)
    finished = _FinishedPoints(output, key, rows)
    grid = [(i, j) for j in range(size) for i in range(size)]
    for i, j in progress_bar(grid, "Landscape", progress):
        if (i, j) in finished.losses:
            continue
        a, b = plane.scales(x[i], y[j])
        vector = a * vector_a + b * vector_b
        with vector.applied_to(model, merge=merge) if len(vector) else nullcontext(), evaluation_mode(model):
            found = {name: mean_loss(model, each, batch_size) for name, each in rows.items()}
        _check_finite(found, (a, b), names)
        finished.add(i, j, found)
    losses = {
        name: tuple(tuple(finished.losses[i, j][name] for i in range(size)) for j in range(size)) for name in rows
    }
    return Landscape(x, y, losses, points)


def _plane(a: TaskVector, b: TaskVector) -> _Plane:
    cosines = cosine_matrix({"a": a, "b": b}, progress=False)
    cosine, (norm_a, norm_b) = cosines["a", "b"], cosines.norms
    if 1 - abs(cosine) < 1e-9:
        raise BadValueError(f"the two vectors are parallel (cosine {cosine:.6f}), so there is no plane through them.")
    return _Plane(norm_a, norm_b * cosine, norm_b * math.sqrt(1 - cosine**2))


def _check_finite(losses: Mapping[str, float], scales: tuple[float, float], names: tuple[str, str]) -> None:
    for name, loss in losses.items():
        if not math.isfinite(loss):
            edit = " + ".join(f"{scale:.3g}·{vector}" for scale, vector in zip(scales, names, strict=True))
            raise BadValueError(
                f"the loss on {name} is {loss} at θ_0 + {edit}: the model overflows there, or its weights are broken. "
                "Use a smaller margin=, smaller vectors, or a model in a wider dtype."
            )


def _axis(values: list[float], size: int, margin: float) -> tuple[float, ...]:
    low, high = min(values), max(values)
    low, high = low - margin * (high - low), high + margin * (high - low)
    return tuple(low + (high - low) * step / (size - 1) for step in range(size))


def _key(
    model: torch.nn.Module,
    a: TaskVector,
    b: TaskVector,
    rows: Mapping[str, TokenRows],
    x: tuple[float, ...],
    y: tuple[float, ...],
) -> str:
    """What the losses depend on."""
    parts = [live_checkpoint(model).sampled_fingerprint, a.fingerprint, b.fingerprint, json.dumps(rows), repr((x, y))]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class _Point:
    """The losses at one point of the grid."""

    x: int
    y: int
    losses: dict[str, float]


class _FinishedPoints:
    """The losses at finished points, appended to a file as they are measured, a line for each."""

    def __init__(self, output: str | Path | None, key: str, names: Collection[str]) -> None:
        self.losses: dict[tuple[int, int], dict[str, float]] = {}
        self._path = None if output is None else Path(output) / f"landscape-{key[:16]}.jsonl"
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                self._append({"key": key})
                return
            content = self._path.read_bytes()
        except OSError as error:
            raise OutputError(f"cannot write to {self._path.parent.name}: {error.strerror or error}.") from None
        whole, newline, unfinished = content.rpartition(b"\n")  # what follows the last newline was cut off
        try:
            head, *points = [parse_json(line, "a line") for line in whole.decode().split("\n")]
            if head != {"key": key}:
                raise CorruptFileError("it is of other points")
            for found in (typed(_Point, point) for point in points):
                if found.losses.keys() != set(names):
                    raise CorruptFileError("a point has losses on other data")
                self.losses[found.x, found.y] = found.losses
        except (CorruptFileError, UnicodeDecodeError) as error:
            raise CorruptFileError(
                f"{self._path.name} in {self._path.parent.name} is damaged ({error}): remove it to start again."
            ) from None
        if unfinished:  # a line that a killed run did not finish
            atomic.write_bytes(self._path, whole + newline)

    def add(self, i: int, j: int, losses: dict[str, float]) -> None:
        self.losses[i, j] = losses
        self._append({"x": i, "y": j, "losses": losses})

    def _append(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
