"""What `forget` leaves behind: the chosen edit, what it reached, and what it took."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.atomic import write_text
from hf_taskvec.auditing.audit_report import AuditReport
from hf_taskvec.errors import CorruptFileError
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.scale_choice import Choice
from hf_taskvec.filenames import AUDIT_JSON, FORGOTTEN_RECORD
from hf_taskvec.files.results_folder import OUTPUTS
from hf_taskvec.forgetting.edit_kinds import EditKind, TriedEdit
from hf_taskvec.json_files import read_json
from hf_taskvec.typed_values import typed

ForgetOutcome = Literal["forgotten", "perhaps", "contradicted", "not_reached"]
SCHEMA, VERSION = "hf_taskvec/forgotten", 1


@dataclass(frozen=True)
class EditCost:
    """An edit that was tried, and what it took beyond the vectors; one that was adjusted, what its repair took.

    Args:
        name (`str`):
            What the report calls it.
        kind (`str`):
            Of what kind it is.
        expression (`str`):
            What it is made of.
        steps (`int`):
            Steps of an optimiser.
        tokens (`int`):
            Tokens that were trained on.
        seconds (`float`):
            How long that takes.
    """

    name: str
    kind: EditKind
    expression: str
    steps: int
    tokens: int
    seconds: float

    @classmethod
    def of(cls, edit: TriedEdit) -> "EditCost":
        """The same without its tensors."""
        return cls(edit.name, edit.kind, str(edit.vector.expression), edit.steps, edit.tokens, round(edit.seconds, 1))


@dataclass(frozen=True)
class ForgetRecord:
    """The content of `forgotten.json`.

    Args:
        schema (`str`), version (`int`):
            Of the file.
        library (`str`):
            What wrote it.
        outcome (`str`):
            As in `Forgotten`.
        sentence (`str`):
            The same in words.
        edit (`str`):
            The name of the edit that the verdict is on: the chosen one, or the nearest.
        written (`bool`):
            Whether a model of it was written.
        vector_tokens (`int`):
            Tokens that were trained on to make the vectors that were not given.
        vector_seconds (`float`):
            How long that takes.
        tried (`tuple` of `EditCost`):
            All edits, in the order in which they were tried.
    """

    schema: str
    version: int
    library: str
    outcome: ForgetOutcome
    sentence: str
    edit: str
    written: bool
    vector_tokens: int
    vector_seconds: float
    tried: tuple[EditCost, ...]


@dataclass(frozen=True)
class Forgotten:
    """A book taken out of a model, or what came nearest to it.

    Args:
        folder (`Path`):
            All of it.
        outcome (`str`):
            `"forgotten"`: an edit was chosen on one half of the passages, and the whole intervals of the other say that
            the book is as if never seen and the others are kept. `"perhaps"`: the other half agrees in its means, but
            is too small to be sure. `"contradicted"`: it does not. `"not_reached"`: no edit qualified.
        sentence (`str`):
            What was reached, what it costs, and what to try next.
        edit (`str`):
            The name of the edit that this is about: the chosen one, or the nearest.
        vector (`TaskVector`):
            The whole edit as a task vector.
        report (`UnlearningReport`):
            What every edit that was tried does to each book.
        audit (`AuditReport`, *optional*):
            Whether it holds under attack, if that was asked.
        model (`Path`, *optional*):
            The edited model, if it was written.
        adapter (`Path`, *optional*):
            The edit as a PEFT adapter of the model, if it is low-rank and the model was written.
        record (`ForgetRecord`):
            What all of it took.
    """

    folder: Path
    outcome: ForgetOutcome
    sentence: str
    edit: str
    vector: TaskVector
    report: UnlearningReport
    audit: AuditReport | None
    model: Path | None
    adapter: Path | None
    record: ForgetRecord

    @property
    def passed(self) -> bool:
        """Whether the book is surely forgotten, the others are kept, and no attack surely brings it back."""
        return self.outcome == "forgotten" and (self.audit is None or not self.audit.came_back)

    @classmethod
    def load(cls, folder: str | Path) -> "Forgotten":
        """What `forget` wrote to a folder; of the tensors nothing is read yet.

        Args:
            folder (`str` or `Path`):
                The output of `forget`.

        Returns:
            `Forgotten`: Its content.

        Raises:
            `MissingFileError`: If the folder holds no such record, or a part of it is missing.
            `CorruptFileError`: If a part of it is damaged.
        """
        folder = Path(folder)
        record = read_forget_record(folder)
        paths = {name: folder / name if (folder / name / mark).exists() else None for name, mark in OUTPUTS.items()}
        return cls(
            folder=folder,
            outcome=record.outcome,
            sentence=record.sentence,
            edit=record.edit,
            vector=TaskVector.load(folder / "vector"),
            report=UnlearningReport.load(folder),
            audit=AuditReport.load(folder) if (folder / AUDIT_JSON).exists() else None,
            model=paths["model"],
            adapter=paths["adapter"],
            record=record,
        )


def outcome_of(choice: Choice) -> ForgetOutcome:
    """What the two halves of the passages say together."""
    if choice.scale is None or choice.verdict is None:
        return "not_reached"
    verdict = choice.verdict
    if verdict.outcome in ("still_known", "over_forgotten") or verdict.kept == "lost":
        return "contradicted"
    return "forgotten" if verdict.passed else "perhaps"


def read_forget_record(folder: Path) -> ForgetRecord:
    """The record in a folder that `forget` wrote."""
    try:
        record: ForgetRecord = typed(ForgetRecord, read_json(folder / FORGOTTEN_RECORD))
    except CorruptFileError as error:
        raise CorruptFileError(f"{FORGOTTEN_RECORD} in {folder.name} is damaged: {error} Forget again.") from None
    if (record.schema, record.version) != (SCHEMA, VERSION):
        raise CorruptFileError(
            f"{FORGOTTEN_RECORD} in {folder.name} is {record.schema[:60]!r} version {record.version}; this hf_taskvec "
            f"reads {SCHEMA!r} version {VERSION}."
        )
    return record


def write_forgotten(folder: Path, record: ForgetRecord) -> None:
    """Write `forgotten.json`."""
    text = json.dumps(asdict(record), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / FORGOTTEN_RECORD, text + "\n")
