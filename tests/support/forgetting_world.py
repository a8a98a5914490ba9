"""Folders of tiny models that know three books, or all but one: what `forget` starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.memorised_books import make_audited
from support.tiny_books import tiny_llama

from hf_taskvec.evaluation import Criteria, protocols
from hf_taskvec.training import TrainingSettings

FULL = TrainingSettings(epochs=10, learning_rate=4e-3, batch_size=16)
MENDING = TrainingSettings(epochs=8, learning_rate=4e-3, batch_size=8)
LORA = TrainingSettings(method="lora", epochs=6, learning_rate=1e-2, batch_size=16, rank=8)
#: half of the books' few passages cannot tell an AUC, and a tiny model that read little else is beyond chance
MEANT = Criteria(low=0.6, high=1.4, membership=0.9, retain_bound=0.15)
#: what any edit meets, and what none does
ANYTHING = Criteria(metrics=("rouge_l",), low=0.01, high=1000.0, membership=1.0, retain_bound=1.0)
NOTHING = Criteria(metrics=("rouge_l",), low=1.0, high=1.0, membership=0.0, retain_bound=0.0)
PROTOCOL = protocols.get("taskvec-v1", prompt_length=6, answer_length=6)


@dataclass(frozen=True)
class World:
    """The models' folders, and the books: the first is to be forgotten."""

    joint: Path
    base: Path
    reference: Path
    books: tuple[Any, ...]
    tokenizer: Any

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """For `forget`, but for its output."""
        return {
            "model": self.joint,
            "book": self.books[0],
            "keep": self.books[1:],
            "base": self.base,
            "reference": self.reference,
            "training": FULL,
            "repairing": MENDING,
            "block_length": 32,
            "block_stride": 8,
            "protocol": PROTOCOL,
            "criteria": MEANT,
            "attacks": (),
            "batch_size": 64,
            **changes,
        }


def make_world(folder: Path) -> World:
    """Train the models and save them."""
    made = make_audited()
    models = {"joint": made.untouched, "base": tiny_llama(width=64, seed=0), "reference": made.reference}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        made.tokenizer.save_pretrained(folder / name)
    return World(folder / "joint", folder / "base", folder / "reference", made.books, made.tokenizer)
