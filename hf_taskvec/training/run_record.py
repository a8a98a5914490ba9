"""What a fine-tuning run leaves behind: a folder, and in it the record of how it was made."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_taskvec.errors import CorruptFileError
from hf_taskvec.filenames import EPOCH_VECTORS, TRAINING_RECORD
from hf_taskvec.json_files import read_json
from hf_taskvec.typed_values import typed


@dataclass(frozen=True)
class _Timing:
    tokens_per_second: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class _Record:
    """What is read of the record of a run."""

    losses: tuple[float, ...]
    epoch_losses: tuple[float, ...]
    steps: int
    timing: _Timing
    vectors: tuple[str, ...]


@dataclass(frozen=True)
class Finetuned:
    """A finished fine-tuning run.

    Args:
        folder (`Path`):
            A complete model (full) or a PEFT adapter (LoRA).
        losses (`tuple` of `float`):
            The mean loss of each step, in nats per token.
        epoch_losses (`tuple` of `float`):
            The mean of each epoch, while it was trained.
        steps (`int`):
            How many steps of the optimiser were made.
        tokens_per_second (`float`):
            Of the run that finished it, over all processes.
        vectors (`tuple` of `Path`, *optional*):
            The task vector of each epoch, if they were asked for.
        peak_bytes (`int`, *optional*):
            The most memory that the steps took beyond the weights, in the main process; `None` where nothing told.
    """

    folder: Path
    losses: tuple[float, ...]
    epoch_losses: tuple[float, ...]
    steps: int
    tokens_per_second: float
    vectors: tuple[Path, ...] = ()
    peak_bytes: int | None = None

    @classmethod
    def load(cls, folder: str | Path) -> "Finetuned":
        """The record of a finished run in a folder.

        Args:
            folder (`str` or `Path`):
                What `finetune` has written.

        Returns:
            `Finetuned`: The run.

        Raises:
            `MissingFileError`: If the folder holds no such record.
            `CorruptFileError`: If the record is damaged.
        """
        folder = Path(folder)
        try:
            record = read_json(folder / TRAINING_RECORD)
            if isinstance(timing := record.get("timing"), dict):  # earlier versions did not measure memory
                timing.setdefault("peak_bytes", None)
            data = typed(_Record, record)
            for name in data.vectors:
                if Path(name).name != name or name in ("", "..") or "\0" in name:
                    raise CorruptFileError(f"{name[:60]!r} is no folder in {EPOCH_VECTORS}.")
        except CorruptFileError as error:
            raise CorruptFileError(f"{TRAINING_RECORD} in {folder.name} is damaged: {error} Train again.") from None
        return cls(
            folder=folder,
            losses=data.losses,
            epoch_losses=data.epoch_losses,
            steps=data.steps,
            tokens_per_second=data.timing.tokens_per_second,
            vectors=tuple(folder / EPOCH_VECTORS / name for name in data.vectors),
            peak_bytes=data.timing.peak_bytes,
        )


def write_record(folder: Path, data: dict[str, Any]) -> None:
    """Write the record of a run into its folder."""
    (folder / TRAINING_RECORD).write_text(
        json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8"
    )


def is_record_of(folder: Path, key: str) -> bool:
    """Whether a folder holds the finished run of a key."""
    return (folder / TRAINING_RECORD).exists() and read_json(folder / TRAINING_RECORD).get("key") == key
