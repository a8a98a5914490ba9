"""`FittedScales`: what `fit_scales` learned, and how it went."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hf_taskvec.algebra.parameter_names import Grouping
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.atomic import write_text

#: why learning ended
Ending = Literal["all steps were made", "the validation loss no longer fell"]


@dataclass(frozen=True)
class FittedScales:
    """Learned coefficients. Made by `fit_scales`.

    Args:
        vector (`TaskVector`):
            The sum of the vectors, each times its coefficients: lazy, and again an expression that can be saved,
            applied and combined. On the model that it was learned on it gives the weights of the kept step, bit for
            bit.
        coefficients (`Mapping[str, Mapping[str, float]]`):
            By the vector's name and the group of parameters.
        by (`str`):
            What makes a group.
        losses (`tuple[float, ...]`):
            The objective on each step's batch, before the step was made.
        validation (`tuple[tuple[int, float], ...]`):
            The number of steps made, and the objective on the blocks that were held out; none without such blocks.
        kept_step (`int`):
            After how many steps the coefficients were as they are here: where the validation loss was lowest; without
            validation, the last step.
        ended (`str`):
            Why learning ended.
        seconds (`float`):
            How long it took.

    """

    vector: TaskVector = field(repr=False)
    coefficients: Mapping[str, Mapping[str, float]]
    by: Grouping
    losses: tuple[float, ...] = field(repr=False)
    validation: tuple[tuple[int, float], ...] = field(repr=False)
    kept_step: int
    ended: Ending
    seconds: float

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return len(self.losses)

    @property
    def validation_loss(self) -> float | None:
        """The objective on the blocks that were held out, at the kept step; None without such blocks."""
        return dict(self.validation).get(self.kept_step)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON; of the vector its expression.

        Returns:
            `dict[str, Any]`: Texts, numbers, lists and dicts. `coefficients` can be given to `fit_scales` as `start`.

        """
        return {
            "expression": self.vector.expression,
            "by": self.by,
            "coefficients": {name: dict(table) for name, table in self.coefficients.items()},
            "kept_step": self.kept_step,
            "ended": self.ended,
            "losses": list(self.losses),
            "validation": [{"step": step, "loss": loss} for step, loss in self.validation],
            "seconds": self.seconds,
        }

    def save(self, output: str | Path) -> Path:
        """Write the coefficients and how they were learned to a JSON file. `fit.vector.save` saves the vector itself.

        Args:
            output (`str` or `Path`):
                The file to write or to replace, whole.

        Returns:
            `Path`: The file.

        """
        path = Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return path
