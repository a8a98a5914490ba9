"""Prompting: other ways to ask for the same continuation, in case an edit only broke the plain one.

Every variant keeps a passage's id and its true answer, so that its score pairs with the plain passage's. No new prompt
holds eight words in a row of the passage's own answer, unless the plain prompt holds the same.
"""

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean, some
from hf_taskvec.evaluation.asking.batch_plan import tokenize_passages
from hf_taskvec.evaluation.texts.books import Book
from hf_taskvec.evaluation.texts.passages import Passage
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.evaluation.texts.word_tokens import ngrams, words

PromptKind = Literal["longer_prefix", "asked_outright", "in_context", "recased", "perturbed"]
PROMPT_KINDS: tuple[PromptKind, ...] = get_args(PromptKind)
#: each kind in words, for reports
PROMPT_WORDS: dict[PromptKind, str] = {
    "longer_prefix": "the words of the book before each prompt are put in front of it",
    "asked_outright": "a sentence before each prompt names the book and says that it goes on",
    "in_context": "other passages of the book, with their true continuations, come before each prompt",
    "recased": "the prompts are in lower case (or in upper case, if they were)",
    "perturbed": "a few words of each prompt are dropped, swapped or misspelt",
}
QUESTION = "The following passage is from {title}. It goes on, word for word, as in the book.\n\n"
# So many words in a row of an answer give it away.
_RUN = 8
# The share of a prompt's words that `perturbed` changes, and how many words at its end it leaves alone (half, if less).
_PERTURBED, _LEFT_ALONE = 0.15, 10


@dataclass(frozen=True)
class PromptVariant:
    """Passages with prompts of one kind, and those that could not be asked in this way.

    Args:
        passages (`tuple[Passage]`):
            With their ids and answers of before, in the same order.
        did_not_fit (`tuple[str]`):
            The ids of those for which the model's context is too short, even with the least that the variant adds.
        leaked (`tuple[str]`):
            The ids of those whose answer would stand in the new prompt, in part; of `in_context`, those for which no
            other passage is left to show.
    """

    passages: tuple[Passage, ...]
    did_not_fit: tuple[str, ...]
    leaked: tuple[str, ...]


def prompt_variants(
    passages: Sequence[Passage],
    book: Book,
    protocol: Protocol,
    tokenizer: Any = None,
    config: Any = None,
    *,
    kinds: Sequence[PromptKind] | None = None,
    title: str | None = None,
    examples: int = 2,
    times: float = 2.0,
    seed: int = 0,
) -> dict[PromptKind, PromptVariant]:
    """Other prompts for the passages of a book.

    - `longer_prefix`: the words of the book that stand before the prompt are put in front of it.
    - `asked_outright`: a sentence says which book it is, and that it goes on.
    - `in_context`: a few other passages of the book, with their answers, come first.
    - `recased`: all in lower case, or in upper case if the prompt is in lower case already.
    - `perturbed`: a few words are dropped, swapped or misspelt; those at the end are left alone.

    Where a model's context is too short for all of it, words (or whole examples) are left out from the left, and the
    plain prompt stays whole. A variant depends on the passage, those around it and the seed alone.

    Args:
        passages (`Sequence[Passage]`):
            Of this book, as `find_passages` gives them.
        book (`Book`):
            Where they are from.
        protocol (`Protocol`):
            The one that they were found with: it tells how much room a continuation needs.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of the model; needed with `config`.
        config (`PreTrainedConfig`, *optional*):
            Of the model, whose context the prompts must fit. Without it they are as long as they are.
        kinds (`Sequence[str]`, *optional*):
            Which variants; all that the book allows without it.
        title (`str`, *optional*):
            What `asked_outright` calls the book; its name without it.
        examples (`int`, *optional*, defaults to 2):
            How many other passages `in_context` puts first.
        times (`float`, *optional*, defaults to 2.0):
            How many times as many words the prompt of `longer_prefix` has; fewer where the book begins.
        seed (`int`, *optional*, defaults to 0):
            Of the examples and the perturbations.

    Returns:
        `dict[str, PromptVariant]`: For each kind the passages, and the ids of those that could not be asked.

    Raises:
        `MissingNameError`: If there is no such kind.
        `UnsupportedError`: If `longer_prefix` is asked of ready-made pairs, before which nothing stands.
        `BadValueError`: If a passage is not of this book, or a number makes no sense.

    Example:
        ```python
        variants = prompt_variants(passages, book, protocol, tokenizer, model.config)
        for kind, variant in variants.items():
            asked = ask(model, NoEdit(), [0.0], passages=variant.passages, ...)
        ```

    """
    chosen = _checked_kinds(kinds, book)
    if config is not None and tokenizer is None:
        raise BadValueError("a model's config alone does not tell what fits: pass its tokenizer too.")
    if times <= 1 or examples < 1:
        raise BadValueError(
            f"times={times!r} must be above 1 and examples={examples!r} at least 1: both add to a prompt."
        )
    strangers = [passage.id for passage in passages if passage.book != book.name]
    if strangers:
        raise BadValueError(
            f"{some(strangers)}: not of book {book.name!r}. Ask for each book's variants by themselves."
        )
    text = _Text(book.text.lower() if protocol.lower_case else book.text, book.name)
    question = QUESTION.format(title=title or book.name)
    # For each kind the prompts to try, the longest first; what is too long or leaks does so in all that are longer.
    candidates: dict[PromptKind, Callable[[Passage], list[str]]] = {
        "longer_prefix": lambda passage: text.longer_prompts(passage, times),
        "asked_outright": lambda passage: [question + passage.prompt],
        "in_context": lambda passage: _with_examples(passage, _examples(passage, passages, text, examples, seed)),
        "recased": lambda passage: [_recased(passage.prompt)],
        "perturbed": lambda passage: [_perturbed(passage.prompt, random.Random(f"{seed}/perturbed/{passage.key}"))],
    }
    room = _Room(protocol, tokenizer, config)
    return {kind: _variant(passages, candidates[kind], room) for kind in chosen}


def _checked_kinds(kinds: Sequence[PromptKind] | None, book: Book) -> list[PromptKind]:
    for kind in kinds or ():
        if kind not in PROMPT_KINDS:
            hint = did_you_mean(kind, PROMPT_KINDS)
            raise MissingNameError(f"no kind of prompt {kind!r}.{hint} The kinds are {', '.join(PROMPT_KINDS)}.")
        if kind == "longer_prefix" and book.pairs:
            raise UnsupportedError(
                f"book {book.name!r} has ready-made pairs: nothing stands before a prompt. Leave longer_prefix out."
            )
    return [kind for kind in kinds or PROMPT_KINDS if kind != "longer_prefix" or not book.pairs]


def _variant(passages: Sequence[Passage], candidates: Callable[[Passage], list[str]], room: "_Room") -> PromptVariant:
    found = [_longest(passage, candidates(passage), room) for passage in passages]
    kept = tuple(each for each in found if isinstance(each, Passage))
    long, leaked = (
        tuple(passage.id for passage, each in zip(passages, found, strict=True) if each == reason)
        for reason in ("did not fit", "leaked")
    )
    return PromptVariant(kept, long, leaked)


def _longest(passage: Passage, prompts: Sequence[str], room: "_Room") -> Passage | Literal["did not fit", "leaked"]:
    """The passage with the longest prompt that fits and gives nothing away, or why there is none."""
    tried = [replace(passage, prompt=prompt) for prompt in prompts]
    clean = bisect_left(tried, True, key=lambda new: not _gives_away(new, passage))
    fitting = bisect_left(tried, True, key=lambda new: room.holds(new, passage))
    if clean == len(tried):
        return "leaked"
    return "did not fit" if fitting == len(tried) else tried[max(clean, fitting)]


@dataclass(frozen=True)
class _Room:
    """What a model's context has room for."""

    protocol: Protocol
    tokenizer: Any
    config: Any

    def holds(self, passage: Passage, plain: Passage) -> bool:
        """Whether the passage can be asked, and its continuation be as long as the plain one's."""
        if self.config is None:
            return True
        (before,) = tokenize_passages([plain], self.protocol, self.tokenizer, self.config)
        try:
            (now,) = tokenize_passages([passage], self.protocol, self.tokenizer, self.config)
        except BadValueError:  # more tokens than the context has
            return False
        # A protocol may bound prompt and continuation together: no new prompt may cost a part of the answer.
        return now.new_tokens >= min(before.new_tokens, len(before.answer_ids))


def _runs(text: str, answer: str) -> set[tuple[str, ...]]:
    """The runs of words of an answer that stand in a text."""
    found = words(answer)
    size = max(1, min(_RUN, len(found)))
    return set(ngrams(words(text), size)) & set(ngrams(found, size))


def _gives_away(passage: Passage, plain: Passage) -> bool:
    return not _runs(passage.prompt, plain.answer) <= _runs(plain.prompt, plain.answer)


@dataclass(frozen=True)
class _Text:
    """A book's text as its passages quote it, and where its words begin."""

    text: str
    name: str

    @cached_property
    def _starts(self) -> list[int]:
        return [found.start() for found in re.finditer(r"\S+", self.text)]

    def place(self, passage: Passage) -> tuple[int, int]:
        """Where a passage begins and ends."""
        whole = passage.prompt + passage.gap + passage.answer
        start = self.text.find(whole)
        if start < 0:
            raise BadValueError(
                f"{passage.id} does not stand in book {self.name!r}. Pass the book and the protocol with which the "
                "passages were found."
            )
        return start, start + len(whole)

    def longer_prompts(self, passage: Passage, times: float) -> list[str]:
        """The prompt with the words before it, with one less, and so on; the prompt alone at the book's beginning."""
        start, _ = self.place(passage)
        here = bisect_left(self._starts, start)
        count = max(1, round((times - 1) * len(passage.prompt.split())))
        begins = self._starts[max(0, here - count) : here] or [start]
        return [self.text[begin:start] + passage.prompt for begin in begins]


def _examples(passage: Passage, others: Sequence[Passage], text: _Text, count: int, seed: int) -> list[Passage]:
    """A few other passages of the same split, at random, that neither overlap this one nor give its answer away."""
    order = [other for other in others if other.split == passage.split and other.id != passage.id]
    random.Random(f"{seed}/in_context/{passage.key}").shuffle(order)
    chosen: list[Passage] = []
    for other in order:
        if len(chosen) == count:
            break
        whole = other.prompt + other.gap + other.answer
        if not _runs(whole, passage.answer) and not (text.text and _overlap(text.place(passage), text.place(other))):
            chosen.append(other)
    return chosen


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _with_examples(passage: Passage, examples: Sequence[Passage]) -> list[str]:
    """The prompt after all examples, after all but the first, and so on, down to one."""
    parts = [other.prompt + other.gap + other.answer for other in examples]
    return ["\n\n".join([*parts[first:], passage.prompt]) for first in range(len(parts))]


def _recased(prompt: str) -> str:
    """In lower case, which keeps most words in the model's vocabulary; in upper case if it is in lower case.

    >>> _recased("The Queen"), _recased("the queen")
    ('the queen', 'THE QUEEN')
    """
    return prompt.lower() if prompt != prompt.lower() else prompt.upper()


def _perturbed(prompt: str, chooser: random.Random) -> str:
    """Some words dropped, swapped with the next or without one of their letters; the last ones are left alone.

    >>> _perturbed("one two three four five six seven eight nine ten eleven twelve", random.Random(0))
    'one two three five four seven eight nine ten eleven twelve'
    """
    lead = prompt[: len(prompt) - len(prompt.lstrip())]
    parts = [list(found) for found in re.findall(r"(\S+)(\s*)", prompt)]
    free = len(parts) - min(_LEFT_ALONE, -(-len(parts) // 2))
    changed = chooser.sample(range(free), min(free, max(1, round(_PERTURBED * len(parts)))))
    for place in sorted(changed, reverse=True):  # from the right, so that places stay what they are
        word = parts[place][0]
        how = chooser.choice(("drop", "swap", "misspell"))
        if how == "swap" and place + 1 < free:
            parts[place][0], parts[place + 1][0] = parts[place + 1][0], word
        elif how != "drop" and len(word) > 2:
            letter = chooser.randrange(1, len(word) - 1)
            parts[place][0] = word[:letter] + word[letter + 1 :]
        else:
            del parts[place]
            free -= 1
    return lead + "".join(word + space for word, space in parts)
