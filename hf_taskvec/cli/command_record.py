"""The command that is running, stored beside its output so that it can be run again. Tokens are left out."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from hf_taskvec import filenames
from hf_taskvec._version import __version__
from hf_taskvec.errors import CorruptFileError, MissingFileError
from hf_taskvec.json_files import read_json
from hf_taskvec.typed_values import typed

_SECRET_OPTIONS = ("--token",)


@dataclass(frozen=True)
class CommandRecord:
    """The commands that wrote a folder, one after another."""

    commands: tuple[tuple[str, ...], ...]


@dataclass
class RunningCommand:
    """The command that this process runs."""

    arguments: list[str] = field(default_factory=list)


#: set when the command starts
running = RunningCommand()


def record_command(output: Path) -> None:
    """Store the command that is running: inside the folder that it wrote, or beside the file.

    Other commands that wrote there before are kept in the record.
    """
    from hf_taskvec.atomic import write_text
    from hf_taskvec.publishing.privacy import without_secrets

    path = output / filenames.COMMAND_RECORD if output.is_dir() else output.with_name(f"{output.name}.command.json")
    try:
        earlier = typed(CommandRecord, read_json(path)).commands
    except (MissingFileError, CorruptFileError):
        earlier = ()
    command = ("taskvec", *(without_secrets(each) for each in without_tokens(running.arguments)))
    commands = [each for each in earlier if each != command] + [command]
    text = json.dumps({"hf_taskvec": __version__, "commands": commands}, indent=1, ensure_ascii=False)
    write_text(path, text + "\n")


def without_tokens(arguments: list[str]) -> list[str]:
    """The arguments without the options that give a token, and their values.

    >>> without_tokens(["show", "v", "--token", "abc", "--json"]), without_tokens(["show", "v", "--token=abc"])
    (['show', 'v', '--json'], ['show', 'v'])
    """
    return [each for each, secret in _told_apart(arguments) if secret is None]


def tokens_in(arguments: list[str]) -> list[str]:
    """The tokens among the arguments.

    >>> tokens_in(["show", "v", "--token", "abc", "--token=def"])
    ['abc', 'def']
    """
    return [secret for _, secret in _told_apart(arguments) if secret]


def _told_apart(arguments: list[str]) -> list[tuple[str, str | None]]:
    """Each argument with the token that it holds; the option before a token has an empty one."""
    found: list[tuple[str, str | None]] = []
    follows = False
    for each in arguments:
        option, equals, value = each.partition("=")
        if follows:
            found.append((each, each))
        else:
            found.append((each, value if option in _SECRET_OPTIONS else None))
        follows = not follows and not equals and each in _SECRET_OPTIONS
    return found
