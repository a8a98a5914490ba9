"""Texts as words: how Rouge-L compares them, and how leaks are found."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

_WORDS = re.compile(r"[a-z0-9]+")


@lru_cache(maxsize=1)
def _stemmer() -> Any:
    from nltk.stem.porter import PorterStemmer  # what rouge_score uses, with its default mode

    return PorterStemmer()


@lru_cache(maxsize=1 << 17)
def _stem(word: str) -> str:
    # rouge_score leaves words of up to three letters alone.
    return str(_stemmer().stem(word)) if len(word) > 3 else word


def words(text: str, stemmer: bool = False) -> list[str]:
    """The tokens that `rouge_score` compares: runs of a–z and 0–9 in the lower-cased text, or their stems.

    >>> words("It was “Réal”, wasn't it?")
    ['it', 'was', 'r', 'al', 'wasn', 't', 'it']
    """
    found = _WORDS.findall(text.lower())
    return [_stem(word) for word in found] if stemmer else found


def ngrams(found: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """Every run of n words, in order.

    >>> list(ngrams(["to", "be", "or"], 2))
    [('to', 'be'), ('be', 'or')]
    """
    return zip(*(found[i:] for i in range(n)), strict=False)
