"""`taskvec forget`: a model that knows a book -> the same without it, with a verdict, attacks and files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    OverwriteOption,
    load_vector,
    named_paths,
)
from hf_taskvec.cli.command_record import record_command
from hf_taskvec.cli.criteria_options import (
    CertainOption,
    HighOption,
    LowOption,
    MembershipOption,
    MetricOption,
    RetainBoundOption,
    chosen_criteria,
)
from hf_taskvec.cli.dry_run import DryRun, copied_size, weights_size
from hf_taskvec.cli.evaluation_options import (
    OWN_BASE,
    AllSeenOption,
    BatchSizeOption,
    BlockWordsOption,
    ForgetOption,
    HeldOutOption,
    ProtocolFieldsOption,
    ProtocolOption,
    RetainOption,
    chosen_protocol,
    held_out_share,
    load_books,
    own_base,
)
from hf_taskvec.cli.option_words import in_cli_words
from hf_taskvec.cli.report_answer import attack_lines, choice_values, scores_table, verdict_lines
from hf_taskvec.cli.results import CommandResult, TextTable
from hf_taskvec.cli.training_options import (
    BlockLengthOption,
    BlockStrideOption,
    EpochsOption,
    LearningRateOption,
    MethodOption,
    RankOption,
    RepairEpochsOption,
    RepairLearningRateOption,
    TrainBatchSizeOption,
    chosen_training,
)
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.evaluation.texts.books import Book
    from hf_taskvec.forgetting.forgotten import Forgotten
    from hf_taskvec.training.settings import TrainingSettings

# What is typed for no attack at all.
_NO_ATTACK = "none"


def forget_command(
    model: ModelArgument,
    output: OutputOption,
    forget: ForgetOption,
    retain: RetainOption = None,
    aligned: Annotated[
        list[str] | None, typer.Option(metavar="BOOK", help="A related book, to keep and to attack by.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="BASE", help="Before it saw the book; `base`: the vector's own.")
    ] = None,
    vector: Annotated[str | None, typer.Option(metavar="PATH", help="The book's; trained on BASE without it.")] = None,
    keep_vector: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A kept book's vector, left alone.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Never saw the book, if that is not BASE.")
    ] = None,
    edit: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="negate and repair; or project, learned.")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="NUMBER", min=1, help="Repairs, at most.")] = 3,
    attack: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="As those of audit, or none; relearn.")
    ] = None,
    write_anyway: Annotated[bool, typer.Option("--write-anyway", help="The nearest, if nothing qualifies.")] = False,
    all_seen: AllSeenOption = False,
    held_out: HeldOutOption = None,
    method: MethodOption = None,
    epochs: EpochsOption = None,
    learning_rate: LearningRateOption = None,
    rank: RankOption = None,
    train_batch_size: TrainBatchSizeOption = None,
    block_length: BlockLengthOption = None,
    block_stride: BlockStrideOption = None,
    repair_epochs: RepairEpochsOption = None,
    repair_learning_rate: RepairLearningRateOption = None,
    metric: MetricOption = None,
    low: LowOption = None,
    high: HighOption = None,
    membership: MembershipOption = None,
    retain_bound: RetainBoundOption = None,
    certain: CertainOption = False,
    protocol: ProtocolOption = None,
    fields: ProtocolFieldsOption = None,
    block_words: BlockWordsOption = 1000,
    batch_size: BatchSizeOption = None,
    seed: Annotated[int, typer.Option(help="Of split, training, intervals, choice.")] = 0,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Take a book out of MODEL, keep others, and tell how far that was reached.

    taskvec forget me/books-model --forget hp1.txt --retain pp.txt --base me/base -o forgot

    Exit code 1 if nothing qualifies: all is told and written then but the model.
    """
    from hf_taskvec.auditing.audit_run import checked_attacks
    from hf_taskvec.evaluation.scoring.metrics import METRICS
    from hf_taskvec.forgetting.edit_kinds import DEFAULT_KINDS, check_kinds
    from hf_taskvec.forgetting.forget_inputs import checked_books
    from hf_taskvec.forgetting.forget_run import DEFAULT_ATTACKS
    from hf_taskvec.forgetting.forget_run import forget as forget_book
    from hf_taskvec.models.folder_contents import kind_of

    keep_paths = named_paths(keep_vector or ())
    kinds = check_kinds(edit or DEFAULT_KINDS, keep_paths)
    attacks = checked_attacks(_attacks(attack) if attack else DEFAULT_ATTACKS)
    criteria = chosen_criteria(
        metric, low=low, high=high, membership=membership, retain_bound=retain_bound, certain=certain
    )
    criteria.check(METRICS.values(), METRICS)  # before a model is loaded
    training, repairing = chosen_training(
        method,
        rank,
        {"epochs": repair_epochs, "learning_rate": repair_learning_rate},
        seed,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=train_batch_size,
    )
    books = load_books(
        {"forget": forget, "retain": retain, "aligned": aligned},
        held_out=held_out_share(all_seen, held_out),
        block_words=block_words,
        seed=seed,
    )
    kept = [book for book in books if book.role != "forget"]
    books = list(checked_books([book for book in books if book.role == "forget"], kept))
    settings = chosen_protocol(protocol, fields)
    _check_models(base, vector, reference)
    found = None if vector is None else load_vector(vector, "forget")
    keep_vectors = {name: load_vector(path, name) for name, path in keep_paths.items()}
    if vector is not None and found is not None:
        base, reference = (own_base([vector], found) if each == OWN_BASE else each for each in (base, reference))
    for each in (model, base, reference):
        if each is not None:
            kind_of(each)  # is it there? Before one of them is loaded
    if dry_run:
        models = [each for each in (model, base, reference) if each is not None]
        vectors = {} if vector is None or found is None else {vector: found.nbytes}
        vectors |= {keep_paths[name]: each.nbytes for name, each in keep_vectors.items()}
        trained = (training if vector is None else None, repairing if "repair" in kinds else None)
        return _dry_run(models, vectors, books, trained, rounds, attacks, output).show(json)
    done = forget_book(
        model,
        [book for book in books if book.role == "forget"],
        kept,
        output,
        base=base,
        vector=found,
        keep_vectors=keep_vectors,
        reference=reference,
        edits=kinds,
        rounds=rounds,
        training=training,
        repairing=repairing,
        block_length=block_length,
        block_stride=block_stride,
        protocol=settings,
        criteria=criteria,
        attacks=attacks,  # type: ignore[arg-type]  # checked above
        write_anyway=write_anyway,
        batch_size=batch_size,
        seed=seed,
        overwrite=overwrite,
    )
    _show(done, json)
    if done.model is None:
        raise typer.Exit(1)
    return None


def _attacks(given: list[str]) -> list[str]:
    """The attacks that were typed: none of them for the word `none`, which stands alone."""
    if _NO_ATTACK not in given:
        return given
    if len(set(given)) > 1:
        raise BadValueError(f"--attack {_NO_ATTACK} makes none, the others name some: give one or the other.")
    return []


def _check_models(base: str | None, vector: str | None, reference: str | None) -> None:
    if vector is None and base is None:
        raise BadValueError(
            "neither the book's vector nor a base to make it from is given. Name the model that MODEL was fine-tuned "
            "from, --base BASE, or give --vector PATH."
        )
    if base is None and reference is None:
        raise BadValueError(
            "no model is given that never saw the book: give --base BASE (`base` for the vector's own) or --reference "
            "MODEL."
        )


def _dry_run(
    models: list[str],
    vectors: dict[str, int],
    books: "list[Book]",
    trained: "tuple[TrainingSettings | None, TrainingSettings | None]",
    rounds: int,
    attacks: list[str],
    output: Path,
) -> CommandResult:
    sizes = {where: weights_size(where) for where in models}
    training, repairing = trained
    # In fp32, twice the usual 16 bits: the model and the one that never saw the book; then the one that is trained,
    # with a gradient and AdamW's two moments, and while attacked, the edited one.
    used = [settings for settings in trained if settings is not None]
    copies = 6 if "relearn" in attacks else 5 if any(settings.method == "full" for settings in used) else 3
    memory = 2 * (copies * (sizes[models[0]] or 0) + (sizes[models[-1]] or 0))
    forgotten, kept = (_words(books, of_forget) for of_forget in (True, False))
    notes = []
    if training is not None:
        notes.append(f"the vector is trained: {_told(training)} over {forgotten:,} words to forget")
    if repairing is not None:
        notes.append(
            f"where the negation does not qualify, a repair is trained, {rounds} at most: first {_told(repairing)} "
            f"over {kept:,} words to keep"
        )
    if used:
        notes.append("the stages hold what is trained, each a whole model and its vectors, or an adapter")
    notes.append(f"the attacks are {', '.join(attacks)}" if attacks else "no attack is made")
    notes.append("what is finished is kept in the output: run it again to go on")
    writes = {f"{output.name}/model": copied_size(models[0]), f"{output.name}/vector": None}
    if used:
        writes[f"{output.name}/stages"] = None
    return DryRun({**sizes, **vectors}, writes, memory, notes).result(output)


def _words(books: "list[Book]", of_forget: bool) -> int:
    return sum(len(book.training_text.split()) for book in books if (book.role == "forget") == of_forget)


def _told(settings: "TrainingSettings") -> str:
    return f"{settings.method}, {settings.epochs} epoch{'s' if settings.epochs > 1 else ''}"


def _show(done: "Forgotten", as_json: bool) -> None:
    """Store the command beside the result, and show it; in the main process only."""
    from dataclasses import asdict

    from hf_taskvec.distributed import processes

    if not processes().is_main_process:
        return
    record_command(done.folder)
    report, choice = done.report, done.report.choice
    assert choice is not None  # there is a book to forget
    parts = {"model": done.model, "adapter": done.adapter, "vector": done.folder / "vector"}
    values: dict[str, Any] = {
        "output": str(done.folder),
        "outcome": done.outcome,
        "passed": done.passed,
        "sentence": done.sentence,
        **{name: None if path is None else str(path) for name, path in parts.items()},
        "judged": done.edit,
        "tried": [asdict(each) for each in done.record.tried],
        "vector_tokens": done.record.vector_tokens,
        "vector_seconds": done.record.vector_seconds,
        "protocol": report.protocol.id,
        "candidates": [{"name": report.names.short(c.scale), **asdict(c)} for c in choice.candidates],
        **choice_values(report, choice),
        "audit": None if done.audit is None else done.audit.to_dict(),
    }
    written = [f"{name}/" for name, path in parts.items() if path is not None]
    written += ["report.html", "report.json", "report.md", *([] if done.audit is None else ["audit.json", "audit.md"])]
    lines = [
        scores_table(report),
        "",
        _tried_table(done),
        *verdict_lines(report, choice),
        *([] if done.audit is None else attack_lines(done.audit)),
        "",
        in_cli_words(done.sentence, forget_command),
        "",
        f"{done.folder}: {', '.join(written)} and plots, with intervals and all other measures",
    ]
    CommandResult(values, lines).show(as_json)


def _tried_table(done: "Forgotten") -> TextTable:
    """Each edit with R by every metric on the half that chooses, and what it cost there."""
    from hf_taskvec.evaluation.reporting.verdict_tables import candidate_cells

    report, choice = done.report, done.report.choice
    assert choice is not None
    by_name = {report.names.short(each.scale): each for each in choice.candidates}
    heads = ["edit", "kind", *(name.replace("_", " ") for name in choice.criteria.judged), "AUC", "lost", "qualifies"]
    rows = [[each.name, each.kind, *candidate_cells(by_name[each.name], choice.criteria)] for each in done.record.tried]
    title = "R by metric on the half that chooses (0 untouched, 1 never seen), AUC above never seen, worst loss kept"
    return TextTable(title, heads, rows)
