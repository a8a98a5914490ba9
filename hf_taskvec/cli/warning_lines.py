"""Warnings of the library as lines of the command line, without the place in the code."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

from hf_taskvec.errors import TaskVectorWarning


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """A block in which the library's own warnings are lines on stderr; those of others are shown as before."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, TaskVectorWarning):
            typer.echo(f"taskvec: warning: {message}", err=True)
        else:
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown
