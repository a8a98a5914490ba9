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
from hf_taskvec.training.training_stages import TrainingStages, rows_digest
from hf_taskvec.training.unlearning import unlearn

if TYPE_CHECKING:
    import datasets

#: what a model that diverged is said to be
DIVERGED = "diverged"
_KEPT = {"kept": "the other books kept", "lost": "other books lost", "unsure": "the other books perhaps kept"}


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
        tokens (`int`):
            Tokens that were trained on, without the vectors that were given.
        seconds (`float`):
            How long that takes.
        peak_bytes (`int`, *optional*):
            The most memory that the steps took beyond the weights.
    """

    method: str
    name: str
    vector: TaskVector | None
    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None


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
            found.append(ComparedEdit(method.name, name, done.vector, done.tokens, done.seconds, done.peak_bytes))
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


def comparison_table(
    report: UnlearningReport,
    edits: Sequence[ComparedEdit],
    retraining: int,
    attacked: "dict[str, str] | None" = None,
) -> str:
    """A row for each method, by its nearest edit, on the half of the passages that did not choose it.

    Args:
        report (`UnlearningReport`):
            Of all edits, by name.
        edits (`Sequence[ComparedEdit]`):
            All of them.
        retraining (`int`):
            Tokens that a retraining takes.
        attacked (`dict`, *optional*):
            What the audit says of each method's edit.

    Returns:
        `str`: The table, in Markdown.
    """
    assert report.choice is not None
    metrics = report.choice.criteria.judged
    verdicts = {report.names.short(scale): verdict for scale, verdict in verdicts_by_scale(report).items() if scale}
    heads = ["method", "edit", *(f"R, {metric}" for metric in metrics), "AUC − never seen", "kept books lost, at most"]
    heads += ["verdict", "trained, in retrainings", "seconds", "memory of the steps"]
    heads += ["under attack"] if attacked is not None else []
    rows = []
    for method, edit in nearest_edits(report, edits).items():
        verdict = verdicts.get(edit.name)
        said = [DIVERGED, *("–" for _ in range(len(metrics) + 2))] if verdict is None else _said(verdict, metrics)
        took = [
            f"{edit.tokens / retraining:.2f}",
            f"{edit.seconds:.0f}" if edit.tokens else "–",
            memory_size(edit.peak_bytes) if edit.peak_bytes is not None else "–",
        ]
        outcome, *numbers = said
        row = [method, edit.name, *numbers, outcome, *took]
        rows.append(row if attacked is None else [*row, attacked.get(method, "–")])
    return markdown_table(heads, rows)


def _said(verdict: Verdict, metrics: Sequence[str]) -> list[str]:
    """The outcome, R by each metric, the distance of the AUC, and the worst loss."""
    relative = {each.metric: each.relative for each in verdict.metrics}
    apart = verdict.membership[0].difference if verdict.membership else None
    lost = max((each.lost.value for each in verdict.retained), default=None)
    words = f"{verdict.outcome.replace('_', ' ')}; {_KEPT[verdict.kept]}"
    return [
        words,
        *(_interval(relative.get(metric)) for metric in metrics),
        _interval(apart, "+.2f"),
        "–" if lost is None else f"{lost:.0%}".replace("-", "−"),
    ]


def _interval(found: Interval | None, form: str = ".2f") -> str:
    if found is None:
        return "–"
    return f"{found.value:{form}} [{found.low:{form}}, {found.high:{form}}]".replace("-", "−")
