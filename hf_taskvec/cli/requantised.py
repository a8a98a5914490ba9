"""What storing a model in fewer bits again left of an edit, over all its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_taskvec.filenames import MODEL_RECORD
from hf_taskvec.json_files import read_json


@dataclass(frozen=True)
class RequantisedTotals:
    """Counts over all weights, and the weight of which least of the edit survives."""

    tensors: int
    weights: int
    edited: int
    undone: int
    lowest: tuple[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        name, share = self.lowest
        return {
            "tensors": self.tensors,
            "weights": self.weights,
            "edited": self.edited,
            "undone": self.undone,
            "lowest_share": {"name": name, "share": share},
        }

    def __str__(self) -> str:
        name, share = self.lowest
        undone = self.undone / self.edited if self.edited else 0.0
        return (
            f"{self.tensors} tensors stored in fewer bits again: {undone:.1%} of {self.edited:,} edited weights are "
            f"what they were; least of the edit survives in {name}: {share:.1%}"
        )


def requantised_totals(output: Path) -> RequantisedTotals | None:
    """What the record of an output tells; None if no weight was stored in fewer bits again."""
    found = read_json(output / MODEL_RECORD).get("requantised")
    if not found:
        return None
    weights, edited, undone = (sum(each[key] for each in found.values()) for key in ("weights", "edited", "undone"))
    name = min(found, key=lambda each: found[each]["share"])
    return RequantisedTotals(len(found), weights, edited, undone, (name, found[name]["share"]))
