"""Other unlearning methods beside task vectors: their edits, what each took, and the table of them all."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.distributed import make_accelerator
from hf_taskvec.errors import DivergedError
from hf_taskvec.evaluation.reporting.rechoosing import verdicts_by_scale
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.reporting.verdict_tables import markdown_table
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.scoring.verdict import Verdict
from hf_taskvec.experiments.unlearning.baselines_config import BaselinesConfig
from hf_taskvec.json_files import json_digest
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.sizes import memory_size
from hf_taskvec.training.accelerators import resolve_precision
from hf_taskvec.training.run_record import Finetuned
from hf_taskvec.training.training_stages import TrainingStages, rows_digest
from hf_taskvec.training.unlearning import unlearn

if TYPE_CHECKING:
    import datasets

    from hf_taskvec.auditing.audit_report import AuditReport

#: what a model that diverged is said to be
DIVERGED = "diverged"
_KEPT = {"kept": "the other books kept", "lost": "other books lost", "unsure": "the other books perhaps kept"}


@dataclass(frozen=True)
class Cost:
    """What trainings took; those of an edit are added.

    Args:
        tokens (`int`):
            Tokens that were trained on.
        seconds (`float`):
            How long that takes.
        peak_bytes (`int`, *optional*):
            The most memory that the steps took beyond the weights; `None` where nothing told.
    """

    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None

    def __add__(self, other: "Cost") -> "Cost":
        peaks = [each.peak_bytes for each in (self, other) if each.peak_bytes is not None]
        return Cost(self.tokens + other.tokens, self.seconds + other.seconds, max(peaks, default=None))

    @classmethod
    def of_stage(cls, folder: Path, tokens: int) -> "Cost":
        """What a finished fine-tune took.

        Args:
            folder (`Path`):
                Of the stage.
            tokens (`int`):
                On which it was trained, each as often as it was seen.
        """
        run = Finetuned.load(folder)
        return cls(tokens, tokens / max(run.tokens_per_second, 0.1), run.peak_bytes)


@dataclass(frozen=True)
class ComparedEdit:
    """An edit of a comparison.

    Args:
        method (`str`):
            By what it was made; the edits of one method stand for each other in the table, the nearest for all.
        name (`str`):
            What the report calls it.
        vector (`TaskVector`, *optional*):
            The change; `None` if the training diverged.
        cost (`Cost`, *optional*):
            What it took, the training of the vectors that it is made of included; nothing for what was given.
    """

    method: str
    name: str
    vector: TaskVector | None
    cost: Cost = Cost()


def tokens_of(blocks: "datasets.Dataset") -> int:
    """How many tokens packed blocks have."""
    return sum(map(len, blocks["input_ids"]))


def unlearned_edits(
    config: BaselinesConfig,
    stages: TrainingStages,
    model: Path | str,
    forget_blocks: "datasets.Dataset",
    keep_blocks: "datasets.Dataset",
) -> list[ComparedEdit]:
    """Every method with every learning rate, each trained once and known by what made it.

    Args:
        config (`BaselinesConfig`):
            The methods, their budget and learning rates.
        stages (`TrainingStages`):
            Where they lie.
        model (`str` or `Path`):
            The model that knows the books.
        forget_blocks (`datasets.Dataset`):
            Packed blocks of the book to forget.
        keep_blocks (`datasets.Dataset`):
            Packed blocks of the books to keep.

    Returns:
        `list` of `ComparedEdit`: Also those that diverged, without a vector.
    """
    length = len(forget_blocks[0]["input_ids"])
    budget = round(config.budget * config.training(config.joint_method).epochs * len(keep_blocks) * length)
    found = []
    for method in config.compared:
        in_epoch = len(forget_blocks) * length * (2 if method.keeps else 1)
        for rate in dict.fromkeys(config.method_learning_rates):
            settings = config.unlearning(budget, in_epoch, rate)
            name = f"{method.name}, {rate:g}"
            kept = keep_blocks if method.keeps else None
            key = json_digest(
                open_checkpoint(model).sampled_fingerprint,
                [method.name, asdict(method), asdict(settings), resolve_precision(settings, make_accelerator())],
                [rows_digest(each) for each in (forget_blocks, keep_blocks)],
            )
            folder = stages.cache / f"{method.name}-{key[:12]}"
            if stages.tell is not None:
                stages.tell(f"{name}: {'done before' if folder.exists() else 'unlearning'} ({folder.name})")
            try:
                done = unlearn(
                    model,
                    forget_blocks,
                    folder,
                    method=method,
                    keep_blocks=kept,
                    settings=settings,
                    tokenizer=stages.tokenizer,
                    checkpoint_every=stages.checkpoint_every,
                    overwrite=stages.force,
                    progress=stages.progress,
                )
            except DivergedError as error:
                if stages.tell is not None:
                    stages.tell(f"{name}: {DIVERGED}, {error}")
                found.append(ComparedEdit(method.name, name, None))
                continue
            found.append(ComparedEdit(method.name, name, done.vector, Cost(done.tokens, done.seconds, done.peak_bytes)))
    return found


def nearest_edits(report: UnlearningReport, edits: Sequence[ComparedEdit]) -> dict[str, ComparedEdit]:
    """For each method the edit that misses the criteria least on the choosing half; one that diverged if all did.

    Args:
        report (`UnlearningReport`):
            Of all edits, by name.
        edits (`Sequence[ComparedEdit]`):
            All of them.

    Returns:
        `dict`: By method.
    """
    assert report.choice is not None
    missed = {report.names.short(each.scale): each.shortfall for each in report.choice.candidates}
    methods = dict.fromkeys(edit.method for edit in edits)
    by_method = {method: [edit for edit in edits if edit.method == method] for method in methods}
    return {
        method: min(some, key=lambda edit: missed.get(edit.name, float("inf"))) for method, some in by_method.items()
    }


@dataclass(frozen=True)
class AttackedMetrics:
    """What an attack on a method's edit brought back: relative forgetting beside the attacked reference."""

    outcome: str
    relative: dict[str, float | None]


@dataclass(frozen=True)
class ComparedMethod:
    """A method in a comparison, by its nearest edit, on the half of the passages that did not choose it.

    Args:
        method (`str`):
            Its name.
        edit (`str`):
            The edit that stands for it.
        cost (`Cost`):
            What that edit took.
        retrainings (`float`):
            Its tokens beside those of a retraining.
        verdict (`Verdict`, *optional*):
            What the passages say; `None` if the method diverged.
        attacks (`dict`):
            What each attack brought back, by its name; empty if there was none.
        audited (`bool`):
            Whether it was attacked at all.
    """

    method: str
    edit: str
    cost: Cost
    retrainings: float
    verdict: Verdict | None
    attacks: dict[str, AttackedMetrics]
    audited: bool

    @property
    def attacked(self) -> str:
        """Under which attacks the book is surely known, in a few words."""
        if not self.audited:
            return "–"
        known = [name for name, each in self.attacks.items() if each.outcome == "still_known"]
        names = f": {', '.join(known)}" if known else ""
        return f"known under {len(known)} of {len(self.attacks)}{names}"

    @property
    def worst_loss(self) -> float | None:
        """The largest share that a kept book lost of a metric."""
        return max((each.lost.value for each in self.verdict.retained), default=None) if self.verdict else None

    def to_json(self) -> dict[str, object]:
        """The numbers, for whoever makes another table of them."""
        verdict = self.verdict
        found: dict[str, object] = {"method": self.method, "edit": self.edit, "retrainings": round(self.retrainings, 4)}
        found |= {"seconds": round(self.cost.seconds, 1), "peak_bytes": self.cost.peak_bytes}
        if verdict is None:
            return found | {"outcome": DIVERGED}
        return found | {
            "outcome": verdict.outcome,
            "kept": verdict.kept,
            "R": _relative(verdict),
            "AUC": [[round(each.auc.value, 4), round(each.difference.value, 4)] for each in verdict.membership],
            "lost": {f"{each.book}: {each.metric}": round(each.lost.value, 4) for each in verdict.retained},
            "attacks": {name: asdict(each) for name, each in self.attacks.items()},
        }


def compared_methods(
    report: UnlearningReport,
    edits: Sequence[ComparedEdit],
    retraining: int,
    audits: "dict[str, AuditReport] | None" = None,
) -> list[ComparedMethod]:
    """Each method by its nearest edit, the untouched model first.

    Args:
        report (`UnlearningReport`):
            Of all edits, by name.
        edits (`Sequence[ComparedEdit]`):
            All of them.
        retraining (`int`):
            Tokens that a retraining takes.
        audits (`dict`, *optional*):
            The audit of each method's edit.

    Returns:
        `list` of `ComparedMethod`: In the order of the edits.
    """
    verdicts = {report.names.short(scale): verdict for scale, verdict in verdicts_by_scale(report).items()}
    untouched = report.names.short(0)
    nearest = {untouched: ComparedEdit(untouched, "–", None), **nearest_edits(report, edits)}
    found = []
    for method, edit in nearest.items():
        audited = (audits or {}).get(method)
        attacks = {}
        for finding in audited.findings if audited else ():
            verdict = finding.last.verdict
            attacks[finding.attack] = AttackedMetrics(verdict.outcome, _relative(verdict))
        found.append(
            ComparedMethod(
                method,
                edit.name,
                edit.cost,
                edit.cost.tokens / retraining,
                verdicts.get(method if method == untouched else edit.name),
                attacks,
                audited is not None,
            )
        )
    return found


def comparison_table(methods: Sequence[ComparedMethod], metrics: Sequence[str]) -> str:
    """A row for each method.

    Args:
        methods (`Sequence[ComparedMethod]`):
            What `compared_methods` found.
        metrics (`Sequence[str]`):
            By which forgetting is judged.

    Returns:
        `str`: The table, in Markdown.
    """
    audited = any(each.audited for each in methods)
    heads = ["method", "edit", *(f"R, {metric}" for metric in metrics), "AUC − never seen", "kept books lost, at most"]
    heads += ["verdict", "trained, in retrainings", "seconds", "memory of the steps"]
    heads += ["under attack"] if audited else []
    rows = []
    for each in methods:
        cost = each.cost
        row = [each.method, each.edit, *_said(each, metrics)]
        row += [
            f"{each.retrainings:.2f}",
            f"{cost.seconds:.0f}" if cost.tokens else "–",
            memory_size(cost.peak_bytes) if cost.peak_bytes is not None else "–",
        ]
        rows.append([*row, each.attacked] if audited else row)
    return markdown_table(heads, rows)


def _said(found: ComparedMethod, metrics: Sequence[str]) -> list[str]:
    """R by each metric, the distance of the AUC, the worst loss, and the outcome."""
    verdict = found.verdict
    if verdict is None:
        return [*("–" for _ in range(len(metrics) + 2)), DIVERGED]
    relative = {each.metric: each.relative for each in verdict.metrics}
    apart = verdict.membership[0].difference if verdict.membership else None
    lost = found.worst_loss
    return [
        *(_interval(relative.get(metric)) for metric in metrics),
        _interval(apart, "+.2f"),
        "–" if lost is None else f"{lost:.0%}".replace("-", "−"),
        f"{verdict.outcome.replace('_', ' ')}; {_KEPT[verdict.kept]}",
    ]


def _relative(verdict: Verdict) -> dict[str, float | None]:
    """R by each metric; `None` where the two models that it lies between are too near to each other."""
    return {each.metric: None if each.relative is None else round(each.relative.value, 4) for each in verdict.metrics}


def _interval(found: Interval | None, form: str = ".2f") -> str:
    if found is None:
        return "–"
    value, low, high = (f"{round(each, 2) + 0.0:{form}}" for each in (found.value, found.low, found.high))  # no −0.00
    return f"{value} [{low}, {high}]".replace("-", "−")
