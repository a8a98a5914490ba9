"""What the transfer experiment reports: correlations, λ and losses of each new book."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_taskvec import atomic
from hf_taskvec.escaping import markdown_cell
from hf_taskvec.evaluation.reporting.number_formats import format_interval, format_number
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.filenames import REPORT_MARKDOWN

#: the title of the combination that is recommended
THEORY = "Theorem 3"


@dataclass(frozen=True)
class Correlations:
    """What a new book has in common with the others, and what Theorem 3 makes of it.

    Args:
        form (`str`):
            `"literal"`, eq. (11) on logits, or `"relative"`, on what fine-tuning changed.
        stand_in (`str`):
            What stands for the new book's fine-tune.
        gammas (`dict`):
            γ̂ with each other book, as measured.
        share (`float`):
            How much the stand-in shows of a fine-tune: what γ̂ is divided by.
        between (`dict`):
            α̂ between each two of the others.
        why (`str`):
            The verdict, and the reason.
    """

    form: str
    stand_in: str
    gammas: dict[str, float]
    share: float
    between: dict[str, float]
    why: str

    @property
    def corrected(self) -> dict[str, float]:
        """γ̂ as Theorem 3 is given it: divided by the share, and within [−1, 1]."""
        return {name: max(-1.0, min(1.0, gamma / self.share)) for name, gamma in self.gammas.items()}


@dataclass(frozen=True)
class Compared:
    """A model on the new book's held-out text.

    Args:
        title (`str`):
            What it is.
        scales (`dict`):
            λ of each vector in it.
        loss (`Interval`):
            Of the next token, in nats, with a bootstrap interval over rows.
        gain (`Interval`):
            How much less that is than θ_0's, paired.
        over_single (`Interval`):
            How much less it is than that of the best single vector, paired.
    """

    title: str
    scales: dict[str, float]
    loss: Interval
    gain: Interval
    over_single: Interval


@dataclass(frozen=True)
class NewBook:
    """All about one new book.

    Args:
        name (`str`):
            Its name.
        best_single (`str`):
            The book whose vector alone does most for a sample of the new one.
        correlations (`tuple` of `Correlations`):
            In all forms.
        compared (`tuple` of `Compared`):
            The models.
    """

    name: str
    best_single: str
    correlations: tuple[Correlations, ...]
    compared: tuple[Compared, ...]

    def find(self, title: str) -> Compared | None:
        """One of the models, by its title."""
        return next((each for each in self.compared if each.title == title), None)

    @property
    def sentence(self) -> str:
        """What came of it, in words."""
        found = self.find(THEORY)
        if found is None:
            return f"{self.name}: Theorem 3 gives no λ ({self.correlations[0].why.partition('. ')[0]})."
        told = [f"{_changed(found.gain)} θ_0", f"{_changed(found.over_single)} the vector of {self.best_single} alone"]
        return f"{self.name}: the λ of Theorem 3 {' and '.join(told)}."


def _changed(gain: Interval) -> str:
    words = format_interval(gain, 3)
    if gain.low > 0:
        return f"lower the loss by {words} nats against"
    return f"raise the loss ({words}) against" if gain.high < 0 else f"make no sure difference ({words}) to"


@dataclass(frozen=True)
class TransferResults:
    """The results of a run.

    Args:
        books (`tuple` of `NewBook`):
            Each new book.
    """

    books: tuple[NewBook, ...]

    def save(self, output: Path) -> None:
        """Write `results.json` and `report.md` into a folder."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        atomic.write_text(output / "results.json", text)
        atomic.write_text(output / REPORT_MARKDOWN, self.to_markdown())

    def table(self) -> str:
        """A line for each model of each new book."""
        head = ["new book", "model", "λ", "loss", "less than θ_0", "less than the best single vector"]
        rows = []
        for book in self.books:
            for each in book.compared:
                title = f"{each.title} *" if each.title == f"{book.best_single} alone" else each.title
                scales = ", ".join(f"{name} {format_number(scale, 2)}" for name, scale in each.scales.items())
                cells = [format_interval(found, 3) for found in (each.loss, each.gain, each.over_single)]
                rows.append([book.name, title, scales or "–", *cells])
        return _table(head, rows)

    def correlations_table(self) -> str:
        """A line for each form of γ̂ of each new book."""
        head = ["new book", "form", "from", "γ̂ with each other book", "corrected"]
        head += ["largest α̂ between them", "Theorem 3"]
        rows = []
        for book in self.books:
            for each in book.correlations:
                both = [
                    ", ".join(f"{name} {format_number(g, 2, sign=True)}" for name, g in gammas.items())
                    for gammas in (each.gammas, each.corrected)
                ]
                largest = format_number(max(each.between.values(), key=abs, default=0.0), 2, sign=True)
                rows.append([book.name, each.form, each.stand_in, *both, largest, each.why.partition(". ")[0]])
        return _table(head, rows)

    def to_markdown(self) -> str:
        """The report."""
        parts = [
            "# New books, reached by the vectors of others",
            "Each model is θ_0 + Σ λ_i τ_i, and nothing was fine-tuned on the new book, unless the line says so. Loss "
            "of the next token on its held-out text, in nats, with 95 % bootstrap intervals over rows of text; "
            "differences are paired. * is the best single vector by a sample of the book's other text.",
            self.table(),
            "## What the new book has in common with the others",
            "γ̂ is eq. (11) between each book's fine-tune and what stands for that of the new one; literal: on logits, "
            "relative: on log-probabilities less θ_0's. A gradient step shows less than a fine-tune would; corrected "
            "by what such a step shows of the known books, γ̂ gives the λ of Theorem 3.",
            self.correlations_table(),
            "\n".join(f"- {book.sentence}" for book in self.books),
        ]
        return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = [[markdown_cell(cell) for cell in line] for line in (head, *rows)]
    lines = [shown[0], ["---"] * len(head), *shown[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
