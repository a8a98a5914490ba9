"""A command's answer: text and tables for people, or JSON for scripts."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_taskvec.escaping import json_text, visible, visible_lines


@dataclass(frozen=True)
class TextTable:
    """A table of an answer, drawn by rich: as wide as the terminal, or 100 columns without one.

    Args:
        title (`str`):
            The line above it.
        columns (`Sequence[str]`):
            Their heads.
        rows (`Sequence[Sequence[object]]`):
            The cells.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(show_edge=False, pad_edge=False)
        short = all(len(str(row[0])) <= 24 for row in self.rows)  # names that stay whole, whatever else is folded
        for number, column in enumerate(self.columns):
            side: Literal["left", "right"] = "left" if number == 0 else "right"
            drawn.add_column(Text(visible(column)), justify=side, overflow="fold", no_wrap=short and number == 0)
        for row in self.rows:
            drawn.add_row(*(Text(visible(str(cell))) for cell in row))
        console = Console(width=None if sys.stdout.isatty() else 100)
        with console.capture() as captured:
            console.print(drawn)
        return "\n".join([self.title, *(line.rstrip() for line in captured.get().rstrip().splitlines())])


@dataclass
class CommandResult:
    """What a command answers.

    Args:
        values (`dict[str, Any]`):
            For scripts: printed as JSON.
        lines (`Sequence[str | TextTable]`):
            For people: printed one after another; a table is one of them.
    """

    values: dict[str, Any] = field(default_factory=dict)
    lines: Sequence[str | TextTable] = ()

    def show(self, as_json: bool) -> None:
        """Print the values as JSON, or the lines."""
        # Not by `typer.echo`, which writes UTF-8 where the terminal was said to take ASCII.
        if as_json:
            print(json_text(self.values))
            return
        for line in self.lines:
            # A table has the codes of its style, and has made its cells' texts visible itself.
            print(visible_lines(line) if isinstance(line, str) else str(line))


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
