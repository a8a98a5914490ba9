"""The leak check: does an answer stand in some prompt, or a held-out answer in the training text?

Ours must be free of leaks, and passages that are not are left out. For the protocols of others the check
reports what leaks by their design.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_taskvec.evaluation.texts.books import Book
from hf_taskvec.evaluation.texts.passages import Passage, find_passages
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.evaluation.texts.word_tokens import ngrams, words

# A run of so many words, equal but for case and punctuation, counts as the answer (or a telling part of it).
RUN = 12


@dataclass(frozen=True)
class LeakReport:
    """Which answers stand where they should not.

    Args:
        checked (`int`):
            How many passages were checked.
        run (`int`):
            How many words in a row count as a leak.
        in_prompts (`tuple[str]`):
            The ids of the passages whose answer stands in some prompt.
        in_training (`tuple[str]`):
            The ids of the held-out passages whose answer stands in the training text.
    """

    checked: int
    run: int
    in_prompts: tuple[str, ...]
    in_training: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing leaks."""
        return not self.in_prompts and not self.in_training


def check_leaks(passages: Sequence[Passage], training_texts: Iterable[str] = (), run: int = RUN) -> LeakReport:
    """A `LeakReport`: which answers leak into a prompt, and which held-out answers into the training text.

    An answer leaks where `run` of its words in a row (all of them, if it is shorter) stand.

    Args:
        passages (`Sequence[Passage]`):
            Of all books together, so that leaks between books are found.
        training_texts (`Iterable[str]`, *optional*):
            What the model was trained on, as `Book.training_text` gives it.
        run (`int`, *optional*, defaults to 12):
            How many words in a row count.

    Returns:
        `LeakReport`: `clean` if nothing leaks.
    """
    prompts = _Index(passage.prompt for passage in passages)
    training = _Index(training_texts)
    return LeakReport(
        checked=len(passages),
        run=run,
        in_prompts=tuple(p.id for p in passages if prompts.holds_part_of(p.answer, run)),
        in_training=tuple(p.id for p in passages if p.split == "held_out" and training.holds_part_of(p.answer, run)),
    )


def without_leaks(
    passages: Sequence[Passage], training_texts: Iterable[str] = (), run: int = RUN
) -> tuple[tuple[Passage, ...], int]:
    """The passages whose answers leak nowhere, and how many were left out."""
    prompts = _Index(passage.prompt for passage in passages)
    training = _Index(training_texts)
    kept = tuple(
        p
        for p in passages
        if not prompts.holds_part_of(p.answer, run)
        and not (p.split == "held_out" and training.holds_part_of(p.answer, run))
    )
    return kept, len(passages) - len(kept)


def find_all_passages(books: Sequence[Book], protocol: Protocol, tokenizer: Any) -> tuple[tuple[Passage, ...], int]:
    """The passages of all books, and how many were left out: under a leak-free protocol none leaks between books."""
    found = tuple(passage for book in books for passage in find_passages(book, protocol, tokenizer))
    if not protocol.leak_free or len(books) == 1:  # within a book, find_passages has done it
        return found, 0
    return without_leaks(found, [book.training_text for book in books])


class _Index:
    """The runs of words of some texts, for each length that is asked for."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = [words(text) for text in texts]
        self._runs: dict[int, set[tuple[str, ...]]] = {}

    def holds_part_of(self, answer: str, run: int) -> bool:
        found = words(answer)
        size = min(run, len(found))
        if size == 0:
            return True  # an answer without words (a row of asterisks) stands everywhere
        if size not in self._runs:
            self._runs[size] = {gram for text in self._texts for gram in ngrams(text, size)}
        return any(gram in self._runs[size] for gram in ngrams(found, size))
