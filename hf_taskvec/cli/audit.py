"""`taskvec audit`: attacks on an edited model, beside the untouched one and one that never saw the book."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    ReportOption,
    ScaleOption,
    TokenOption,
    chosen_scale,
    load_vector,
)
from hf_taskvec.cli.command_record import record_command
from hf_taskvec.cli.criteria_options import (
    HighOption,
    JudgingRuleOption,
    LowOption,
    MarginOption,
    MembershipOption,
    MetricOption,
    RetainBoundOption,
    chosen_criteria,
)
from hf_taskvec.cli.dry_run import DryRun, weights_size
from hf_taskvec.cli.evaluation_options import (
    OWN_BASE,
    AllSeenOption,
    BatchSizeOption,
    BlockWordsOption,
    ForgetOption,
    HeldOutOption,
    ModelDtypeOption,
    ProtocolFieldsOption,
    ProtocolOption,
    RetainOption,
    SeedOption,
    UnseenOption,
    chosen_protocol,
    held_out_share,
    load_books,
    load_model,
    own_base,
)
from hf_taskvec.cli.report_answer import attack_lines
from hf_taskvec.cli.results import CommandResult
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.auditing.audit_report import AuditReport

_PANEL = "The attacks"


def audit_command(
    vector: Annotated[
        str, typer.Argument(metavar="VECTOR", help="The edit: a vector, an adapter, or the edited model itself.")
    ],
    model: ModelArgument,
    output: OutputOption,
    forget: ForgetOption,
    reference: Annotated[
        str, typer.Option(metavar="MODEL", help="That never saw the book: `base` is the vector's own.")
    ],
    scale: ScaleOption = None,
    report: ReportOption = None,
    retain: RetainOption = None,
    aligned: Annotated[list[str] | None, typer.Option(metavar="BOOK", help="A related book, to relearn on.")] = None,
    unseen: UnseenOption = None,
    all_seen: AllSeenOption = False,
    held_out: HeldOutOption = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="relearn, quantise, sample, prompt, inside, membership; all.", rich_help_panel=_PANEL
        ),
    ] = None,
    passages: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Of each book, at most.", rich_help_panel=_PANEL)
    ] = 60,
    samples: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Drawn for each passage.", rich_help_panel=_PANEL)
    ] = 16,
    learning_rate: Annotated[float, typer.Option(help="Of relearning.", rich_help_panel=_PANEL)] = 2e-5,
    lora_learning_rate: Annotated[
        float | None, typer.Option(help="With LoRA; ten times the other.", rich_help_panel=_PANEL)
    ] = None,
    epochs: Annotated[int, typer.Option(metavar="NUMBER", min=1, help="Of relearning.", rich_help_panel=_PANEL)] = 1,
    metric: MetricOption = None,
    low: LowOption = None,
    high: HighOption = None,
    membership: MembershipOption = None,
    retain_bound: RetainBoundOption = None,
    rule: JudgingRuleOption = None,
    margin: MarginOption = None,
    protocol: ProtocolOption = None,
    fields: ProtocolFieldsOption = None,
    block_words: BlockWordsOption = 1000,
    dtype: ModelDtypeOption = "float32",
    batch_size: BatchSizeOption = None,
    seed: SeedOption = 0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Attack MODEL + λ·VECTOR, and tell whether the book comes back.

    taskvec audit hp1 me/books-model --scale -0.6 --forget hp1.txt --reference base -o audit

    Each attack is also made on MODEL and on the reference, with the same seeds and budget.
    """
    from hf_taskvec.auditing.attacks.relearning import Relearning
    from hf_taskvec.auditing.audit_parts import ATTACKS
    from hf_taskvec.auditing.audit_run import audit, checked_attacks
    from hf_taskvec.evaluation.scoring.metrics import METRICS
    from hf_taskvec.models.folder_contents import kind_of

    attacks = checked_attacks(attack or ATTACKS)
    criteria = chosen_criteria(
        metric, low=low, high=high, membership=membership, retain_bound=retain_bound, rule=rule, margin=margin
    )
    criteria.check(METRICS.values(), METRICS)  # before a model is loaded
    books = load_books(
        {"forget": forget, "retain": retain, "aligned": aligned, "unseen": unseen},
        held_out=held_out_share(all_seen, held_out),
        block_words=block_words,
        seed=seed,
    )
    settings = chosen_protocol(protocol, fields)
    budget = Relearning(learning_rate=learning_rate, epochs=epochs, seed=seed)
    found = _given_vector(vector, scale, report, token)
    amount = None if found is None else chosen_scale(scale, report)[0]
    never_saw = reference
    if reference == OWN_BASE:
        if found is None:
            raise BadValueError(f"{vector} is a model, which has no record of its base. Name it: --reference FOLDER.")
        never_saw = own_base([vector], found)
    for each in (model, never_saw):
        kind_of(each, token=token)  # is it there? Before one of them is loaded
    if dry_run:
        edit = weights_size(vector, token) if found is None else found.nbytes
        return _dry_run(model, (vector, edit), never_saw, attacks, output, token).show(json)
    loaded, tokenizer = load_model(model, dtype, token)
    audited = audit(
        loaded,
        load_model(vector, dtype, token)[0] if found is None or amount is None else amount * found,
        books,
        settings,
        reference=load_model(never_saw, dtype, token)[0],
        attacks=attacks,
        tokenizer=tokenizer,
        criteria=criteria,
        passages=passages,
        relearning=budget,
        lora_learning_rate=lora_learning_rate,
        samples=samples,
        output=output,
        batch_size=batch_size,
        seed=seed,
    )
    _show(audited, amount, output, json)
    return None


def _given_vector(where: str, scale: float | None, report: Path | None, token: str | None) -> "TaskVector | None":
    """The vector, or `None` if it is the edited model itself that was given."""
    from hf_taskvec.models.folder_contents import kind_of

    if kind_of(where, token=token).kind != "model":
        return load_vector(where, token=token)
    if scale is not None or report is not None:
        raise BadValueError(f"{where} is the edited model itself: a λ (--scale, --report) is for a vector.")
    return None


def _dry_run(
    model: str, edit: tuple[str, int | None], reference: str, attacks: list[str], output: Path, token: str | None
) -> CommandResult:
    sizes = {where: weights_size(where, token) for where in (model, reference)}
    # In fp32, twice the usual 16 bits: the model, the edited one, and the one that is attacked; AdamW has a gradient
    # and two moments besides.
    copies = 6 if "relearn" in attacks else 3
    memory = 2 * (copies * (sizes[model] or 0) + (sizes[reference] or 0))
    notes = [f"the attacks are {', '.join(attacks)}", "what is finished is kept in the output: run it again to go on"]
    return DryRun({**sizes, edit[0]: edit[1]}, {output.name: None}, memory, notes).result(output)


def _show(report: "AuditReport", scale: float | None, output: Path, as_json: bool) -> None:
    from hf_taskvec.distributed import processes

    if not processes().is_main_process:
        return
    record_command(output)
    told: dict[str, Any] = {"output": str(output), "scale": scale, "passed": report.passed, "sentence": report.sentence}
    lines = [
        report.sentence,
        *attack_lines(report),
        "",
        f"{output}: audit.json, audit.md and plots, with intervals, all other measures and what was not tried",
    ]
    CommandResult(told | report.to_dict(), lines).show(as_json)
