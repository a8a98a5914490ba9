"""`forget`: a model that knows a book -> the same model without it, with a verdict, attacks and files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec._version import __version__
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.auditing.audit_parts import AttackGroup
from hf_taskvec.auditing.audit_run import audit, checked_attacks
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.reporting.plots import ensure_matplotlib
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.sweeping import sweep
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.books import all_kept
from hf_taskvec.files.output_folder import remove_output
from hf_taskvec.files.results_folder import OUTPUTS, open_results_folder
from hf_taskvec.forgetting.edit_kinds import DEFAULT_KINDS, EditKind, ForgetCase, check_kinds
from hf_taskvec.forgetting.edit_search import EditSearch, check_rounds, search_edits
from hf_taskvec.forgetting.forget_inputs import (
    BookLike,
    PackedTexts,
    checked_books,
    default_repairing,
    default_training,
    model_fingerprints,
    never_seen_model,
)
from hf_taskvec.forgetting.forgotten import (
    SCHEMA,
    VERSION,
    EditCost,
    ForgetRecord,
    Forgotten,
    outcome_of,
    write_forgotten,
)
from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer
from hf_taskvec.progress import progress_line
from hf_taskvec.training.run_record import Finetuned
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.trained_model import open_base
from hf_taskvec.training.training_stages import TrainingStages

if TYPE_CHECKING:
    import datasets

#: what is made if nobody says so
DEFAULT_ATTACKS: tuple[AttackGroup, ...] = ("relearn",)

_BLOCK = 256


def forget(
    model: str | Path,
    book: BookLike | Sequence[BookLike],
    keep: BookLike | Sequence[BookLike],
    output: str | Path,
    *,
    base: str | Path | None = None,
    vector: TaskVector | None = None,
    keep_vectors: Mapping[str, TaskVector] | None = None,
    reference: str | Path | None = None,
    edits: Sequence[EditKind] = DEFAULT_KINDS,
    rounds: int = 3,
    training: TrainingSettings | None = None,
    repairing: TrainingSettings | None = None,
    block_length: int | None = None,
    block_stride: int | None = None,
    protocol: "str | protocols.Protocol | None" = None,
    criteria: Criteria | None = None,
    attacks: Sequence[AttackGroup] = DEFAULT_ATTACKS,
    write_anyway: bool = False,
    tokenizer: Any = None,
    batch_size: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Forgotten:
    """Take a book out of a model, keep others, and tell how far that was reached.

    The book's task vector is negated (the vector is made, unless it is given). Where the plain negation does not pass
    the verdict, which is usual, it is made so strong that the book's text is beyond guessing, and the model is then
    repaired by a short fine-tune on the text to keep; edit and repair are one task vector. The next try is stronger,
    weaker or repaired for longer, as the last one's verdict says.

    The first edit that meets the criteria on one half of the passages is taken, and judged on the other half. Then it
    is attacked, beside the untouched model and one that never saw the book. Model, vector, adapter and reports are
    written; where no edit was found, or the other half speaks against it, no model is (unless `write_anyway`), and the
    sentence tells what came nearest, what it costs and what to try.

    A call that was interrupted goes on where it was when it is made again with the same arguments. Under
    `accelerate launch` every process calls this with the same arguments.

    Args:
        model (`str` or `Path`):
            The model that knows the book: a folder or a Hub id.
        book (`Book`, `str` or `Path`, or a sequence of them):
            What to forget: books, or text files (see `load_book`). A book's held-out part must not have been trained
            on; of a text file nothing is held out.
        keep (`Book`, `str` or `Path`, or a sequence of them):
            What to keep. All of them are to be kept, whatever their roles say.
        output (`str` or `Path`):
            The folder to write.
        base (`str` or `Path`, *optional*):
            A model that never saw the book: what `model` was fine-tuned from. The vector is made from it. It may be
            left out if `vector` and `reference` are given; if it is `model` itself, the vector is that of further
            training, as in MUSE, and a `reference` is needed.
        vector (`TaskVector`, *optional*):
            The task vector of the book, if there is one already.
        keep_vectors (`Mapping[str, TaskVector]`, *optional*):
            Task vectors of books to keep, by name. What the book's vector shares with them is left alone.
        reference (`str` or `Path`, *optional*):
            A better model of never having seen the book than the base: one retrained without it.
        edits (`Sequence[str]`, *optional*, defaults to `("negate", "repair")`):
            What to try, the cheapest first: `"negate"`, `"project"` (needs `keep_vectors`), `"learned"`, `"repair"`.
        rounds (`int`, *optional*, defaults to 3):
            How many repairs are trained at most. What is adjusted after one needs no training, and does not count.
        training (`TrainingSettings`, *optional*):
            How the vector is trained, full or LoRA: five epochs without it.
        repairing (`TrainingSettings`, *optional*):
            How the model is repaired; as `training`, with half of its epochs and half of its batch, without it.
        block_length (`int`, *optional*):
            Tokens in a block of text; 256, or what the model reads if that is less, without it.
        block_stride (`int`, *optional*):
            Tokens from one block's start to the next; `block_length` without it. A smaller one gives overlapping
            blocks, from which short texts are learnt better.
        protocol (`str` or `Protocol`, *optional*):
            How the models are asked, as for `sweep`.
        criteria (`Criteria`, *optional*):
            What forgotten and kept mean.
        attacks (`Sequence[str]`, *optional*, defaults to `("relearn",)`):
            As for `audit`; none if it is empty.
        write_anyway (`bool`, *optional*, defaults to `False`):
            Write the model of the nearest edit where none was found.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of the model; its own without it.
        batch_size (`int`, *optional*):
            Passages in one batch; found automatically without it.
        seed (`int`, *optional*, defaults to 0):
            Of the intervals, the halves and the attacks. Training has its own.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace the results of other arguments in the output folder.
        progress (`bool`, *optional*):
            Show progress bars and lines; by default on a terminal only.

    Returns:
        `Forgotten`: The edit, what it reached, and where everything is.

    Raises:
        `BadValueError`: If there is no text to keep, a book is to be kept and forgotten, the model does not know the
            book, or an argument makes no sense.
        `MismatchError`: If a vector, the base or the reference does not fit the model.
        `MissingNameError`: If there is no such kind of edit or attack.
        `OutputError`: If the output folder holds something else, or results of other arguments.

    Example:
        >>> from hf_taskvec import forget
        >>> done = forget("me/books-model", "hp1.txt", ["hp2.txt", "pp.txt"], "out", base="me/base")  # doctest: +SKIP
        >>> done.outcome, done.model  # doctest: +SKIP
        ('forgotten', PosixPath('out/model'))
        >>> print(done.sentence)  # doctest: +SKIP

    """
    kept_vectors = dict(keep_vectors or {})
    kinds = check_kinds(edits, kept_vectors)
    check_rounds(rounds)
    wanted = checked_attacks(attacks)
    books = checked_books(book, keep)
    source, names = open_base(model), {"model": model, "base": base, "reference": reference}
    prints = model_fingerprints(source, names)
    never = never_seen_model(vector, base, reference, prints)
    tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    given = ({} if vector is None else {"forget": vector}) | kept_vectors
    for each in given.values():
        check_fits(each, source.weights)
    tuning = training or default_training(seed)
    mending = repairing or default_repairing(tuning)
    length = min(_BLOCK, source.context or _BLOCK) if block_length is None else block_length
    texts = PackedTexts(tokenizer, length, block_stride)
    forgotten = [each for each in books if each.role == "forget"]
    kept = [each for each in books if each.role != "forget"]
    forget_blocks, keep_blocks = texts.blocks(forgotten), texts.blocks(kept)  # too short a text is refused here
    asked = protocols.get(protocol)
    meant = criteria or Criteria()
    if meant.rule != "relative":
        raise BadValueError("forget goes by relative forgetting: give Criteria(rule='relative'), or sweep by margin.")
    settings = {
        "models": prints,
        "books": {f"{each.name} ({each.role})": each.fingerprint for each in books},
        "vectors": {n: v.fingerprint for n, v in given.items()},
        "edits": list(kinds),
        "rounds": rounds,
        "training": asdict(tuning),
        "repairing": asdict(mending),
        "block_length": length,
        "block_stride": block_stride,
        "protocol": asked.to_dict(),
        "criteria": asdict(meant),
        "attacks": wanted,
        "write_anyway": write_anyway,
        "seed": seed,
    }
    ensure_matplotlib()  # before hours of work
    folder = open_results_folder(output, settings, overwrite, "overwrite=True")
    live, seen_by_none = (
        load_for_evaluation(model),
        {"base" if never == base else "reference": load_for_evaluation(never)},
    )
    asking = partial(
        sweep,
        live,
        books=all_kept(books),
        protocol=asked,
        tokenizer=tokenizer,
        reference=seen_by_none,
        store=folder / "store",
        batch_size=batch_size,
        criteria=meant,
        seed=seed,
        progress=progress,
    )
    progress_line("what the model knows of the books", progress)
    _check_known(asking(None, [0.0]), seen_by_none)

    stages = TrainingStages(
        folder / "stages", tokenizer=tokenizer, tell=lambda line: progress_line(line, progress), progress=progress
    )
    made = _Made()
    if vector is None:
        assert base is not None
        vector, made = _make_vector(stages, base, forget_blocks, tuning)
    (teacher,) = seen_by_none.values()
    case = ForgetCase(
        address=model,
        model=live,
        vector=vector,
        keep_vectors=kept_vectors,
        forget_blocks=forget_blocks,
        keep_blocks=keep_blocks,
        reference=teacher,
        criteria=meant,
        repairing=mending,
        repairs=folder / "stages",
        tokenizer=tokenizer,
        progress=progress,
    )
    search = search_edits(case, kinds, lambda tried: asking(tried, None), rounds=rounds)
    processes().together(lambda: search.report.save(folder), main_only=True)
    audited = None
    written = _save(search, model, folder, write_anyway)
    judged = search.judged
    assert judged is not None
    if wanted:
        from hf_taskvec.auditing.attacks.relearning import Relearning

        budget = Relearning(
            learning_rate=tuning.learning_rate, batch_size=tuning.batch_size, block_length=length, seed=seed
        )
        audited = audit(
            live,
            judged.vector,
            books,
            asked,
            reference=teacher,
            attacks=wanted,
            tokenizer=tokenizer,
            criteria=meant,
            relearning=budget,
            output=folder,
            store=folder / "store",
            batch_size=batch_size,
            seed=seed,
            progress=progress,
        )
    assert search.report.choice is not None
    record = ForgetRecord(
        schema=SCHEMA,
        version=VERSION,
        library=f"hf_taskvec {__version__}",
        outcome=outcome_of(search.report.choice),
        sentence=_sentence(search, written, audited),
        edit=judged.name,
        written=written,
        vector_tokens=made.tokens,
        vector_seconds=made.seconds,
        tried=tuple(EditCost.of(each) for each in search.tried),
    )
    processes().together(lambda: write_forgotten(folder, record), main_only=True)
    processes().wait_for_everyone()
    return Forgotten.load(folder)


# The vector.


@dataclass(frozen=True)
class _Made:
    """What making the vector took."""

    tokens: int = 0
    seconds: float = 0.0


def _check_known(report: UnlearningReport, references: Mapping[str, Any]) -> None:
    """Refuse a book that the model hardly knows better than a model that never saw it."""
    verdict = None if report.choice is None else report.choice.verdict
    if verdict is None or all(metric.outcome == "untestable" for metric in verdict.metrics):
        (name,) = references
        raise BadValueError(
            f"the model does not clearly know the book better than the {name}, by no metric: there is nothing to "
            "forget, or there are too few passages to tell."
        )


def _make_vector(
    stages: TrainingStages, base: str | Path, blocks: "datasets.Dataset", settings: TrainingSettings
) -> tuple[TaskVector, _Made]:
    folder = stages.train("forget", base, blocks, settings)
    tuned = Finetuned.load(folder)
    if settings.method == "lora":
        vector = TaskVector.from_adapter(folder, base=base, name="forget")
    else:
        vector = TaskVector.from_finetuned(base, folder, name="forget")
    tokens = settings.epochs * sum(map(len, blocks["input_ids"]))
    return vector, _Made(tokens, round(tokens / max(tuned.tokens_per_second, 0.1), 1))


# What is left behind.


def _save(search: EditSearch, model: str | Path, folder: Path, write_anyway: bool) -> bool:
    """Write the judged edit as a vector and, if it was chosen and not contradicted, the model and the adapter."""
    assert search.judged is not None and search.report.choice is not None
    vector = search.judged.vector
    outcome = outcome_of(search.report.choice)
    wanted = write_anyway or outcome in ("forgotten", "perhaps")
    group = processes()
    group.together(lambda: vector.save(folder / "vector", overwrite=True, progress=False), main_only=True)
    kept = {"vector"}
    if wanted:
        vector.apply(model, folder / "model", overwrite=True)
        kept.add("model")
        if is_adapter(vector):
            group.together(lambda: vector.to_adapter(folder / "adapter", base=model, overwrite=True), main_only=True)
            kept.add("adapter")

    def tidy() -> None:  # what an earlier run chose would not belong to this report
        for name in set(OUTPUTS) - kept:
            remove_output(folder / name, OUTPUTS[name])

    group.together(tidy, main_only=True)
    return wanted


def is_adapter(vector: TaskVector) -> bool:
    """Whether a vector can be written as one LoRA adapter: low-rank changes of matrices and nothing else."""
    return vector.is_low_rank and all(len(vector.shape(name)) == 2 for name in vector)


def _sentence(search: EditSearch, written: bool, audited: Any) -> str:
    """What was reached, and what came of it."""
    choice = search.report.choice
    assert choice is not None and search.judged is not None
    outcome = outcome_of(choice)
    parts = [choice.reason]
    if outcome == "contradicted":
        parts.append(
            "The half that did not choose it speaks against it: ask more passages, or try other kinds of edits"
        )
    if not written:
        parts.append("No model was written (write_anyway=True writes the nearest)")
    if audited is not None:
        parts.append(f"Under attack: {audited.sentence}")
    return ". ".join(part.rstrip(".") for part in parts) + "."
