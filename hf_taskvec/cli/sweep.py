"""`taskvec sweep`: a model with a vector at many λ."""

from typing import Annotated

import typer

from hf_taskvec.cli.arguments import (
    DebugOption,
    DryRunOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    TokenOption,
    VectorArgument,
    load_vector,
    parse_scales,
)
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


def sweep_command(
    vector: VectorArgument,
    model: ModelArgument,
    output: OutputOption,
    forget: ForgetOption = None,
    retain: RetainOption = None,
    aligned: AlignedOption = None,
    scales: Annotated[str, typer.Option(help="λ: a list, or start:stop:step.")] = "0:-1:-0.2",
    attach: Annotated[
        bool, typer.Option("--attach", help="Low-rank vectors: beside the weights, all λ in one batch.")
    ] = False,
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model that never saw the books to forget.")
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
    """Measure MODEL + λ·VECTOR at many λ, and choose one.

    taskvec sweep hp1 me/books-model --forget hp1.txt --retain pp.txt -o report
    """
    amounts = parse_scales(scales)
    books = load_books(forget, retain, aligned, block_words, seed)
    settings = chosen_protocol(protocol, fields)
    found = load_vector(vector, token=token)
    if dry_run:
        return evaluation_dry_run(model, (vector, found.nbytes), output, token).show(json)
    from hf_taskvec.evaluation import sweep

    loaded, tokenizer = load_model(model, dtype, token)
    never_saw = load_model(reference, dtype, token)[0] if reference else None
    report = sweep(
        loaded,
        found,
        amounts,
        books,
        settings,
        tokenizer=tokenizer,
        reference=never_saw,
        output=output,
        batch_size=batch_size,
        seed=seed,
        merge=not attach,
    )
    show_report(report, output, json)
    return None
