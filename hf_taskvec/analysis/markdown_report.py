"""A report that is written section by section: in Markdown with its figures beside it, and as one page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_taskvec import atomic
from hf_taskvec.errors import OutputError
from hf_taskvec.escaping import markdown_cell
from hf_taskvec.figures import render
from hf_taskvec.html_page import HtmlPage


class MarkdownReport:
    """Sections of Markdown in `analysis.md`, and the figures that they show as PNG and SVG, in one folder.

    `analysis.html` is the same in one file.

    Args:
        output (`Path`):
            The folder to write; it is made if it does not exist.
        title (`str`):
            The report's title.

    Raises:
        `OutputError`: If the folder cannot be made.

    """

    def __init__(self, output: Path, title: str) -> None:
        self.output = output
        self.lines = [f"# {title}", ""]
        self.page = HtmlPage(title)
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{output.name} cannot be made a folder for the report ({error.strerror}).") from None

    def begin_section(self, title: str, *text: str) -> None:
        """Begin a section. What there is so far is saved first, whatever happens in this one."""
        self.save()
        print(f"· {title}", flush=True)
        self.lines += [f"## {title}", ""]
        self.page.add_heading(title)
        self.add_text(*text)

    def add_text(self, *text: str) -> None:
        """Add paragraphs."""
        self.lines += [line for part in text for line in (part, "")]
        self.page.add_text(*text)

    def add_table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        shown = [[markdown_cell(str(cell)) for cell in row] for row in (head, *rows)]
        lines = [shown[0], ["---"] * len(head), *shown[1:]]
        self.page.add_table(head, rows)
        self.lines += ["| " + " | ".join(line) + " |" for line in lines] + [""]

    def add_figure(self, name: str, draw: Callable[[], Any], caption: str) -> None:
        """Draw a figure into `name.png` and `name.svg`, and show it."""
        files = render({name: draw})
        for file, content in files.items():
            atomic.write_bytes(self.output / file, content)
        self.page.add_picture(files[f"{name}.png"], caption)
        self.lines += [f"![{caption}]({name}.png)", ""]

    def save(self) -> Path:
        """Write `analysis.md`, and the page, as they are now."""
        self.page.save(self.output / "analysis.html")
        path = self.output / "analysis.md"
        atomic.write_text(path, "\n".join(self.lines).rstrip() + "\n")
        return path
