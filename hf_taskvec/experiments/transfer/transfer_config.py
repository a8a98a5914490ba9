"""The settings of the transfer experiment: one dataclass, every field explained."""

import math
from dataclasses import dataclass
from typing import Any

from hf_taskvec.errors import BadValueError
from hf_taskvec.experiments.config_options import option
from hf_taskvec.experiments.experiment_config import ExperimentConfig
from hf_taskvec.training.settings import TrainingSettings

# Given as paths: recorded by fingerprint instead.
_PATHS = ("base_model", "books", "new_books", "vectors")


@dataclass(frozen=True)
class TransferConfig(ExperimentConfig):
    """The settings of `recipes/transfer.py`; its `--help` explains each of them."""

    # What is given. Whatever is missing is made.
    books: list[str] | None = option(
        None, "Text files of the books that have vectors, two or more. The embedded model brings its own."
    )
    new_books: list[str] | None = option(
        None,
        "Text files of books that have none, each of which is to be reached. If none is given, each of --books is in "
        "turn the new one, and the vectors of the others are combined.",
    )
    vectors: list[str] | None = option(
        None,
        "The fine-tune, adapter or saved task vector of each of --books, in the same order: folders or Hub ids. What "
        "is not given is fine-tuned here.",
    )
    unrelated: int = option(2, "How many unrelated books the embedded library has beside its two volumes, at most 7.")

    # Fine-tuning.
    epochs: int = option(2, "How often each book is read.")

    # The new book.
    rows: int = option(
        32,
        "Rows of --block-length tokens: so many of a new book's seen text are looked at, to find what it has in common "
        "with the others; and half as many of each other book's held-out text.",
    )
    margin: float = option(
        0.2, "The margin in Theorem 3's sums: 0.2 as its authors have it in practice, 1 as in the theorem."
    )
    beta: float = option(0.01, "By how much the error grows with |λ|, in Theorem 3.")
    slack: float = option(0.02, "c of Theorem 3: |λ| beyond c/β is not trusted.")
    fit_steps: int = option(
        30, "Also learn one λ for each vector by so many steps of gradient descent on the same rows; 0: do not."
    )

    output: str = option("outputs/transfer", "The folder for the report and the vector (or model) of each new book.")

    def __post_init__(self) -> None:
        self.check()
        if self.embedded and (self.books or self.new_books or self.vectors):
            raise BadValueError("the embedded model brings its own books. To use yours, name a --base-model.")
        least = 2 if self.new_books else 3
        if not self.embedded and len(self.books or ()) < least:
            why = "Theorem 3 combines two vectors or more" if self.new_books else "each is in turn the new one"
            raise BadValueError(f"give at least {least} books, as {why}: --books one.txt two.txt three.txt.")
        if self.embedded and not 1 <= self.unrelated <= 7:
            raise BadValueError(f"unrelated={self.unrelated}: the embedded library has 1 to 7 unrelated books.")
        if self.vectors is not None and len(self.vectors) != len(self.books or ()):
            raise BadValueError(
                f"--vectors needs {len(self.books or ())} fine-tunes, one for each of --books, not {len(self.vectors)}."
            )
        for name, least in {"epochs": 1, "rows": 4, "fit_steps": 0}.items():
            if getattr(self, name) < least:
                raise BadValueError(f"{name}={getattr(self, name)} must be at least {least}.")
        if not (self.margin > 0 and math.isfinite(self.margin)):
            raise BadValueError(f"margin={self.margin} must be positive.")
        for name in ("beta", "slack"):
            if not 0 < getattr(self, name) < 1:
                raise BadValueError(f"{name}={getattr(self, name)} must be between 0 and 1.")
        _ = self.training

    @property
    def training(self) -> TrainingSettings:
        """How each book is fine-tuned on."""
        return self.settings(self.method, self.epochs)

    def resolved(self, inputs: dict[str, str]) -> dict[str, Any]:
        """All that decides the results, without a path of this machine."""
        return {"inputs": inputs, **self.identity(_PATHS)}
