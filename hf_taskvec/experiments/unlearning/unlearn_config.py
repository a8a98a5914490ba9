"""The settings of the unlearning experiment: one dataclass, every field explained."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.metrics import METRICS, PRIMARY
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.books import Role
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.experiments.config_options import option
from hf_taskvec.experiments.experiment_config import ExperimentConfig
from hf_taskvec.publishing.push import check_repository
from hf_taskvec.training.settings import TrainingSettings

_ROLES: tuple[Role, ...] = ("forget", "aligned", "retain")  # the recipe makes a reference, so it needs no unseen text
# Given as paths: recorded by name and fingerprint instead.
_PATHS = ("base_model", "joint_model", "tuned_model", "task_vector", "adapter", "reference_model", "books")


@dataclass(frozen=True)
class UnlearnConfig(ExperimentConfig):
    """The settings of `recipes/unlearn.py`; its `--help` explains each of them."""

    # What is given. Whatever is missing is made.
    books: list[str] | None = option(
        None,
        "The texts as role=file, e.g. `forget=hp1.txt aligned=hp2.txt retain=pp.txt`; a role may come several times. "
        "The embedded model brings its own.",
    )
    joint_model: str | None = option(None, "θ_0', fine-tuned on all books, if you have it.")
    tuned_model: str | None = option(None, "θ_0 fine-tuned on the forget book alone, if you have it (a full model).")
    adapter: str | None = option(None, "The same as a LoRA adapter, if you have that.")
    task_vector: str | None = option(None, "The task vector itself, if you have saved one.")
    reference_model: str | None = option(None, "θ_0 fine-tuned on all books but the one to forget, if you have it.")
    retrain: bool = option(True, "Make that reference model: the gold standard of a model that never saw the book.")

    # The vector.
    rank: int | None = option(None, "Compress the vector to this rank before it is used (corollary 1 of the paper).")
    prune_rows: float | None = option(
        None,
        "Keep this share of the rows in each MLP matrix of the vector, those with the largest norms (corollary 2).",
    )
    lora_epochs: int | None = option(None, "How often LoRA reads the book; as often as full fine-tuning if not given.")

    # Fine-tuning.
    joint_method: Literal["full", "lora"] = option(
        "full", "How θ_0' and the reference model are made; what LoRA gives is merged."
    )
    epochs: int = option(3, "How often the books are read.")
    checkpoint_every: int | None = option(
        None, "Steps between the checkpoints of a training; one at the end of each epoch if not given, 0 for none."
    )
    epoch_vectors: bool = option(False, "Also keep the task vector of each epoch, in `vectors/` of the stage `forget`.")

    # The sweep.
    scales: list[float] = option([0.0, -0.2, -0.4, -0.6, -0.8, -1.0], "The values of λ.")
    refine: int = option(
        0, "Try so many more λ between the last that forgets too little and the first that forgets enough."
    )
    protocol: str = option(protocols.OURS.name, "How the model is asked: the name of a protocol.")
    prompt_length: int | None = option(None, "Words of each prompt; the protocol's own if not given.")
    answer_length: int | None = option(None, "Words of each continuation; the protocol's own if not given.")
    samples: int | None = option(
        None, "At most so many passages of each book and split; the protocol's own if not given."
    )
    metrics: list[str] = option(
        list(PRIMARY), "The metrics that all have to say that the book is forgotten. Tables lead with the first."
    )
    low: float = option(0.8, "R, the way from known (0) to never seen (1), means forgotten from here …")
    high: float = option(1.2, "… to here. Beyond, the book is forgotten too much.")
    membership: float = option(0.15, "How far the membership AUC may be from that of a model that never saw the book.")
    retain_bound: float = option(0.1, "The share that a retained book may lose of every metric.")
    certain: bool = option(
        False, "Take only a λ of which whole intervals say so on the choosing half; by default the means decide."
    )
    rule: Literal["relative", "margin"] = option(
        "relative", "What forgotten means: by R, or the earlier rule, the first metric within ± margin of never seen."
    )
    margin: float = option(0.03, "For the rule `margin`.")

    # The edit beyond the sweep.
    edit: Literal["paper", "negate", "project", "learned", "repair"] = option(
        "repair",
        "What is tried beyond the paper's sweep of λ: `repair` negates beyond what is left of the book, then trains on "
        "the other books for a while; `project` leaves alone what the book shares with the others; `learned` finds a "
        "coefficient for each tensor; `negate` takes the λ at which the book's loss is as never seen; `paper`: none.",
    )
    edit_rounds: int = option(3, "How many repairs are trained, each set by the verdict on the last.")
    repair_epochs: int | None = option(
        None, "How often a repair reads the other books; half as often as fine-tuning if not given."
    )
    repair_batch_size: int | None = option(None, "Blocks in one step of a repair; half of --batch-size if not given.")
    repair_learning_rate: float | None = option(
        None, "The highest learning rate of a repair; that of the vector's method if not given."
    )

    controls: bool = option(
        False,
        "Also try noise of the vector's size, in the weights and on the output, and the other books' vectors: only "
        "the right vector should forget the right book.",
    )
    audit: bool = option(
        False, "Attack the model of the chosen λ (or the nearest), beside the untouched model and the reference."
    )
    audit_passages: int = option(60, "At most so many passages of the book are asked under attack.")
    audit_samples: int = option(16, "How many samples of each passage the audit draws.")
    correlation: bool = option(
        False,
        "Also fine-tune on each other book alone, and tell the task correlation α̂ of eq. (11) with the one to forget.",
    )

    # The run.
    output: str = option("outputs/unlearn", "The folder for the report, the plots, the chosen model and the vector.")
    push_to_hub: str | None = option(None, "Push the chosen model to this repository, with its report.")

    def __post_init__(self) -> None:
        if self.embedded and self.books:
            raise BadValueError("the embedded model brings its own books. To use yours, name a --base-model.")
        if not self.embedded and not self.books:
            raise BadValueError(
                "no books are given. Name your text files: --books forget=one.txt aligned=two.txt retain=three.txt."
            )
        self.check()
        if self.lora_epochs is not None and self.lora_epochs < 1:
            raise BadValueError(f"lora_epochs={self.lora_epochs} must be at least 1.")
        if self.prune_rows is not None and not 0 < self.prune_rows <= 1:
            raise BadValueError(f"prune_rows={self.prune_rows} must be above 0 and at most 1: it is the share kept.")
        if self.rank is not None and self.rank < 1:
            raise BadValueError(f"rank={self.rank} must be at least 1.")
        for name in ("edit_rounds", "repair_epochs", "repair_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadValueError(f"{name}={value} must be at least 1.")
        for name in ("refine", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise BadValueError(f"{name}={value} must be 0 or more.")
        if self.epoch_vectors and not self.makes_vector:
            raise BadValueError("--epoch-vectors: the task vector is given, so there are no epochs to keep it of.")
        if not self.scales or not all(math.isfinite(scale) for scale in self.scales):
            raise BadValueError(f"scales={self.scales} must be finite numbers.")
        if not any(self.scales):
            raise BadValueError("scales holds no λ but 0, which changes nothing. Give some, e.g. --scales 0 -0.5 -1.")
        if self.push_to_hub is not None:
            check_repository(self.push_to_hub)
        sources = [name for name in ("tuned_model", "adapter", "task_vector") if getattr(self, name)]
        if len(sources) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in sources)
            raise BadValueError(f"{flags} both give the task vector. Choose one.")
        if self.audit and not (self.retrain or self.reference_model):
            raise BadValueError("--audit needs a model that never saw the book: --reference-model, or --retrain true.")
        if self.audit and not self.asking.quotes:
            raise BadValueError(
                f"--audit: protocol {self.protocol!r} joins NLTK's tokens, so its passages do not stand in the book. "
                "Use --protocol ssu-v1 or taskvec-v1."
            )
        for name in ("audit_passages", "audit_samples"):
            if getattr(self, name) < 1:
                raise BadValueError(f"{name}={getattr(self, name)} must be at least 1.")
        self.criteria.check(METRICS.values(), METRICS)
        _ = self.roles, self.asking, self.training(self.method), self.training(self.joint_method), self.repairing

    @property
    def makes_joint(self) -> bool:
        """Whether θ_0' is fine-tuned here, not given."""
        return self.joint_model is None

    @property
    def makes_vector(self) -> bool:
        """Whether the task vector comes from a fine-tune that is done here."""
        return not (self.tuned_model or self.adapter or self.task_vector)

    @property
    def makes_reference(self) -> bool:
        """Whether the model that never saw the book is fine-tuned here."""
        return self.retrain and self.reference_model is None

    @property
    def tunes_others(self) -> bool:
        """Whether each other book is fine-tuned on alone as well, for its vector."""
        return self.correlation or self.controls or self.edit == "project"

    @property
    def roles(self) -> list[tuple[Role, str]]:
        """Each given book's role and file."""
        found: list[tuple[Role, str]] = []
        for book in self.books or ():
            role, _, path = book.partition("=")
            if role not in _ROLES or not path:
                raise BadValueError(f"--books {book}: write role=file, where the role is one of {', '.join(_ROLES)}.")
            found.append((role, path))
        if found and not any(role == "forget" for role, _ in found):
            raise BadValueError("no book is to be forgotten: give one as --books forget=FILE.")
        if found and all(role == "forget" for role, _ in found) and (self.retrain or self.tunes_others or self.edits):
            raise BadValueError(
                "all books are to be forgotten, so there is nothing to train a reference model on, nor to repair an "
                "edit with. Give another book (--books … retain=FILE), or pass --retrain false, --correlation false, "
                "--controls false and --edit paper."
            )
        return found

    @property
    def criteria(self) -> Criteria:
        """What forgotten and kept mean."""
        given = {each.name: getattr(self, each.name) for each in fields(Criteria)}
        return Criteria(**given | {"metrics": tuple(self.metrics)})

    @property
    def asking(self) -> Protocol:
        """The protocol, with the lengths that were asked for."""
        changes = {name: getattr(self, name) for name in ("prompt_length", "answer_length", "samples")}
        return protocols.get(self.protocol, **{name: value for name, value in changes.items() if value is not None})

    def training(self, method: Literal["full", "lora"]) -> TrainingSettings:
        """How to fine-tune by this method."""
        return self.settings(method, (self.lora_epochs or self.epochs) if method == "lora" else self.epochs)

    @property
    def edits(self) -> bool:
        """Whether an edit is tried beyond the sweep."""
        return self.edit != "paper"

    @property
    def repairing(self) -> TrainingSettings:
        """How an edited model is repaired: by the vector's own method."""
        settings = self.training(self.method)
        return replace(
            settings,
            epochs=self.repair_epochs or -(-settings.epochs // 2),
            batch_size=self.repair_batch_size or -(-settings.batch_size // 2),
            learning_rate=self.repair_learning_rate or settings.learning_rate,
        )

    def resolved(self, inputs: dict[str, str]) -> dict[str, Any]:
        """All that decides the results, without a path of this machine: what was given is known by its fingerprint.

        Args:
            inputs (`dict`):
                The fingerprint of each book and model that was given, by name.
        """
        return {"inputs": inputs, **self.identity(_PATHS)}
