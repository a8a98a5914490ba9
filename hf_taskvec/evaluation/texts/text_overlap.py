"""Whether two texts are the same, or mostly: told by the runs of words that they have in common."""

import zlib
from collections.abc import Sequence
from itertools import combinations

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.texts.books import Book

_RUN = 12  # words
_MOST_SHARED = 0.5  # of the shorter of two texts


def word_runs(text: str, one_in: int = 1) -> set[int]:
    """The runs of twelve words in a text, by hashes that are the same in every process.

    Args:
        text (`str`):
            A text.
        one_in (`int`, *optional*, defaults to 1):
            Keep one run in so many, the same ones of every text, where all of them would be much to exchange.
    """
    words = text.split()
    runs = (zlib.crc32(" ".join(words[start : start + _RUN]).encode()) for start in range(len(words) - _RUN + 1))
    return {run for run in runs if run % one_in == 0}


def find_overlap(runs: Sequence[set[int]]) -> tuple[int, int] | None:
    """The numbers of the first two texts of which one is mostly the other, by their runs of words."""
    for (one, first), (other, second) in combinations(enumerate(runs), 2):
        if first and second and len(first & second) > _MOST_SHARED * min(len(first), len(second)):
            return one, other
    return None


def check_books_differ(books: Sequence[Book]) -> None:
    """Refuse the same text twice, or most of it, and the same name."""
    seen: dict[str, Book] = {}
    for book in books:
        if book.text and book.text in seen:
            other = seen[book.text]
            raise BadValueError(
                f"{other.name} ({other.role}) and {book.name} ({book.role}) are the same text: a book cannot be "
                "forgotten and kept. Give each role a book of its own."
            )
        seen[book.text] = book
    if pair := find_overlap([word_runs(book.text) for book in books]):
        one, other = books[pair[0]], books[pair[1]]
        raise BadValueError(
            f"{one.name} ({one.role}) and {other.name} ({other.role}) are mostly the same text: a book cannot be "
            "forgotten and kept. Give each role a book of its own."
        )
    names = [book.name for book in books]
    for name in names:
        if names.count(name) > 1:
            raise BadValueError(f"two books are called {name!r}. Rename one of the files.")
