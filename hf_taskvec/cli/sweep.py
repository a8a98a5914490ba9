"""`taskvec sweep`: a model with a vector at many λ, or with one whole edit after another."""

from typing import Annotated

import typer

from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    TokenOption,
)
from hf_taskvec.cli.control_options import ControlsOption, ControlVectorOption, control_paths, control_vectors
from hf_taskvec.cli.criteria_options import (
    CertainOption,
    HighOption,
    JudgingRuleOption,
    LowOption,
    MarginOption,
    MembershipOption,
    MetricOption,
    RetainBoundOption,
    chosen_criteria,
)
from hf_taskvec.cli.edit_options import (
    EditsOption,
    GridsOption,
    ScalesOption,
    SweptArgument,
    VectorsOption,
    swept_change,
)
from hf_taskvec.cli.evaluation_options import (
    OWN_BASE,
    AlignedOption,
    AllSeenOption,
    BatchSizeOption,
    BlockWordsOption,
    ForgetOption,
    HeldOutOption,
    LogWithOption,
    ModelDtypeOption,
    ProtocolFieldsOption,
    ProtocolOption,
    RetainOption,
    SeedOption,
    UnseenOption,
    UtilityLimitOption,
    UtilityOption,
    answers_note,
    chosen_protocol,
    evaluation_dry_run,
    held_out_share,
    load_books,
    load_model,
    load_reference,
    own_base,
)
from hf_taskvec.cli.report_answer import show_report


def sweep_command(
    given: SweptArgument,
    output: OutputOption,
    forget: ForgetOption = None,
    retain: RetainOption = None,
    aligned: AlignedOption = None,
    unseen: UnseenOption = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Never saw the books; `base`: the vector's own."),
    ] = None,
    all_seen: AllSeenOption = False,
    held_out: HeldOutOption = None,
    scales: ScalesOption = None,
    vectors: VectorsOption = None,
    edits: EditsOption = None,
    grids: GridsOption = None,
    attach: Annotated[bool, typer.Option("--attach", help="Low rank: beside the weights, all λ in one batch.")] = False,
    controls: ControlsOption = False,
    control_vector: ControlVectorOption = None,
    metric: MetricOption = None,
    low: LowOption = None,
    high: HighOption = None,
    membership: MembershipOption = None,
    retain_bound: RetainBoundOption = None,
    certain: CertainOption = False,
    rule: JudgingRuleOption = None,
    margin: MarginOption = None,
    protocol: ProtocolOption = None,
    fields: ProtocolFieldsOption = None,
    block_words: BlockWordsOption = 1000,
    dtype: ModelDtypeOption = "float32",
    utility: UtilityOption = None,
    utility_limit: UtilityLimitOption = None,
    log_with: LogWithOption = None,
    batch_size: BatchSizeOption = None,
    seed: SeedOption = 0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Measure MODEL + λ·VECTOR at many λ, or with whole edits, and choose one.

    taskvec sweep hp1 me/books-model --forget hp1.txt --retain pp.txt --reference base -o report, or
    taskvec sweep me/books-model --vector hp1=hp1 --vector pp=pp --edit "-0.9*hp1 + 0.5*pp" …
    """
    from hf_taskvec.evaluation.reporting.tracking import check_trackers
    from hf_taskvec.evaluation.scoring.metrics import METRICS
    from hf_taskvec.evaluation.utility import check_lm_eval, lm_eval_metric

    swept = swept_change(given, scales, vectors, edits, grids)
    criteria = chosen_criteria(
        metric,
        low=low,
        high=high,
        membership=membership,
        retain_bound=retain_bound,
        certain=certain,
        rule=rule,
        margin=margin,
    )
    criteria.check(METRICS.values(), METRICS)  # before a model is loaded
    if utility:
        check_lm_eval()
    check_trackers(log_with or [], output)
    books = load_books(
        {"forget": forget, "retain": retain, "aligned": aligned, "unseen": unseen},
        held_out=held_out_share(all_seen, held_out),
        block_words=block_words,
        seed=seed,
    )
    settings = chosen_protocol(protocol, fields)
    paths = control_paths(controls, control_vector, books, swept.scales)
    by_name = swept.load(token)
    first, *further = by_name.values()
    found = sum(further, start=first)  # what all of them are made from
    named = swept.edits(by_name) if swept.scales is None else {}
    others = control_vectors(paths, found, token)
    never_saw = own_base(swept.paths.values(), found) if reference == OWN_BASE else reference
    if dry_run:
        sizes = {path: by_name[name].nbytes for name, path in swept.paths.items()}
        sizes |= {path: others[book].nbytes for book, path in paths.items()}
        more = f"for the controls the seen passages are asked {2 + len(others)} more times, at one λ"
        asked = (len(named) + 1 if swept.scales is None else len({0.0, *swept.scales})) + (never_saw is not None)
        notes = answers_note(books, settings, asked)
        notes += [more] if controls else []
        notes += [f"lm-eval asks {', '.join(utility)} at each of them"] if utility else []
        notes += [f"{len(named)} edits are compared: {'; '.join(named)}"] if named else []
        return evaluation_dry_run(swept.model, sizes, never_saw, output, token, notes).show(json)
    from hf_taskvec.evaluation import sweep, with_controls
    from hf_taskvec.evaluation.controls import check_control_vectors

    loaded, tokenizer = load_model(swept.model, dtype, token)
    check_control_vectors(loaded, others, merge=not attach)
    never = load_reference(never_saw, OWN_BASE if reference == OWN_BASE else None, dtype, token)
    report = sweep(
        loaded,
        named or found,
        swept.scales,
        books,
        settings,
        tokenizer=tokenizer,
        reference=never,
        output=output,
        batch_size=batch_size,
        criteria=criteria,
        utility=lm_eval_metric(utility, tokenizer, limit=utility_limit) if utility else None,
        seed=seed,
        merge=not attach,
        log_with=log_with or None,
    )
    if controls:
        report = with_controls(
            report,
            loaded,
            found,
            books,
            others=others,
            reference=never,
            tokenizer=tokenizer,
            merge=not attach,
            output=output,
        )
    show_report(report, output, json)
    return None
