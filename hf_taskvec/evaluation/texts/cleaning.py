"""From a file's bytes to clean running text: encodings, Gutenberg matter, lines, sentences, chapters."""

import codecs
import itertools
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
    return list(itertools.pairwise([*starts, len(text)]))


_CAPTION = re.compile(r"\[(illustration|frontispiece|footnote|transcriber)\b[^\]]*\]|the end\W*|finis\W*", re.I)
_CLOSED = re.compile(r"[.!?…][\"'”’)\]_*]*$")
# Within so many paragraphs, and so much of the text (or so many characters), running text must begin.
_FRONT_PARAGRAPHS, _FRONT_SHARE, _FRONT_LEAST = 400, 0.2, 5000
_LONGEST_TITLE = 12  # words
_NUMBER = re.compile(r"(?:[IVXLC]+|\d{1,3})\.?")


def prose(text: str) -> tuple[str, list[Span]]:
    r"""What of a mended text is running text, and the spans of its chapters; all of it, if it has no such beginning.

    Left out are the title page, the table of contents and whatever else before the first chapter is no sentence, the
    headings of chapters with the titles below them, captions of pictures, and "The End".

    >>> prose("A BOOK\n\nContents\n\n1. The Cat\n\nChapter 1\n\nThe Cat\n\nIt was a cat that sat.\n\nTHE END")
    ('It was a cat that sat.', [(0, 22)])
    """
    paragraphs = text.split("\n\n")
    first = _first_chapter(paragraphs)
    if first is None:
        return text, chapters(text)
    kept: list[str] = []
    starts: list[int] = []
    length, below = 0, False  # below: what follows a heading may be its title
    for number, paragraph in enumerate(paragraphs):
        front = number < first
        if _is_heading(paragraph):
            starts += [] if front else [length]
            below = True
        elif not (_CAPTION.fullmatch(paragraph) or ((front or below) and _is_title(paragraph, front))):
            kept.append(paragraph)
            length += len(paragraph) + 2
            below = False
    found = "\n\n".join(kept)
    # What follows a chapter, but for the last, is the empty line before the next.
    return found, [(a, b - 2) for a, b in itertools.pairwise([*starts, len(found) + 2]) if a < b]


def _first_chapter(paragraphs: list[str]) -> int | None:
    """The number of the paragraph with which the running text begins: its heading, where it has one."""
    size, read = sum(map(len, paragraphs)), 0
    opening: int | None = None
    for number, paragraph in enumerate(paragraphs[:_FRONT_PARAGRAPHS]):
        if opening is None and _is_sentence(paragraph):
            opening = number
        if _is_heading(paragraph):
            below = next((each for each in paragraphs[number + 1 : number + 3] if not _is_title(each)), "")
            if _is_sentence(below):
                return number
        read += len(paragraph)
        if read > max(_FRONT_LEAST, _FRONT_SHARE * size):
            break
    return opening


def _is_heading(paragraph: str) -> bool:
    return bool(_HEADING.fullmatch(paragraph) or _NUMBER.fullmatch(paragraph)) and not _is_sentence(paragraph)


def _is_sentence(paragraph: str) -> bool:
    """Whether a paragraph ends as a sentence does, and is not made of names and titles."""
    words = re.findall(r"[^\W\d_]+", paragraph)
    small = sum(word[0].islower() for word in words)
    return len(words) >= 4 and 2 * small >= len(words) and bool(_CLOSED.search(paragraph))


def _is_title(paragraph: str, in_front: bool = False) -> bool:
    """Whether a paragraph is a title, an author, a line of contents: no sentence, and short if not in front of all."""
    if _is_sentence(paragraph):
        return False
    short = "\n" not in paragraph and len(paragraph.split()) <= _LONGEST_TITLE
    return in_front or (short and paragraph[-1] not in ".!?…:;,")
