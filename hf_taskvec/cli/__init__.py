"""The command line, `taskvec`: thin commands over the library. Nothing heavy is imported until a command runs.

One file a command: `extract`, `show`, `compare`, `combine` and `compress` make vectors and look at them; `apply`,
`adapter`, `evaluate` (the command `eval`), `sweep`, `choose`, `audit` and `survival` work on models; `card` and `push`
share what was made. What they have in common:

- `app`: all commands under their names, and what happens to errors.
- `arguments`: options that several commands have, and reading what was typed.
- `results`: a command's answer, as text or as JSON.
- `dry_run`: what a command would read and write.
- `outputs`: checking a folder before it is written, and telling what was written.
- `command_record`: the command itself, stored beside its output.
- `evaluation_options`: what `eval`, `sweep` and `audit` share.
- `option_words`: the library's advice in the words of the command line.
"""

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run a command; the process ends with one of the documented exit codes."""
    try:
        from hf_taskvec.cli.app import run
    except KeyboardInterrupt:  # importing takes a moment
        sys.exit(130)
    run(arguments)
