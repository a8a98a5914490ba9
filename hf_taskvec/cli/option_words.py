"""Advice in the command line's own words: the library says `overwrite=True` and `apply()`, a user types `--overwrite`.

Errors name arguments as Python has them, `name=` or `name=value`. Here each becomes the option of the command that is
running; a call becomes the command that makes it. So no message is written twice.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import get_args

from typer.models import ArgumentInfo, OptionInfo

# Calls, and arguments that no command has under that name: what to type for them.
_CALLS = (
    (r"\bvector\.[^`]*, or by (`taskvec )", r"\1"),  # what the library says in both forms
    (r"(?:vector|v)\.edit\(model, merge=False\)|\bmerge=False\b", "--attach"),
    (r"\(?\bmerge=True\)?", "without --attach"),
    (r"(?:(?:vector|v)\.)?\bapply\(\w+, output=\.\.\.\)", "`taskvec apply`"),
    (r"(?:vector|v)\.compress\(rank=(?:\.\.\.|\w+)\)", "`taskvec compress --rank`"),
    (r"(?:vector|v)\.filter\(([^()]*)\)", r"`taskvec combine 'filter(v, \1)' v=VECTOR`"),
    (r"TaskVector\.load\(\.\.\.\)", "`taskvec show`"),
    (r"(?:TaskVector\.)?from_finetuned\((?:base, tuned)?\)", "`taskvec extract BASE TUNED`"),
    (r"TaskVector\.from_adapter\(model\)", "`taskvec extract ADAPTER`"),
    (r"\bprotocols\.get\([^=()]*, (prompt_length=\.\.\.(?:, answer_length=\.\.\.)?)\)", r"--set \1"),
    (r"\bload_book\(\.\.\., role='(\w+)'\)", r"--\1 BOOK"),
    (r"\bload_book\(\.\.\., name=\.\.\.\)", "give the files different names"),
    (r"\bload_book\(\.\.\., encoding=[^)]*\)", "save it as UTF-8"),
    (r"\bload the book with held_out=0\b", "pass --all-seen"),
    (r"\bkeep_vectors=\{(['\"])(.*?)\1: \.\.\.\}", r"--keep-vector \2=PATH"),
    (r"\bkeep=\['([^']*)'\]", r"--retain \1"),
    (r"\bwrite_anyway=True\b", "--write-anyway"),
    (r"\bothers=\{(['\"])(.*?)\1: \.\.\.\}", r"--control-vector \2=…"),
    (r"\baccept a retain_bound of ([\d.]+)", r"accept --retain-bound \1"),
    (r"\bCriteria\(metrics=\('(\w+)',\)\)", r"--metric \1"),
    (r"\bsweep\(model, vector, \.\.\.\)", "`taskvec sweep`"),
    (r"\bcompress\(\)", "`taskvec compress`"),
    (r"\bapply\(\)", "`taskvec apply`"),
    (r"(?:(?:vector|v)\.)?\bto_adapter\((?:output)?\)", "`taskvec adapter`"),
    (r"\bsave\(\)", "`taskvec extract`"),
    (r"\bpush_folder\(\)", "`taskvec push`"),
)
_ELSEWHERE = {
    "base": "the base: taskvec extract BASE ADAPTER",
    "vocabulary": "taskvec extract --vocabulary",
    "heads": "taskvec extract --heads",
    "reference": "taskvec extract --reference",
    "scale": "taskvec apply --scale",
    "gradient_checkpointing": "Python's TrainingSettings(gradient_checkpointing=True)",
    "likelihood": "Python's sweep(..., likelihood=True)",
    "verify": "Python's TaskVector.load(..., verify=False)",
}
_RENAMED = {
    "base_model_name_or_path": "base_name",
    "commit_message": "message",
    "datasets": "dataset",
    "length": "block_length",
    "stride": "block_stride",
    "metrics": "metric",
}
# Words of the notation and of protocols, which are typed as they are.
_TYPED = ("samples", "prompt_length", "answer_length", "temperature", "top_p", "fraction", "include", "exclude", "by")


def in_cli_words(message: str, command: Callable[..., None] | None) -> str:
    """An error's message, with the command's options in place of Python's arguments.

    Args:
        message (`str`):
            What the library says.
        command (`Callable`, *optional*):
            The function of the command that is running.

    Returns:
        `str`: The same advice, as it is typed.

    Example:
        >>> from hf_taskvec.cli.apply import apply_command
        >>> in_cli_words("the folder 'a' already holds an output. Pass overwrite=True to replace it.", apply_command)
        "the folder 'a' already holds an output. Pass --overwrite to replace it."
    """
    for call, words in _CALLS:
        message = re.sub(call, words, message)
    options = option_names(command) if command else {}
    return re.sub(r"(?<![\w`'\"(-])([a-z][a-z_]*)=(True\b|'[^']*'|[\w.+-]*\w)?", _typed(options), message)


def _typed(options: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    def typed(found: re.Match[str]) -> str:
        name, value = _RENAMED.get(found[1], found[1]), (found[2] or "").strip("'")
        if name in options:
            shown = "" if value == "True" else value
            return f"{options[name]} {shown}".rstrip()
        if name in _TYPED:
            return found[0]
        if name in _ELSEWHERE:
            return f"{_ELSEWHERE[name]} {'' if value == 'True' else value}".rstrip()
        return found[0]

    return typed


def option_names(command: Callable[..., None]) -> dict[str, str]:
    """What is typed for each parameter of a command: `--option`, or an argument's name in capitals.

    >>> from hf_taskvec.cli.apply import apply_command
    >>> names = option_names(apply_command)
    >>> names["strict_base"], names["output"], names["vector"]
    ('--strict-base', '--output', 'VECTOR')
    """
    found = {}
    for name, parameter in inspect.signature(command).parameters.items():
        told = next(
            (each for each in get_args(parameter.annotation) if isinstance(each, OptionInfo | ArgumentInfo)), None
        )
        if isinstance(told, ArgumentInfo):
            found[name] = told.metavar or name.upper()
        else:
            given = told.param_decls or () if told else ()
            found[name] = next((each for each in given if each.startswith("--")), f"--{name.replace('_', '-')}")
    return found
