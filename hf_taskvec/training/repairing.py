"""`repair`: an edited model trained a little on text that is to be kept; edit and repair as one task vector."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec._version import __version__
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.distributed import make_accelerator, processes
from hf_taskvec.errors import BadValueError, OutputError
from hf_taskvec.filenames import (
    MODEL_RECORD,
    REPAIR_RECORD,
    REPAIR_STARTED,
    REPAIR_VECTOR,
    REPAIRED_MODEL,
    REPAIRED_VECTOR,
    VECTOR_RECORD,
)
from hf_taskvec.files.output_folder import check_replaceable, new_folder, unfinished
from hf_taskvec.files.own_folder import clear
from hf_taskvec.json_files import json_digest
from hf_taskvec.models.trained_books import RECORDED, marked_books
from hf_taskvec.training.accelerators import check_accelerator, resolve_precision
from hf_taskvec.training.finetuning import finetune
from hf_taskvec.training.repair_record import Repaired, is_repair_of, write_repair
from hf_taskvec.training.run_record import Finetuned
from hf_taskvec.training.settings import SETTINGS_VERSION, TrainingSettings
from hf_taskvec.training.teachers import Guard, OpenedTeachers, Teacher, open_teachers
from hf_taskvec.training.token_blocks import TokenBlocks, read_blocks
from hf_taskvec.training.trained_model import TrainingBase, made_by, open_base

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

_LABEL = "repair"  # of the repair in expressions
# What is in the unfinished folder only: the edited model, and what was trained from it.
_EDITED, _TRAINED = "edited", "trained"


def repair(
    base: str | Path,
    edit: TaskVector,
    blocks: "datasets.Dataset",
    settings: TrainingSettings,
    output: str | Path,
    *,
    teacher: "str | Path | PreTrainedModel | Teacher | None" = None,
    guard: Guard | None = None,
    tokenizer: Any = None,
    checkpoint_every: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Repaired:
    """Apply an edit to a model, train the result on text that is to be kept, and give the whole as one task vector.

    An edit such as `-1.2 * τ` also harms what it was not meant for; a short fine-tune on kept text brings that back.
    `Repaired.vector` is edit and repair in one expression, `-1.2*forget + repair`, which can be pushed, negated and
    exported like any other, and which gives the repaired model bit for bit when it is applied to the base.

    - *Full* (`settings.method`): the vector is the exact difference between the trained weights, fp32, and the base.
      The model is stored in the base's dtypes; `vector.apply(base, output, dtype="float32")` gives what was trained.
    - *LoRA*: the vector is the edit plus the adapter's factors, and the model is what that sum gives, rounded once. A
      low-rank edit and its repair stay factors throughout, so `vector.to_adapter()` writes one PEFT adapter for both.
      Of a dense edit the edit stays dense; the repair alone is low-rank, and can be exported by itself.

    The folder appears under its name when it is complete. An interrupted repair continues when it is called again with
    the same arguments, and a finished one is not repeated: its result is returned. Every process of an
    `accelerate launch` must call this, and the steps are the same for any number of them, up to the order of summation.

    Args:
        base (`str` or `Path`):
            The model that is edited: a folder or a Hub id.
        edit (`TaskVector`):
            The edit, with its scale.
        blocks (`datasets.Dataset`):
            Packed blocks of the text that is to be kept, as `Book.training_blocks` gives them.
        settings (`TrainingSettings`):
            Of the fine-tune, full or LoRA.
        output (`str` or `Path`):
            The folder to write, on a disk that all processes see.
        teacher (`str`, `Path`, `PreTrainedModel` or `Teacher`, *optional*):
            Learn this model's next-token distribution on the kept text, by KL divergence, instead of the text's own
            tokens; usually the model before the edit. A `Teacher` mixes both.
        guard (`Guard`, *optional*):
            The text that was edited away, and a model that never saw it: the repaired model shall predict it like that
            one. So repairing does not bring the text back, and the edit does not overshoot.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Saved beside the model; by default the base's own files are copied.
        checkpoint_every (`int`, *optional*):
            Steps between checkpoints, as for `finetune`.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an earlier output, and an unfinished one of other arguments.
        progress (`bool`, *optional*):
            Show progress bars; by default on a terminal only.

    Returns:
        `Repaired`: The whole vector, the repair alone, the model, and the numbers of the training.

    Raises:
        `OutputError`: If the folder holds something else, or an output or an unfinished repair of other arguments.
        `MismatchError`: If the edit does not fit the base, the blocks do not, or a teacher has another vocabulary.
        `BadValueError`: If there is no text to keep, or `edit` is no task vector.
        `DivergedError`: If a loss or a gradient is not a finite number.
        `UnsupportedError`: If the base is not a causal language model, or the training does not fit into memory.

    Example:
        >>> from hf_taskvec.training import Guard, TrainingSettings, repair
        >>> repaired = repair(
        ...     "books", -1.2 * forget, kept_blocks, TrainingSettings(epochs=1), "out",
        ...     teacher="books", guard=Guard(forget_blocks, "never-seen"),
        ... )  # doctest: +SKIP
        >>> repaired.vector.expression  # doctest: +SKIP
        '-1.2*forget + repair'

    """
    if not isinstance(edit, TaskVector):
        raise BadValueError(f"edit must be a TaskVector, with its scale (-1.2 * vector), not a {type(edit).__name__}.")
    if not isinstance(base, str | Path):
        raise BadValueError(f"the base must be a folder or a Hub id, not a {type(base).__name__}.")
    final = Path(output).resolve()
    check_replaceable(final, REPAIR_RECORD, overwrite=True)
    accelerator = make_accelerator()
    check_accelerator(accelerator)
    group = processes()
    source = open_base(base)
    check_fits(edit, source.weights, may_grow=True)
    data = read_blocks(blocks, _vocabulary(edit, source), source.context)
    objective = open_teachers(teacher, guard, source)
    work = _Work(
        base, edit, source, data, settings, objective, marked_books(blocks.info.description), unfinished(final)
    )
    key = work.key(resolve_precision(settings, accelerator))

    def agreed(question: Callable[[], bool]) -> bool:
        """What the main process finds: the others may see the disk a little later."""
        return any(group.gather(group.together(question, main_only=True)))

    if agreed(lambda: not overwrite and is_repair_of(final / REPAIR_RECORD, key)):
        return Repaired.load(final)
    with ExitStack() as folders:

        def begin() -> None:
            folders.enter_context(new_folder(output, REPAIR_RECORD, overwrite, resume=True))
            _continue_or_refuse(work.folder, key, overwrite)

        group.together(begin, main_only=True)
        if not agreed(lambda: is_repair_of(work.folder / REPAIR_RECORD, key)):
            edited, model = work.folder / _EDITED, work.folder / REPAIRED_MODEL
            if not agreed((edited / MODEL_RECORD).exists):
                edit.apply(base, edited, progress=progress)
            tuned = finetune(
                edited,
                blocks,
                settings,
                work.folder / _TRAINED,
                checkpoint_every=checkpoint_every,
                progress=progress,
                accelerator=accelerator,
                teacher=teacher,
                guard=guard,
            )
            group.together(lambda: work.save_vectors(tuned), main_only=True)
            vector = TaskVector.load(work.folder / REPAIRED_VECTOR)
            if not agreed((model / MODEL_RECORD).exists):
                vector.apply(base, model, progress=progress)

            def record() -> None:
                if tokenizer is not None:
                    tokenizer.save_pretrained(model)
                write_repair(work.folder / REPAIR_RECORD, work.record(key, vector, tuned))

            group.together(record, main_only=True)

        def finish() -> None:
            # Only now: until the record is there, a run that is killed needs what was trained.
            clear(work.folder, {REPAIR_RECORD, REPAIRED_MODEL, REPAIRED_VECTOR, REPAIR_VECTOR})
            folders.close()

        group.together(finish, main_only=True)
    return Repaired.load(final)


@dataclass(frozen=True)
class _Work:
    """A repair that is under way: what it is made from, and the folder in which it grows."""

    base: str | Path
    edit: TaskVector
    source: TrainingBase
    blocks: TokenBlocks
    settings: TrainingSettings
    objective: OpenedTeachers
    books: list[str]
    folder: Path

    def key(self, precision: str) -> str:
        """What decides the result: never a path or a number of processes."""
        made_of = (self.source.weights.full_digest, self.edit.fingerprint, self.blocks.digest)
        return json_digest(SETTINGS_VERSION, *made_of, asdict(self.settings), precision, self.objective.key)

    def save_vectors(self, tuned: Finetuned) -> None:
        """The repair and the whole, with all that they read: what was trained does not stay."""
        repair, whole = self._vectors(tuned)
        for vector, name in ((repair, REPAIR_VECTOR), (whole, REPAIRED_VECTOR)):
            if not (self.folder / name / VECTOR_RECORD).exists():
                vector.save(self.folder / name, progress=False)

    def _vectors(self, tuned: Finetuned) -> tuple[TaskVector, TaskVector]:
        edited = self.folder / _EDITED
        if self.settings.method == "lora":
            repair = self._labelled(TaskVector.from_adapter(tuned.folder, base=edited, name=_LABEL), "LoRA")
            return repair, self.edit + repair
        repair = self._labelled(TaskVector.from_finetuned(edited, tuned.folder, name=_LABEL), "full")
        # The edited checkpoint was rounded when it was written, so `edit + repair` would be off by that. What changed
        # in all has no such rounding in it, and is the same expression.
        whole = TaskVector.from_finetuned(self.base, tuned.folder, name=_LABEL, vocabulary="extend")
        terms = {name: change.terms for name, change in whole.items()}
        return repair, TaskVector(terms, self.edit.provenance.plus(repair.provenance))

    def _labelled(self, repair: TaskVector, kind: str) -> TaskVector:
        """The repair, its provenance telling what was trained: the edited model."""
        return made_by(repair, f"{kind} fine-tune on kept text, after {self.edit.expression}")

    def record(self, key: str, vector: TaskVector, tuned: Finetuned) -> dict[str, Any]:
        """How it was made, without a path of this machine."""
        tokens = self.settings.epochs * self.blocks.ids.numel()
        return {
            "library": f"hf_taskvec {__version__}",
            "key": key,
            "expression": vector.expression,
            "base": self.source.record.to_json(),
            "vector": vector.provenance.to_json(),
            "settings": asdict(self.settings),
            "objective": self.objective.to_json(),
            "blocks": {"count": len(self.blocks), "length": self.blocks.length, "sha256": self.blocks.digest},
            RECORDED: self.books,
            "steps": tuned.steps,
            "tokens": tokens,
            "seconds": round(tokens / max(tuned.tokens_per_second, 0.1), 3),
            "epoch_losses": tuned.epoch_losses,
            "peak_bytes": tuned.peak_bytes,
        }


def _vocabulary(edit: TaskVector, base: TrainingBase) -> int:
    """How many tokens the edited model knows: an edit may add some."""
    rows = (edit.shape(name)[0] for name in edit if base.weights.layout.is_vocabulary(name))
    return max([base.vocabulary, *rows])


def _continue_or_refuse(folder: Path, key: str, overwrite: bool) -> None:
    """Keep what an interrupted repair left; what other arguments left is refused or, if so asked, thrown away."""
    started = folder / REPAIR_STARTED
    if is_repair_of(started, key):
        return
    if started.exists() and not overwrite:
        raise OutputError(
            f"{folder.name} holds an unfinished repair of another base or edit, other blocks, settings or teachers. "
            "Use the same to continue it, pass overwrite=True to discard it, or choose another folder."
        )
    clear(folder)
    write_repair(started, {"key": key})
