"""`taskvec eval`: how well a model knows some books."""

from typing import Annotated

import typer

from hf_taskvec.cli.arguments import DebugOption, DryRunOption, JsonOption, ModelArgument, OutputOption, TokenOption
from hf_taskvec.cli.evaluation_options import (
    AlignedOption,
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
    evaluation_dry_run,
    held_out_share,
    load_books,
    load_model,
    load_reference,
)
from hf_taskvec.cli.report_answer import show_report


def evaluate_command(
    model: ModelArgument,
    output: OutputOption,
    forget: ForgetOption = None,
    retain: RetainOption = None,
    aligned: AlignedOption = None,
    unseen: UnseenOption = None,
    all_seen: AllSeenOption = False,
    held_out: HeldOutOption = None,
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another model to compare with, as the base.")
    ] = None,
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
    """Measure how well a model knows some books.

    taskvec eval me/model --forget hp1.txt --retain pp.txt -o report
    """
    books = load_books(
        {"forget": forget, "retain": retain, "aligned": aligned, "unseen": unseen},
        held_out=held_out_share(all_seen, held_out),
        block_words=block_words,
        seed=seed,
    )
    settings = chosen_protocol(protocol, fields)
    if dry_run:
        return evaluation_dry_run(model, {}, reference, output, token).show(json)
    from hf_taskvec.evaluation import sweep

    loaded, tokenizer = load_model(model, dtype, token)
    report = sweep(
        loaded,
        None,
        [0.0],
        books,
        settings,
        tokenizer=tokenizer,
        reference=load_reference(reference, None, dtype, token),
        output=output,
        batch_size=batch_size,
        seed=seed,
    )
    show_report(report, output, json, chosen=False)
    return None
