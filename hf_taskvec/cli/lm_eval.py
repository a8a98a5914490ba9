"""`taskvec lm-eval`: lm-evaluation-harness with the model type `taskvec`."""

import sys

import typer


def lm_eval_command(context: typer.Context) -> None:
    """Run lm-eval's own command line, which then knows `--model taskvec`.

    taskvec lm-eval run --model taskvec --model_args pretrained=me/model,vector=hp1,scale=-0.6 --tasks arc_easy

    More of --model_args: merge=false (attached, for a low-rank vector), base=BASE (the vector is a full fine-tune), and
    all that lm-eval's type hf takes. --use_cache keeps the responses of each λ apart.
    """
    from hf_taskvec.integrations.lm_eval_tasks import register_lm_eval

    register_lm_eval()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["taskvec lm-eval", *context.args]
    cli_evaluate()
