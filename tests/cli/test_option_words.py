"""What an error advises can be typed: no command's message tells to pass Python's arguments."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.command_line import COMMANDS, Run
from support.edited_model import Edited

import hf_taskvec
from hf_taskvec.cli.app import _COMMANDS
from hf_taskvec.cli.option_words import in_cli_words, option_names

PACKAGE = Path(hf_taskvec.__file__).parent
NAMED = {name: command for each in _COMMANDS.values() for name, command in each.items()}
# What a command calls; `analysis` has its own functions.
REACHED = (
    *("algebra", "application", "auditing", "evaluation", "extraction", "files", "forgetting", "merging", "models"),
    *("publishing", "training"),
)


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """Every message that is raised in the packages that commands use, with `…` for what is filled in."""
    return tuple(
        (f"{path.name}:{node.lineno}", "".join(_pieces(text)))
        for package in REACHED
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for text in node.exc.args
    )


def _pieces(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str() as text):
            yield text
        case ast.FormattedValue():
            yield "…"
        case ast.JoinedStr(values=values):
            for each in values:
                yield from _pieces(each)
        case ast.BinOp(left=left, right=right):
            yield from _pieces(left)
            yield from _pieces(right)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_own_options_are_named_as_they_are_typed(name: str) -> None:
    command, seen = NAMED[name], 0
    for where, message in messages():
        message = re.sub(r"[\w.]+\([^()]*\)", "", message)  # of a call, the next test
        said = in_cli_words(message, command)
        for parameter, option in option_names(command).items():
            if re.search(rf"(?<![\w(]){parameter}=", message):
                seen += 1
                assert not re.search(rf"(?<![\w('\"-]){parameter}=", said), f"{where}: {said}"
                assert option in said, f"{where}: {said}"
    assert seen or name in ("show", "compare", "eval")


def test_python_calls_that_a_command_makes_are_said_as_the_command() -> None:
    calls = re.compile(
        r"\b(?:apply|to_adapter|save|compress|from_finetuned|from_adapter|push_folder|load_book|filter)\((?!v\b)"
        r"|merge=(?:True|False)"
    )
    count = 0
    for where, message in messages():
        if calls.search(message):
            count += 1
            said = in_cli_words(message, NAMED["apply"])
            assert not calls.search(said), f"{where}: {said}"
    assert count > 10


def test_real_errors_advise_what_can_be_typed(edited: Edited, taskvec: Run, tmp_path: Path) -> None:
    assert taskvec("apply", "vector", "base", "-o", tmp_path / "out").code == 0
    again = taskvec("apply", "vector", "base", "-o", tmp_path / "out")
    assert again.code == 1 and "--overwrite" in again.err and "overwrite=True" not in again.err
    dense = taskvec("adapter", "vector", "-o", tmp_path / "adapter")
    assert "--dense save" in dense.err and "dense=" not in dense.err and "solved by `taskvec adapter VEC" in dense.err
    name = taskvec("extract", "base", "tuned", "--name", "hp 1", "-o", tmp_path / "v")
    assert "--name hp 1 cannot name a vector" in name.err and "Take --name hp_1." in name.err


# Terminals


def run(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "hf_taskvec", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True)


def test_a_terminal_without_greek_letters_gets_their_names(edited: Edited, tmp_path: Path) -> None:
    plain = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    shown = run("show", edited.saved, **plain)
    assert shown.returncode == 0 and b"||tau||^2" in shown.stdout, shown.stderr
    refused = run("apply", edited.saved, tmp_path / "nowhere", "-o", tmp_path / "λ", **plain)
    assert refused.returncode == 1 and b"Traceback" not in refused.stderr
    assert run("--help", **plain).returncode == 0
    told = run("apply", edited.saved, tmp_path / "λ", "-o", tmp_path / "out", "--json", **plain)
    assert told.returncode == 1 and told.stdout.isascii() and "λ" in json.loads(told.stdout)["error"]


def test_ctrl_c_ends_a_recipe_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    script.write_text(
        "import os, signal\n"
        "from hf_taskvec.experiments.recipe_running import run_recipe\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job inherits that it is ignored
        "def main():\n"
        "    print('λ')\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "run_recipe(main)\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stdout == "lambda\n"
    assert done.stderr == "\nstopped; run the same command to go on\n"


def test_every_recipe_is_run_so() -> None:
    for path in (PACKAGE.parent / "recipes").glob("*.py"):
        assert "    run_recipe(" in path.read_text("utf-8").rpartition('if __name__ == "__main__":')[2], path.name
