"""A command's answer as a page for the browser: its tables, with pictures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_taskvec.cli.results import TextTable
from hf_taskvec.errors import BadValueError
from hf_taskvec.html_page import HtmlPage


def write_page(
    path: Path, title: str, lines: Sequence[str | TextTable], pictures: Mapping[str, Callable[[], Any]]
) -> Path:
    """Write what a command answers to people, and figures, each under its caption.

    Args:
        path (`Path`):
            The file; its name ends in .html.
        title (`str`):
            Of the page.
        lines (`Sequence[str | TextTable]`):
            The answer.
        pictures (`Mapping[str, Callable]`):
            For each caption what draws the figure.

    Raises:
        `BadValueError`: If the name ends in something else.
        `OutputError`: If the file cannot be written.
        `UnsupportedError`: If matplotlib is not installed.
    """
    from hf_taskvec.figures import render

    if path.suffix.lower() not in (".html", ".htm"):
        raise BadValueError(f"{path.name!r} is no name for a page: it must end in .html.")
    page = HtmlPage(title)
    page.add_lines([line for line in lines if isinstance(line, str) and line])
    for caption, draw in pictures.items():
        page.add_picture(render({"picture": draw})["picture.png"], caption)
    for table in (line for line in lines if isinstance(line, TextTable)):
        page.add_heading(table.title)
        page.add_table(table.columns, table.rows)
    return page.save(path)
