"""The application: all commands under their names, and what happens to errors."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, NoReturn

import typer

from hf_taskvec._version import __version__
from hf_taskvec.cli.adapter import adapter_command
from hf_taskvec.cli.apply import apply_command
from hf_taskvec.cli.arguments import protect_expression
from hf_taskvec.cli.audit import audit_command
from hf_taskvec.cli.card import card_command
from hf_taskvec.cli.choose import choose_command
from hf_taskvec.cli.combine import combine_command
from hf_taskvec.cli.command_record import running, tokens_in
from hf_taskvec.cli.compare import compare_command
from hf_taskvec.cli.compress import compress_command
from hf_taskvec.cli.evaluate import evaluate_command
from hf_taskvec.cli.extract import extract_command
from hf_taskvec.cli.forget import forget_command
from hf_taskvec.cli.lm_eval import lm_eval_command
from hf_taskvec.cli.merge import merge_command
from hf_taskvec.cli.option_words import in_cli_words
from hf_taskvec.cli.push import push_command
from hf_taskvec.cli.show import show_command
from hf_taskvec.cli.survival import survival_command
from hf_taskvec.cli.sweep import sweep_command
from hf_taskvec.cli.warning_lines import warnings_as_lines
from hf_taskvec.errors import TaskVectorError
from hf_taskvec.escaping import json_text, readable_in_any_encoding, visible_lines

STOPPED = "interrupted. Run the same command to go on: what was finished is kept where a run can be resumed."
_HELP = """Task vectors for language models: extract, combine, apply, evaluate, share.

Models, vectors, adapters: folders or Hub ids (me/model, me/model@revision).

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted.
"""

# Heading of the help -> name -> command.
_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Vectors": {
        "extract": extract_command,
        "show": show_command,
        "compare": compare_command,
        "combine": combine_command,
        "compress": compress_command,
    },
    "Models": {
        "apply": apply_command,
        "merge": merge_command,
        "adapter": adapter_command,
        "eval": evaluate_command,
        "sweep": sweep_command,
        "choose": choose_command,
        "forget": forget_command,
        "audit": audit_command,
        "survival": survival_command,
        "lm-eval": lm_eval_command,
    },
    "Sharing": {
        "card": card_command,
        "push": push_command,
    },
}

# All options of another tool's command line are its own, but for our help.
_SETTINGS = {"lm-eval": {"allow_extra_args": True, "ignore_unknown_options": True}}

app = typer.Typer(
    name="taskvec",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, but Ctrl-C ends it with the exit code that shells expect."""

    @wraps(command)
    def run_command(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            print(f"taskvec: {STOPPED}", file=sys.stderr)
            sys.exit(130)

    return run_command


for _heading, _named in _COMMANDS.items():
    for _name, _command in _named.items():
        app.command(_name, rich_help_panel=_heading, context_settings=_SETTINGS.get(_name))(_interruptible(_command))


def _version(asked: bool) -> None:
    if asked:
        print(f"taskvec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    pass


def run(arguments: list[str] | None = None) -> None:
    """Run a command; the process ends with one of the documented exit codes."""
    readable_in_any_encoding()
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    running.arguments = given
    if not debug:
        _quieten()
    try:
        with warnings_as_lines():
            app(args=protect_expression(given), prog_name="taskvec")
    except TaskVectorError as error:
        if debug:
            raise
        _fail(in_cli_words(str(error), _command_of(given)), 1, given)
    except Exception as error:
        if debug:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        _fail(f"{reason} (run it again with --debug for the traceback)", 1, given)


def _command_of(arguments: list[str]) -> Callable[..., None] | None:
    named = {name: command for commands in _COMMANDS.values() for name, command in commands.items()}
    return next((named[each] for each in arguments if each in named), None)


def _quieten() -> None:
    """Switch off other libraries' warnings and progress bars, unless the user asked for them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_NO_TQDM", "1")


def _fail(reason: str, code: int, arguments: list[str]) -> NoReturn:
    from hf_taskvec.publishing.privacy import without_secrets

    for token in tokens_in(arguments):
        reason = reason.replace(token, "***")
    reason = visible_lines(without_secrets(reason))
    if "--json" in arguments:
        print(json_text({"error": reason}, indent=None))
    print(f"taskvec: {reason}", file=sys.stderr)
    sys.exit(code)
