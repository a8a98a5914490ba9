"""`taskvec lm-eval`: lm-evaluation-harness with the model type `taskvec`."""

import sys
from typing import Annotated

import typer


def lm_eval_command(
    context: typer.Context,
    tasks_folder: Annotated[
        bool, typer.Option("--tasks-folder", help="Print where our own tasks lie, for --include_path.")
    ] = False,
) -> None:
    """Run lm-eval's own command line, which then knows `--model taskvec`.

    taskvec lm-eval run --model taskvec --model_args pretrained=me/model,vector=hp1,scale=-0.6 --tasks arc_easy

    More of --model_args: merge=false (attached, for a low-rank vector), base=BASE (the vector is a full fine-tune), and
    all that lm-eval's type hf takes. --use_cache keeps the responses of each λ apart.

    Books, MUSE and TOFU as tasks: --include_path "$(taskvec lm-eval --tasks-folder)" --tasks taskvec_book --metadata
    '{"book": "hp1.txt"}', or --tasks taskvec_muse_books, or taskvec_tofu.
    """
    from hf_taskvec.integrations.lm_eval_tasks import lm_eval_tasks_folder, register_lm_eval

    if tasks_folder:
        print(lm_eval_tasks_folder())
        return
    register_lm_eval()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["taskvec lm-eval", *context.args]
    cli_evaluate()
