"""Whether two texts are the same, or mostly: told by the runs of words that they have in common."""

import zlib
from collections.abc import Sequence
from itertools import combinations

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
