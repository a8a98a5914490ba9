"""The loss around a model, on the plane through it and two of its fine-tunes."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.cosines import cosine_matrix
from hf_taskvec.analysis.token_batches import (
    Data,
    Rows,
    check_batch_size,
    check_model,
    check_predictable,
    check_rows,
    check_whole,
    evaluating,
    is_columns,
    mean_loss,
    progress_bar,
    token_rows,
)
from hf_taskvec.errors import BadValueError, CorruptFileError, OutputError
from hf_taskvec.models.live_model import live_checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Landscape:
    """Mean losses on a grid: `losses[name][row][column]` at `y[row]`, `x[column]`.

    x runs along the first vector, y along what of the second is orthogonal to it, both in the weights' own units.
    `points` are where θ_0 and the two fine-tunes lie.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    losses: Mapping[str, tuple[tuple[float, ...], ...]]
    points: Mapping[str, tuple[float, float]]

    def figure(self) -> "Figure":
        """Contours, a panel for each data set."""
        from hf_taskvec.analysis.plots import landscape_figure

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
        model: the live base θ_0. It is edited in place, and is as before, bit for bit, when this returns or raises.
        vector_a, vector_b: the fine-tunes' task vectors; they must not be parallel.
        data: rows of text, or several data sets by name (`{"fox": …, "clock": …}`): each point is measured on all.
        size: points along each side of the grid.
        margin: how far the grid goes beyond the three models, as a share of its size.
        output: a folder in which finished points are kept: an interrupted run continues there, and a run with another
            model, vectors, data or grid keeps its own beside them.
        batch_size: rows in a forward pass.
        max_length: cut rows to this many tokens.
        tokenizer: for texts.
        merge: see `TaskVector.edit`.
        progress: show a progress bar; by default on a terminal.
    """
    check_whole("size", size)
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
    done = _Done(output, key)
    grid = [(i, j) for j in range(size) for i in range(size)]
    for i, j in progress_bar(grid, "Landscape", progress):
        if (i, j) in done.losses:
            continue
        a, b = plane.scales(x[i], y[j])
        vector = a * vector_a + b * vector_b
        with vector.applied_to(model, merge=merge) if len(vector) else nullcontext(), evaluating(model):
            found = {name: mean_loss(model, each, batch_size) for name, each in rows.items()}
        _check_finite(found, (a, b), names)
        done.add(i, j, found)
    losses = {name: tuple(tuple(done.losses[i, j][name] for i in range(size)) for j in range(size)) for name in rows}
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
                f"the loss on {name} is {loss} at θ_0 + {edit}: the model overflows there, or its weights are broken. Use a smaller "
                "margin=, smaller vectors, or a model in a wider dtype."
            )


def _axis(values: list[float], size: int, margin: float) -> tuple[float, ...]:
    low, high = min(values), max(values)
    low, high = low - margin * (high - low), high + margin * (high - low)
    return tuple(low + (high - low) * step / (size - 1) for step in range(size))


def _key(
    model: torch.nn.Module,
    a: TaskVector,
    b: TaskVector,
    rows: Mapping[str, Rows],
    x: tuple[float, ...],
    y: tuple[float, ...],
) -> str:
    """What the losses depend on."""
    parts = [live_checkpoint(model).sampled_fingerprint, a.fingerprint, b.fingerprint, json.dumps(rows), repr((x, y))]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


class _Done:
    """Finished points, kept in a file as they come, a line for each."""

    def __init__(self, folder: str | Path | None, key: str) -> None:
        self.losses: dict[tuple[int, int], dict[str, float]] = {}
        self._path = None if folder is None else Path(folder) / f"landscape-{key[:16]}.jsonl"
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                self._append({"key": key})
                return
            lines = self._path.read_text("utf-8").split("\n")
        except OSError as error:
            raise OutputError(f"cannot write to {self._path.parent.name}: {error.strerror or error}.") from None
        try:
            head = json.loads(lines[0]).get("key")
            points = [json.loads(line) for line in lines[1:-1]]  # what follows the last newline was cut off
            self.losses = {(p["x"], p["y"]): p["losses"] for p in points}
        except (ValueError, KeyError, AttributeError, TypeError):
            head = None
        if head != key:
            raise CorruptFileError(
                f"{self._path.name} in {self._path.parent.name} is damaged: remove it to start again."
            )
        if lines[-1]:  # a line that a killed run did not finish
            self._path.write_text("\n".join(lines[:-1]) + "\n", "utf-8")

    def add(self, i: int, j: int, losses: dict[str, float]) -> None:
        self.losses[i, j] = losses
        self._append({"x": i, "y": j, "losses": losses})

    def _append(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
