"""The application: all commands, and what happens to errors."""

import json
import os
import re
import sys
from itertools import pairwise
from typing import Annotated, NoReturn

import typer

from hf_taskvec._version import __version__
from hf_taskvec.cli import models, publish, vectors
from hf_taskvec.cli.common import running
from hf_taskvec.errors import TaskVectorError

_HELP = """Task vectors for language models: extract, combine, apply, evaluate, share.

Models, vectors, adapters: folders or Hub ids (me/model, me/model@revision).

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted.
"""

app = typer.Typer(
    name="taskvec",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (vectors, models, publish):
    group.add_to(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"taskvec {__version__}")
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
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    running.arguments = given
    if not debug:
        _quieten()
    try:
        app(args=protected(given), prog_name="taskvec")
    except TaskVectorError as error:
        if debug:
            raise
        _fail(str(error), 1, given)
    except Exception as error:
        if debug:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        _fail(f"{reason} (run it again with --debug for the traceback)", 1, given)


def protected(arguments: list[str]) -> list[str]:
    """The arguments, with an expression that begins with a minus kept from being taken for an option.

    >>> protected(["combine", "-0.6*hp1 + hp2", "-o", "out"])
    ['combine', ' -0.6*hp1 + hp2', '-o', 'out']
    """
    if "combine" not in arguments[:1]:
        return arguments
    is_expression = re.compile(r"-\s*(?:[\d.(]|[A-Za-z_]\w*\s*[-+*/]|(?!o$|h$)[A-Za-z_]\w*$)")
    return [f" {each}" if is_expression.match(each) and not each.startswith("--") else each for each in arguments]


def _quieten() -> None:
    """No warnings and bars of other libraries between our lines, unless the user asked for them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_NO_TQDM", "1")


def _fail(reason: str, code: int, arguments: list[str]) -> NoReturn:
    from hf_taskvec.publishing.privacy import without_secrets

    for flag, value in pairwise(arguments):
        if flag == "--token":
            reason = reason.replace(value, "***")
    reason = without_secrets(reason)
    if "--json" in arguments:
        typer.echo(json.dumps({"error": reason}, ensure_ascii=False))
    typer.echo(f"taskvec: {reason}", err=True)
    sys.exit(code)
