"""The settings of the comparison with other unlearning methods: those of the unlearning experiment, and a few more."""

import math
from dataclasses import dataclass, replace

from hf_taskvec.auditing.audit_parts import ATTACKS
from hf_taskvec.auditing.audit_run import checked_attacks
from hf_taskvec.errors import BadValueError
from hf_taskvec.experiments.config_options import option
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.unlearning_methods import METHODS, UnlearningMethod, unlearning_method


@dataclass(frozen=True)
class BaselinesConfig(UnlearnConfig):
    """The settings of `recipes/baselines.py`; its `--help` explains each of them.

    `correlation` and `refine`, which a config for both recipes may have, change nothing here.
    """

    methods: list[str] = option(
        list(METHODS), f"The unlearning methods to compare with, of {', '.join(METHODS)}; with their authors' settings."
    )
    budget: float = option(
        0.5, "How much each method may train, in tokens: this share of retraining on all the other books."
    )
    method_learning_rates: list[float] = option(
        [1e-5, 1e-4, 1e-3], "Each method is tried with these, the budget each time; 1e-5 is the authors' own."
    )
    audit_attacks: list[str] = option(
        ["relearn"], f"How `--audit` attacks each method's edit: some of {', '.join(ATTACKS)}."
    )
    output: str = option("outputs/baselines", "The folder for the report, the table and the plots.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.compared
        if not checked_attacks(self.audit_attacks):
            raise BadValueError("audit_attacks is empty: name some, e.g. --audit-attacks relearn, or --audit false.")
        if not (math.isfinite(self.budget) and self.budget > 0):
            raise BadValueError(f"budget={self.budget} must be a number above 0: it is a share of retraining.")
        if not self.method_learning_rates:
            raise BadValueError("method_learning_rates is empty: give some, e.g. --method-learning-rates 1e-5 1e-4.")
        for rate in self.method_learning_rates:
            self.unlearning(1, 1, rate)
        if not (self.retrain or self.reference_model):
            raise BadValueError(
                "methods are compared beside a model that never saw the book: --reference-model, or --retrain true."
            )
        if self.edit == "project":
            raise BadValueError("--edit project needs the other books' vectors, which a comparison does not make.")
        for name in ("rank", "prune_rows", "epoch_vectors", "controls"):
            if getattr(self, name):
                raise BadValueError(
                    f"--{name.replace('_', '-')} is for recipes/unlearn.py: a comparison has none of it."
                )
        if self.push_to_hub is not None:
            raise BadValueError("--push-to-hub: a comparison makes no model to push. Use recipes/unlearn.py.")

    @property
    def compared(self) -> tuple[UnlearningMethod, ...]:
        """The methods, each once."""
        return tuple(unlearning_method(name) for name in dict.fromkeys(self.methods))

    def unlearning(self, tokens: int, tokens_in_epoch: int, learning_rate: float) -> TrainingSettings:
        """How a method is trained: as many epochs of the text to forget as the budget has, at least one.

        Args:
            tokens (`int`):
                The budget.
            tokens_in_epoch (`int`):
                What an epoch takes, of both texts.
            learning_rate (`float`):
                The highest one.
        """
        epochs = max(1, round(tokens / tokens_in_epoch))
        return replace(self.training(self.method), epochs=epochs, learning_rate=learning_rate)
