"""The command line, `taskvec`: thin commands over the library. Nothing heavy is imported until a command runs."""

from hf_taskvec.cli.app import main

__all__ = ["main"]
