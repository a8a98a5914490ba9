"""A page of tables and figures for the browser: one file without scripts, which asks nothing of the network."""

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

from hf_taskvec import atomic
from hf_taskvec._version import __version__
from hf_taskvec.errors import OutputError
from hf_taskvec.escaping import visible

_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --faint: #5c6370; --ground: #fff; --line: #d5d9e0; }
@media screen and (prefers-color-scheme: dark) {
  :root { --text: #e8eaed; --faint: #a7afbb; --ground: #17191c; --line: #3c424b; }
}
body { margin: 0 auto; padding: 0 1rem 3rem; max-width: 68rem; color: var(--text); background: var(--ground);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff; border-radius: .3rem; }
figcaption, footer { color: var(--faint); } pre { white-space: pre-wrap; }
@media print { section { break-inside: avoid; } }
"""
# What Markdown sets a backslash before, and what it marks as code.
_ESCAPED = re.compile(r"\\([\\`*_{}\[\]()#+.!|<>~$-])")
_CODE = re.compile(r"`([^`]+)`")


class HtmlPage:
    """A page that is made part by part. Whatever is added is text, whoever wrote it: none of it becomes markup.

    Args:
        title (`str`):
            Of the page.

    Example:
        >>> page = HtmlPage("Two vectors")
        >>> page.add_table(["", "cosine"], [["<b>", 0.5]])
        >>> "<td>&lt;b&gt;</td><td>0.5</td>" in page.render()
        True
    """

    def __init__(self, title: str) -> None:
        self._title = _text(title)
        self._parts: list[str] = []

    def add_heading(self, text: str) -> None:
        """Begin a part."""
        self._parts.append(f"<h2>{_text(text)}</h2>")

    def add_text(self, *paragraphs: str) -> None:
        """Add paragraphs of Markdown, of which code alone looks different."""
        for each in paragraphs:
            plain = _text(_ESCAPED.sub(r"\1", html.unescape(each)))
            marked = _CODE.sub(r"<code>\1</code>", plain)
            self._parts.append(f"<p>{marked}</p>")

    def add_lines(self, lines: Sequence[str]) -> None:
        """Add lines as they are."""
        self._parts.append("<pre>" + "\n".join(map(_text, lines)) + "</pre>")

    def add_table(self, head: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
        """Add a table."""
        heads = "".join(f'<th scope="col">{_text(str(cell))}</th>' for cell in head)
        lines = ["<tr>" + "".join(f"<td>{_text(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        self._parts.append(f'<div class="scroll" tabindex="0">{table}</div>')

    def add_picture(self, png: bytes, caption: str) -> None:
        """Add a picture, with words for those who do not see it."""
        data = base64.b64encode(png).decode()
        shown = _text(caption)
        self._parts.append(
            f'<figure><img src="data:image/png;base64,{data}" alt="{shown}"><figcaption>{shown}</figcaption></figure>'
        )

    def render(self) -> str:
        """The page."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f"<title>{self._title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{self._title}</h1>\n"
            + "\n".join(self._parts)
            + f"\n<footer><p>Made by hf_taskvec {__version__}.</p></footer>\n</body>\n</html>\n"
        )

    def save(self, path: Path) -> Path:
        """Write the page.

        Args:
            path (`Path`):
                The file.

        Raises:
            `OutputError`: If it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, self.render())
        except OSError as error:
            raise OutputError(f"{path.name} cannot be written ({error.strerror or error}).") from None
        return path


def _text(text: str) -> str:
    return html.escape(visible(text))
