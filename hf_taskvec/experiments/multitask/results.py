"""What the rounds led to: scores of single and merged models, and the table of them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from hf_taskvec import atomic
from hf_taskvec.escaping import markdown_cell
from hf_taskvec.experiments.multitask.round_trace import Trace, pairs
from hf_taskvec.filenames import REPORT_MARKDOWN


@dataclass(frozen=True)
class MergedModel:
    """A merged model.

    Args:
        rule (`str`):
            The rule that merged it.
        scale (`float`):
            λ.
        scores (`tuple` of `float`):
            Of each task, on the test text.
        tried (`tuple`, *optional*):
            Each λ that was tried with its mean validation score.
    """

    rule: str
    scale: float
    scores: tuple[float, ...]
    tried: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class RoundsOutcome:
    """What N rounds led to.

    Args:
        rounds (`int`):
            N.
        steps_per_round (`int`):
            K.
        single (`tuple` of `float`):
            The score of each task's own model on that task.
        merged (`tuple` of `MergedModel`):
            The merged models.
        trace (`Trace`):
            Of the rounds.
    """

    rounds: int
    steps_per_round: int
    single: tuple[float, ...]
    merged: tuple[MergedModel, ...]
    trace: Trace

    def gap(self, merged: MergedModel) -> float:
        """How much better the tasks' own models are, on average: the paper's single-task gap."""
        return fmean(self.single) - fmean(merged.scores)

    def relative(self, merged: MergedModel) -> float:
        """The mean over tasks of the merged model's score as a share of the single one's."""
        return fmean(m / s if s else 1.0 for m, s in zip(merged.scores, self.single, strict=True))

    @property
    def task_cosine(self) -> float:
        """The mean cosine of two tasks' vectors at the end."""
        return fmean(pairs(self.trace.rounds[-1].task_cosines))

    @property
    def update_cosine(self) -> float:
        """The mean cosine of two tasks' updates in a round, over all rounds."""
        return fmean(value for each in self.trace.rounds for value in pairs(each.update_cosines))


@dataclass(frozen=True)
class MultitaskResults:
    """The results of a run, for each number of rounds.

    Args:
        tasks (`tuple` of `str`):
            Their names.
        base (`tuple` of `float`):
            The score of θ_0 on each task.
        outcomes (`tuple` of `RoundsOutcome`):
            From the fewest rounds to the most.
    """

    tasks: tuple[str, ...]
    base: tuple[float, ...]
    outcomes: tuple[RoundsOutcome, ...]

    def save(self, output: Path) -> None:
        """Write `results.json` and `report.md` into a folder."""
        for name, text in (("results.json", self.to_json()), (REPORT_MARKDOWN, self.to_markdown())):
            atomic.write_text(output / name, text)

    def to_json(self) -> str:
        """The results as JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def table(self) -> str:
        """One row for each number of rounds and rule."""
        head = ["rounds N", "merged by", "λ", "single", "merged", "gap", "relative", "cos τ", "cos δ"]
        rows = []
        for outcome in self.outcomes:
            for merged in outcome.merged:
                rows.append(
                    [
                        f"{outcome.rounds}",
                        merged.rule,
                        f"{merged.scale:.3g}",
                        f"{fmean(outcome.single):.3f}",
                        f"{fmean(merged.scores):.3f}",
                        f"{outcome.gap(merged):+.3f}".replace("-", "−"),
                        f"{100 * outcome.relative(merged):.1f} %",
                        f"{outcome.task_cosine:.2f}".replace("-", "−"),
                        f"{outcome.update_cosine:.2f}".replace("-", "−"),
                    ]
                )
        return _table(head, rows)

    def by_task(self) -> str:
        """One row for each task: the base, and for each N the single model and the one merged by the first rule."""
        head = ["task", "θ_0"]
        for outcome in self.outcomes:
            head += [f"single, N = {outcome.rounds}", f"{outcome.merged[0].rule}, N = {outcome.rounds}"]
        rows = []
        for number, task in enumerate(self.tasks):
            row = [task, f"{self.base[number]:.3f}"]
            for outcome in self.outcomes:
                row += [f"{outcome.single[number]:.3f}", f"{outcome.merged[0].scores[number]:.3f}"]
            rows.append(row)
        return _table(head, rows)

    def cosine_matrices(self) -> str:
        """cos(τ_i, τ_j) at the end, for each N."""
        parts = []
        for outcome in self.outcomes:
            rows = [
                [task, *(f"{value:.2f}".replace("-", "−") for value in row)]
                for task, row in zip(self.tasks, outcome.trace.rounds[-1].task_cosines, strict=True)
            ]
            parts.append(f"N = {outcome.rounds}\n\n" + _table(["", *self.tasks], rows))
        return "\n\n".join(parts)

    def to_markdown(self) -> str:
        """The report: all tables, and the plots that lie beside it."""
        first = self.outcomes[0]
        steps = first.rounds * first.steps_per_round
        return (
            "\n\n".join(
                [
                    f"# {len(self.tasks)} tasks, one model",
                    f"Each task was fine-tuned for {steps} steps in N rounds; a round starts from the merged model of "
                    "the last. Scores are the share of next tokens predicted on held-out text of the task's book: "
                    "`single` is the task's own model, `merged` one model for all. θ_0 has "
                    f"{fmean(self.base):.3f}. The gap is single − merged; cos τ is the mean cosine of the task vectors "
                    "(from θ_0) at the end, cos δ that of the updates within a round.",
                    self.table(),
                    "## Each task",
                    self.by_task(),
                    "## Cosines of the task vectors",
                    self.cosine_matrices(),
                    "![gap](gap.png) ![cosines](cosines.png) ![rounds](rounds.png) ![tasks](tasks.png)",
                ]
            )
            + "\n"
        )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = [[markdown_cell(cell) for cell in line] for line in (head, *rows)]
    lines = [shown[0], ["---"] * len(head), *shown[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
