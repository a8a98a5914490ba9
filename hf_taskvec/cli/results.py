"""A command's answer: text and tables for people, or JSON for scripts."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer


@dataclass
class CommandResult:
    """What a command answers.

    Args:
        values (`dict[str, Any]`):
            For scripts: printed as JSON.
        lines (`list[str]`):
            For people: printed one after another; a table is one of them.
    """

    values: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def show(self, as_json: bool) -> None:
        """Print the values as JSON, or the lines."""
        if as_json:
            typer.echo(json.dumps(self.values, ensure_ascii=False, indent=1))
            return
        for line in self.lines:
            typer.echo(line)


def text_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as text, drawn by rich; it is as wide as the terminal, or 100 columns without one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        drawn.add_column(Text(column), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 100)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join([title, *(line.rstrip() for line in captured.get().rstrip().splitlines())])


def largest_first(mapping: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    """The entries with the largest absolute values, at most so many, the largest first.

    >>> largest_first({"a": 1.0, "b": -3.0, "c": 2.0}, 2)
    [('b', -3.0), ('c', 2.0)]
    """
    return sorted(mapping.items(), key=lambda item: -abs(item[1]))[:most]


def layer_title(number: int | str | None) -> str:
    """How tables call a layer; what belongs to none (embeddings, the last norm) is "outside".

    >>> layer_title(3), layer_title(None)
    ('layer 3', 'outside')
    """
    return f"layer {number}" if str(number).isdigit() else "outside"
