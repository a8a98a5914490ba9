"""`taskvec eval`: how well a model knows some books."""

from hf_taskvec.cli.arguments import DebugOption, DryRunOption, JsonOption, ModelArgument, OutputOption, TokenOption
from hf_taskvec.cli.evaluation_options import (
    AlignedOption,
    BatchSizeOption,
    BlockWordsOption,
    ForgetOption,
    ModelDtypeOption,
    ProtocolFieldsOption,
    ProtocolOption,
    RetainOption,
    SeedOption,
    chosen_protocol,
    evaluation_dry_run,
    load_books,
    load_model,
    show_report,
)


def evaluate_command(
    model: ModelArgument,
    output: OutputOption,
    forget: ForgetOption = None,
    retain: RetainOption = None,
    aligned: AlignedOption = None,
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
    books = load_books(forget, retain, aligned, block_words, seed)
    settings = chosen_protocol(protocol, fields)
    if dry_run:
        return evaluation_dry_run(model, None, output, token).show(json)
    from hf_taskvec.evaluation import sweep

    loaded, tokenizer = load_model(model, dtype, token)
    report = sweep(
        loaded, None, [0.0], books, settings, tokenizer=tokenizer, output=output, batch_size=batch_size, seed=seed
    )
    show_report(report, output, json)
    return None
