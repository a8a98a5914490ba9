"""What a repair leaves behind: a model, two task vectors, and the record of how they were made."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.atomic import write_text
from hf_taskvec.errors import CorruptFileError
from hf_taskvec.filenames import REPAIR_RECORD, REPAIR_VECTOR, REPAIRED_MODEL, REPAIRED_VECTOR
from hf_taskvec.json_files import read_json
from hf_taskvec.typed_values import typed


@dataclass(frozen=True)
class RepairFigures:
    """The numbers of a repair's training.

    Args:
        steps (`int`):
            Steps of the optimiser.
        tokens (`int`):
            Tokens of kept text that were trained on, each as often as it was seen.
        seconds (`float`):
            How long that takes at the speed of the run that finished it.
        epoch_losses (`tuple` of `float`):
            The mean of what was minimised, in each epoch.
        peak_bytes (`int`, *optional*):
            The most memory that the steps took beyond the weights; `None` where nothing told.
    """

    steps: int
    tokens: int
    seconds: float
    epoch_losses: tuple[float, ...]
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Repaired:
    """An edit and its repair, finished.

    Args:
        folder (`Path`):
            All of it.
        vector (`TaskVector`):
            The whole change from the base: edit and repair. Applied to the base it gives `model`, bit for bit.
        repair (`TaskVector`):
            The change that the training made to the edited model.
        model (`Path`):
            The repaired model, whole, in the base's dtypes.
        steps (`int`):
            Steps of the optimiser.
        tokens (`int`):
            Tokens of kept text that were trained on, each as often as it was seen.
        seconds (`float`):
            How long the training takes at the speed of the run that finished it.
        epoch_losses (`tuple` of `float`):
            The mean of what was minimised, in each epoch.
        peak_bytes (`int`, *optional*):
            The most memory that the steps took beyond the weights; `None` where nothing told.
    """

    folder: Path
    vector: TaskVector
    repair: TaskVector
    model: Path
    steps: int
    tokens: int
    seconds: float
    epoch_losses: tuple[float, ...]
    peak_bytes: int | None = None

    @classmethod
    def load(cls, folder: str | Path) -> "Repaired":
        """A finished repair in a folder; of its tensors nothing is read yet.

        Args:
            folder (`str` or `Path`):
                What `repair` has written.

        Returns:
            `Repaired`: The repair.

        Raises:
            `MissingFileError`: If the folder holds no such record, or a vector of it is missing.
            `CorruptFileError`: If the record or a vector is damaged.
        """
        folder = Path(folder)
        figures = read_figures(folder)
        return cls(
            folder=folder,
            vector=TaskVector.load(folder / REPAIRED_VECTOR),
            repair=TaskVector.load(folder / REPAIR_VECTOR),
            model=folder / REPAIRED_MODEL,
            **vars(figures),
        )


def read_figures(folder: Path) -> RepairFigures:
    """The numbers in the record of a finished repair."""
    try:
        record = read_json(folder / REPAIR_RECORD)
        record.setdefault("peak_bytes", None)  # earlier versions did not measure memory
        figures: RepairFigures = typed(RepairFigures, record)
    except CorruptFileError as error:
        raise CorruptFileError(f"{REPAIR_RECORD} in {folder.name} is damaged: {error} Repair again.") from None
    return figures


def is_repair_of(record: Path, key: str) -> bool:
    """Whether a record is there, and that of a key."""
    return record.exists() and read_json(record).get("key") == key


def write_repair(record: Path, data: dict[str, Any]) -> None:
    """Write the record of a repair."""
    write_text(record, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
