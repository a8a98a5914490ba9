"""Passages: a prompt from a book and its true continuation, placed as the protocol says."""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.books import SPLITS, Book, Pair, Section, Split
from hf_taskvec.evaluation.texts.cleaning import Span, sentences
from hf_taskvec.evaluation.texts.protocols import Protocol


@dataclass(frozen=True)
class Passage:
    """A prompt and what truly follows it.

    Args:
        id (`str`):
            The book, the split and a number.
        book (`str`):
            The book's name.
        split (`"seen"` or `"held_out"`):
            Whether a model may have been trained on it.
        prompt, answer (`str`):
            What the model is given, and the true continuation.
        gap (`str`):
            The white space between the two.
    """

    id: str
    book: str
    split: Split
    prompt: str
    gap: str
    answer: str

    @property
    def key(self) -> str:
        """sha256 of the text itself: a store knows a passage by what it says."""
        return hashlib.sha256(repr((self.prompt, self.gap, self.answer)).encode()).hexdigest()


def find_passages(book: Book, protocol: str | Protocol | None = None, tokenizer: Any = None) -> tuple[Passage, ...]:
    """The passages of a book, seen ones first, in the order of the book; the same for the same seeds.

    Under a leak-free protocol, passages whose answer stands elsewhere (see `leaks`) are left out first.
    """
    protocol = protocols.get(protocol)
    if (protocol.placement == "given") != bool(book.pairs):
        kind = "has ready-made pairs" if book.pairs else "is running text"
        use = "muse-verbmem or open-unlearning" if book.pairs else "taskvec-v1 or one of the ssu protocols"
        raise BadValueError(f"book {book.name!r} {kind}, which protocol {protocol.name!r} cannot use; take {use}")
    if protocol.unit == "tokens" and tokenizer is None:
        raise BadValueError(f"protocol {protocol.name!r} counts tokens: pass the model's tokenizer")
    found: list[Passage] = []
    for split in SPLITS:
        place = _given if book.pairs else _joined if protocol.word_tokens == "nltk" else _placed
        found += place(book, split, protocol, tokenizer)
    if protocol.leak_free:
        from hf_taskvec.evaluation.texts.leaks import without_leaks

        found = list(without_leaks(found, [book.training_text])[0])
    chosen = [passage for split in SPLITS for passage in _sample([p for p in found if p.split == split], protocol)]
    for split in SPLITS:
        wanted = any(section.split == split for section in book.sections)
        if wanted and not any(passage.split == split for passage in chosen):
            longest = max(
                (len(book.text[s.start : s.end].split()) for s in book.sections if s.split == split),
                default=0,
            )
            raise BadValueError(
                f"book {book.name!r} is too short for protocol {protocol.name!r}: no {split} passage of "
                f"{protocol.prompt_length}+{protocol.answer_length} {protocol.unit} fits (the longest "
                f"{split} section has {longest} words). Use shorter passages "
                "(protocols.get(..., prompt_length=...)), a larger block_words, or a longer book"
            )
    return tuple(
        replace(p, id=f"{book.name}/{split}/{i:04d}")
        for split in SPLITS
        for i, p in enumerate([p for p in chosen if p.split == split])
    )


def _sample(candidates: list[Passage], protocol: Protocol) -> list[Passage]:
    if protocol.samples is None or len(candidates) <= protocol.samples:
        return candidates
    chooser = random.Random(f"{protocol.seed}/passages")
    return [candidates[i] for i in sorted(chooser.sample(range(len(candidates)), protocol.samples))]


def _given(book: Book, split: Split, protocol: Protocol, tokenizer: Any) -> Iterator[Passage]:
    for pair in book.pairs:
        if pair.split == split:
            gap = pair.answer[: len(pair.answer) - len(pair.answer.lstrip())]
            if not gap and not pair.prompt[-1:].isspace():
                gap = " "
            body = _cut(pair, gap, protocol, tokenizer).lstrip()
            if not body or not pair.prompt.strip():
                raise BadValueError(f"book {book.name!r} has a pair with an empty prompt or answer; remove it")
            yield _passage(book, split, protocol, pair.prompt, gap, body)


def _cut(pair: Pair, gap: str, protocol: Protocol, tokenizer: Any) -> str:
    """The first `answer_length` tokens of a ready-made answer, counted as the protocol says."""
    if protocol.cut == "after_prompt":
        before = len(tokenizer(pair.prompt)["input_ids"])
        ids = tokenizer(pair.prompt + gap + pair.answer.lstrip())["input_ids"][before:]
    else:
        ids = tokenizer(pair.answer, add_special_tokens=protocol.cut == "with_specials")["input_ids"]
    ids = ids[: protocol.answer_length]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _placed(book: Book, split: Split, protocol: Protocol, tokenizer: Any) -> Iterator[Passage]:
    """Every candidate of the split. A passage never leaves its section: what is held out is so entirely."""
    sections = [section for section in book.sections if section.split == split]
    spans = [_units(book.text, section, protocol, tokenizer) for section in sections]
    size = protocol.prompt_length + protocol.answer_length
    places: list[tuple[int, int]] = []  # section, first unit
    for number, (section, units) in enumerate(zip(sections, spans, strict=True)):
        if protocol.placement == "stride":
            starts = list(range(0, len(units), protocol.stride))
        else:
            begins = {section.start + a for a, _ in sentences(book.text[section.start : section.end])}
            starts = [i for i, (start, _) in enumerate(units) if start in begins]
        free = 0
        for start in starts:
            if start >= free and start + size <= len(units):
                places.append((number, start))
                if protocol.placement == "disjoint":
                    free = start + size
    if protocol.placement == "random" and places and protocol.samples is not None:
        # SSU draws with replacement; the order of the draws is the order of the passages.
        chooser = random.Random(f"{protocol.seed}/{split}/places")
        places = [chooser.choice(places) for _ in range(protocol.samples)]
    for number, start in places:
        units = spans[number]
        middle, last = start + protocol.prompt_length, start + size
        prompt = book.text[units[start][0] : units[middle - 1][1]]
        rest = book.text[units[middle - 1][1] : units[last - 1][1]]
        answer = rest.lstrip()
        yield _passage(book, split, protocol, prompt, rest[: len(rest) - len(answer)], answer)


def _joined(book: Book, split: Split, protocol: Protocol, tokenizer: Any) -> Iterator[Passage]:
    """Passages of NLTK's tokens joined by spaces, at random sentences, as SSU's authors build them."""
    from nltk.tokenize import NLTKWordTokenizer  # it needs none of NLTK's data, as the sentences are ours

    words, found = NLTKWordTokenizer(), []
    for section in book.sections:
        if section.split != split:
            continue
        text = book.text[section.start : section.end]
        tokens = [words.tokenize(text[start:stop]) for start, stop in sentences(text)]
        found += [pair for first in range(len(tokens)) if (pair := _pair(tokens, first, protocol))]
    if found and protocol.samples is not None:
        chooser = random.Random(f"{protocol.seed}/{split}/places")
        found = [chooser.choice(found) for _ in range(protocol.samples)]
    for prompt, answer in found:
        yield _passage(book, split, protocol, " ".join(prompt), " ", " ".join(answer))


def _pair(tokens: list[list[str]], first: int, protocol: Protocol) -> tuple[list[str], list[str]] | None:
    """Prompt and answer from a sentence on; None where too little follows."""
    prompt: list[str] = []
    after = first
    while len(prompt) < protocol.prompt_length and after < len(tokens):
        prompt += tokens[after]
        after += 1
    rest = [] if protocol.answer_from == "next_sentence" else prompt[protocol.prompt_length :]
    while len(rest) < protocol.answer_length and after < len(tokens):
        rest += tokens[after]
        after += 1
    prompt, answer = prompt[: protocol.prompt_length], rest[: protocol.answer_length]
    whole = len(prompt) == protocol.prompt_length and len(answer) == protocol.answer_length
    return (prompt, answer) if whole else None


def _passage(book: Book, split: Split, protocol: Protocol, prompt: str, gap: str, answer: str) -> Passage:
    if protocol.lower_case:
        prompt, answer = prompt.lower(), answer.lower()
    return Passage("", book.name, split, prompt, gap, answer)


def _units(text: str, section: Section, protocol: Protocol, tokenizer: Any) -> list[Span]:
    """Where each word or token of a section stands in the text."""
    part = text[section.start : section.end]
    if protocol.unit == "words":
        local = [found.span() for found in re.finditer(r"\S+", part)]
    else:
        encoded = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        local = []
        for start, end in encoded["offset_mapping"]:
            # Some tokenizers count the space before a word as part of it; sentences start at a letter.
            lead = len(part[start:end]) - len(part[start:end].lstrip())
            local.append((start + lead, end))
    return [(section.start + start, section.start + end) for start, end in local]
