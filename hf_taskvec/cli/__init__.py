"""The command line, `taskvec`: thin commands over the library. Nothing heavy is imported until a command runs."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command; the process ends with one of the documented exit codes."""
    from hf_taskvec.cli.app import run

    run(arguments)
