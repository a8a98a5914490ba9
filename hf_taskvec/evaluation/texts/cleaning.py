"""From a file's bytes to clean running text: encodings, Gutenberg matter, lines, sentences, chapters."""

import codecs
import re

from hf_taskvec.errors import BadValueError

Span = tuple[int, int]

_BOMS = [
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16: its mark begins with UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
]
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")
# A Western European book has single letters beyond ASCII; whole words of them mean another code page.
_FOREIGN_WORD = re.compile(r"[^\x00-\x7f]{4}")


def decode(data: bytes, name: str, encoding: str | None = None) -> str:
    """The text of a file: in the given encoding, or by its byte order mark, or as UTF-8, or as Windows-1252.

    Whatever decodes to something that is not plausible text is refused rather than guessed.
    """
    if encoding is not None:
        try:
            return data.decode(encoding)
        except (UnicodeDecodeError, LookupError) as error:
            raise BadValueError(
                f"{name} cannot be read as {encoding!r}: {error}. Pass the book's true encoding, "
                "or none to have it detected"
            ) from error
    for mark, codec in _BOMS:
        if data.startswith(mark):
            return decode(data, name, codec)
    for codec in ("utf-8", "cp1252"):
        try:
            text = data.decode(codec)
        except UnicodeDecodeError:
            continue
        plausible = codec == "utf-8" or not _FOREIGN_WORD.search(text)
        if plausible and not _CONTROL.search(text):
            return text
    raise BadValueError(
        f"{name} is neither UTF-8 nor Windows-1252 text; pass its encoding, as in load_book(..., encoding='utf-16-le')"
    )


_START = re.compile(r"^\W*(START OF (THE|THIS) PROJECT GUTENBERG|END.?THE SMALL PRINT).*$", re.I | re.M)
_END = re.compile(r"^\W*(END OF (THE |THIS )?PROJECT GUTENBERG).*$", re.I | re.M)
_CREDIT = re.compile(r"\s*(produced by|e-?text prepared by|transcribed (from|by))\b.*?\n\s*\n", re.I | re.S)


def strip_gutenberg(text: str) -> str:
    """The book without Project Gutenberg's header, licence and "Produced by" line; other text as it is."""
    if start := _START.search(text):
        text = text[start.end() :]
    if end := _END.search(text):
        text = text[: end.start()]
    if credit := _CREDIT.match(text):
        text = text[credit.end() :]
    return text.strip("\n")


_HYPHEN = re.compile(r"(?<!-)\b(\w+)-\n[ \t]*(\w+)")
_PAGE_NUMBER = re.compile(r"\[?(p(age|g)?\.? ?)?\d{1,4}\]?", re.I)


def mend(text: str) -> str:
    r"""Running text: words joined over line ends, a line for each paragraph, no page numbers or ornaments.

    A hyphen at a line end goes unless the hyphenated word stands elsewhere in the book. Verse and tables
    (every line indented) keep their lines.

    >>> mend("The exam-\nple is\nshort.\n\n\n 12 \n\n  A rose\n  is a rose")
    'The example is short.\n\nA rose\nis a rose'
    """
    text = re.sub(r"\r\n?|\x0c|\u2028|\u2029", "\n", text).replace("\u00ad", "").replace("\ufeff", "")
    text = text.expandtabs(4).replace("\u00a0", " ")
    known = set(re.findall(r"\w+(?:-\w+)+", text))

    def join(found: re.Match[str]) -> str:
        hyphenated = f"{found[1]}-{found[2]}"
        keep = hyphenated in known or not (found[1].isalpha() and found[2].islower())
        return hyphenated if keep else found[1] + found[2]

    paragraphs = []
    for paragraph in re.split(r"\n[ ]*\n\s*?(?=[ ]*\S)", _HYPHEN.sub(join, text)):
        lines = [line for line in paragraph.split("\n") if line.strip()]
        verse = len(lines) > 1 and all(line.startswith("  ") for line in lines)
        lines = [re.sub(r" {2,}", " ", line.strip()) for line in lines]
        joined = "\n".join(lines) if verse else re.sub(r"--\s", "--", " ".join(lines))
        if re.search(r"\w", joined) and not _PAGE_NUMBER.fullmatch(joined):
            paragraphs.append(joined)
    return "\n\n".join(paragraphs)


_SENTENCE_END = re.compile(r"[.!?…][.!?…]*[\"'”’)\]_*]*\s+(?=[\"'“‘(\[_*]*[A-Z0-9])|\n\n+")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Messrs|Prof|Rev|Hon|Esq|Capt|Col|Gen|Lt|Sir|vs|etc|viz|No|Vol|chap|p)|\b[A-Z])\.$"
)


def sentences(text: str) -> list[Span]:
    """Where each sentence begins and ends. A paragraph's end always ends one; `Mr.` and initials do not.

    >>> text = 'Mr. Toad ran. “Stop!” cried Mole.'
    >>> [text[a:b] for a, b in sentences(text)]
    ['Mr. Toad ran.', '“Stop!” cried Mole.']
    """
    spans, begin = [], 0
    for found in _SENTENCE_END.finditer(text):
        sentence = text[begin : found.end()].rstrip()
        if "\n\n" not in found[0] and _ABBREVIATION.search(sentence):
            continue
        if sentence:
            spans.append((begin, begin + len(sentence)))
        begin = found.end()
    if tail := text[begin:].rstrip():
        spans.append((begin, begin + len(tail)))
    return spans


_HEADING = re.compile(
    r"^(?:(?:chapter|book|part|letter|stave|act|canto)\s+(?:[ivxlcdm]+|\d+|the\s\w+|[a-z]+)\b[^\n]{0,60}"
    r"|(?:\d{1,3}|[IVXLC]+)\.\s+[A-Z][^\n]{0,60})$",
    re.I | re.M,
)


def chapters(text: str) -> list[Span]:
    """The spans of the chapters, each from its heading to the next; what precedes the first is left out."""
    starts = [
        found.start()
        for found in _HEADING.finditer(text)
        # A heading is a paragraph of its own; the lines of a table of contents are not.
        if text[max(0, found.start() - 2) : found.start()] in ("", "\n\n") and text.startswith("\n\n", found.end())
    ]
    return list(zip(starts, [*starts[1:], len(text)], strict=True))
