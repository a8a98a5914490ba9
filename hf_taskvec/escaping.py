r"""Texts of others on their way out: to a terminal, into Markdown, into JSON.

Names of models, labels, books and parameters may come from a stranger's file. On a terminal a control character can
move the cursor, set a title or make a link; in Markdown a bracket makes a link, and `<` makes HTML. What leaves by one
of the functions here is read as the text that it is, and as nothing else.

>>> print(visible("a\x1b[31mb\u202ec"))
a\x1b[31mb\u202ec
>>> print(markdown("see <b>[this](javascript:x)</b>"))
see \<b>\[this\](javascript:x)\</b>
"""

import codecs
import json
import re
import sys
from typing import Any

# Whatever a renderer may turn into a link by itself; no backslash prevents that, but code is left alone.
_LINKS = re.compile(r"://|www\.|@|mailto:|xmpp:", re.IGNORECASE)
# An underscore between letters or digits is no emphasis anywhere.
_PUNCTUATION = re.compile(r"[\\`*\[\]<#|~$&!{}]|(?<![^\W_])_|_(?![^\W_])")
_LINE_START = re.compile(r"^(?:[-+=:>]|\d+(?=[.)]))")
# What our own messages have beyond ASCII, for terminals that have nothing else.
_IN_ASCII = {
    "λ": "lambda",
    "τ": "tau",
    "θ": "theta",
    "α": "alpha",
    "Δ": "delta",
    "×": "x",
    "·": "*",
    "²": "^2",
    "‖": "||",
    "–": "-",
    "−": "-",
    "…": "...",
    "“": '"',
    "”": '"',
    "’": "'",
    "→": "->",
    "≡": "==",
    "≤": "<=",
    "≥": ">=",
    "±": "+-",
    "∈": "in",
    "√": "sqrt",
    "✓": "v",
    "█": "#",
    "│": "|",
    "─": "-",
}


def visible(text: str) -> str:
    r"""The text on one line, with an escape for each character that cannot be seen: controls, bidi marks, surrogates.

    >>> visible("one\ntwo")
    'one\\ntwo'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def visible_lines(text: str) -> str:
    """The same of a text with several lines."""
    return "\n".join(map(visible, text.split("\n")))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def markdown(text: str) -> str:
    r"""The text as Markdown that shows it: no link, image, HTML, formula or heading comes of it.

    Where a renderer could see an address it is set as code.

    >>> print(markdown("# phi_1_5 *new*"), markdown("http://example.org"))
    \# phi_1_5 \*new\* `http://example.org`
    """
    return _shown(text, in_table=False)


def markdown_cell(text: str) -> str:
    """The same inside a table."""
    return _shown(text, in_table=True)


def markdown_code(text: str, *, in_table: bool = False) -> str:
    """The text as code within a line, whatever backticks it has.

    >>> print(markdown_code("a"), markdown_code("a`b"))
    `a` `` a`b ``
    """
    text = visible(text)
    runs = {len(run) for run in re.findall("`+", text)}
    fence = "`" * next(length for length in range(1, len(runs) + 2) if length not in runs)
    # A space at either end belongs to the fence, where the text itself ends so or is empty.
    space = " " if not text.strip() or text[0] in "` " or text[-1] in "` " or len(fence) > 1 else ""
    if in_table:
        text = text.replace("|", "\\|")
    return f"{fence}{space}{text}{space}{fence}"


def _shown(text: str, in_table: bool) -> str:
    text = visible(text).strip()
    if _LINKS.search(text):
        return markdown_code(text, in_table=in_table)
    text = _PUNCTUATION.sub(r"\\\g<0>", text)
    return text if in_table else _LINE_START.sub(_behind_start, text)


def _behind_start(found: re.Match[str]) -> str:
    """What would begin a list, a heading or a table's rule at the start of a line; a number's full stop is meant."""
    return f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}"


def json_text(value: Any, indent: int | None = 1) -> str:
    r"""JSON for standard output: readable, and with an escape for each character that cannot be seen.

    >>> json_text({"λ": "\x9b\u202e"}, None)
    '{"λ": "\\u009b\\u202e"}'
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a script shall read the same text from a terminal without Greek letters
        return json.dumps(value, indent=indent)
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def readable_in_any_encoding() -> None:
    """Let this process print what the terminal's encoding lacks: λ as "lambda", the rest as escapes."""
    codecs.register_error("hf_taskvec.readable", _readable)
    for stream in (sys.stdout, sys.stderr):
        # Only a file of text has an encoding to change: not what a notebook or a test puts in its place.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="hf_taskvec.readable")


def _readable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wanted = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(each) or _escape(each) for each in wanted), error.end
