"""Other prompts: what each is made of, no answer given away, and nothing longer than the model reads."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
from support.tiny_books import make_tokenizer, tiny_llama

from hf_taskvec.auditing.attacks.prompting import PROMPT_KINDS, QUESTION, prompt_variants
from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError
from hf_taskvec.evaluation import load_book, protocols
from hf_taskvec.evaluation.asking.batch_plan import tokenize_passages
from hf_taskvec.evaluation.texts.books import Book, Pair
from hf_taskvec.evaluation.texts.passages import find_passages
from hf_taskvec.evaluation.texts.protocols import Decoding
from hf_taskvec.evaluation.texts.word_tokens import words

PROTOCOL = protocols.get(prompt_length=30, answer_length=12, samples=None)


def made_up_text(count: int = 4000) -> str:
    chooser = random.Random(0)
    letters = "abcdefghijklmnop"
    sentences = []
    for _ in range(count // 10):
        found = ["".join(chooser.choices(letters, k=chooser.randrange(2, 8))) for _ in range(10)]
        sentences.append(" ".join(found).capitalize() + ".")
    return "\n\n".join(" ".join(sentences[i : i + 7]) for i in range(0, len(sentences), 7))


@pytest.fixture(scope="module")
def book() -> Book:
    return load_book(datasets.Dataset.from_dict({"text": [made_up_text()]}), "The Book", block_words=400)


@pytest.fixture(scope="module")
def passages(book: Book):
    return find_passages(book, PROTOCOL)


@pytest.fixture(scope="module")
def variants(book, passages):
    return prompt_variants(passages, book, PROTOCOL)


def holds_part_of(prompt: str, answer: str) -> bool:
    """Whether eight words in a row of the answer stand in the prompt, by searching text in text."""
    text, found = f" {' '.join(words(prompt))} ", words(answer)
    return any(f" {' '.join(found[i : i + 8])} " in text for i in range(max(1, len(found) - 7)))


@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_a_variant_keeps_all_but_the_prompt_and_gives_nothing_away(variants, passages, kind) -> None:
    variant = variants[kind]
    assert [p.id for p in variant.passages] == [p.id for p in passages] and len(passages) > 50
    assert variant.did_not_fit == variant.leaked == ()
    for new, plain in zip(variant.passages, passages, strict=True):
        assert replace(new, prompt=plain.prompt) == plain
        assert not holds_part_of(new.prompt, new.answer)
    changed = sum(new.prompt != plain.prompt for new, plain in zip(variant.passages, passages, strict=True))
    assert changed >= len(passages) - 1  # nothing stands before the first words of the book


def test_a_longer_prefix_is_the_books_own_text(variants, book, passages) -> None:
    for new, plain in zip(variants["longer_prefix"].passages, passages, strict=True):
        assert new.prompt.endswith(plain.prompt) and new.prompt + new.gap + new.answer in book.text
        before = book.text.index(plain.prompt)
        assert len(new.prompt.split()) == min(60, 30 + len(book.text[:before].split()))
    (first,) = [p for p in variants["longer_prefix"].passages if book.text.startswith(p.prompt)][:1]
    assert len(first.prompt.split()) < 60


def test_the_book_is_asked_for_by_its_name(variants, book, passages) -> None:
    question = QUESTION.format(title="The Book")
    assert all(
        new.prompt == question + plain.prompt
        for new, plain in zip(variants["asked_outright"].passages, passages, strict=True)
    )
    called = prompt_variants(passages, book, PROTOCOL, kinds=["asked_outright"], title="Alice")
    assert list(called) == ["asked_outright"] and "from Alice." in called["asked_outright"].passages[0].prompt


def test_examples_are_other_passages_of_the_same_split(variants, passages) -> None:
    wholes = {p.prompt + p.gap + p.answer: p for p in passages}
    used = set()
    for new, plain in zip(variants["in_context"].passages, passages, strict=True):
        assert new.prompt.endswith("\n\n" + plain.prompt)
        rest = new.prompt.removesuffix("\n\n" + plain.prompt)
        shown = [p for whole, p in wholes.items() if whole in rest]
        assert len(rest) == sum(len(p.prompt + p.gap + p.answer) for p in shown) + 2 and len(shown) == 2
        assert all(p.split == plain.split and p.id != plain.id for p in shown)
        used.update(p.id for p in shown)
    assert len(used) > 0.5 * len(passages)  # not the same ones for all


def test_passages_that_overlap_are_no_examples(book) -> None:
    near = protocols.get(PROTOCOL, placement="stride", stride=3, leak_free=False, samples=12)
    passages = find_passages(book, near)
    variant = prompt_variants(passages, book, near, kinds=["in_context"], examples=30)["in_context"]
    by_id = {p.id: p for p in passages}
    places = {p.id: book.text.index(p.prompt + p.gap + p.answer) for p in passages}
    shown = 0
    for new in variant.passages:
        plain = by_id[new.id]
        for other in passages:
            if other.prompt + other.gap + other.answer in new.prompt:
                shown += 1
                whole = len(other.prompt + other.gap + other.answer)
                own = len(plain.prompt + plain.gap + plain.answer)
                one, two = places[plain.id], places[other.id]
                assert one + own <= two or two + whole <= one
        assert not holds_part_of(new.prompt, new.answer)
    assert shown > 0
    alone = prompt_variants(passages[:1], book, near, kinds=["in_context"])["in_context"]
    assert alone.leaked == (passages[0].id,) and not alone.passages  # there is nothing to show


def test_case_is_all_that_recasing_changes(variants, passages, book) -> None:
    for new, plain in zip(variants["recased"].passages, passages, strict=True):
        assert new.prompt == plain.prompt.lower() != plain.prompt
    lower = protocols.get(PROTOCOL, lower_case=True)
    small = find_passages(book, lower)
    again = prompt_variants(small, book, lower)
    assert all(p.prompt == p.prompt.upper() for p in again["recased"].passages)
    assert all(p.prompt == p.prompt.lower() for p in again["longer_prefix"].passages)


def test_perturbed_prompts_keep_their_end(variants, passages) -> None:
    kinds = set()
    for new, plain in zip(variants["perturbed"].passages, passages, strict=True):
        before, after = plain.prompt.split(), new.prompt.split()
        assert after[-10:] == before[-10:] and after != before
        missing = [word for word in before if word not in after]
        assert len(missing) <= 4 and len(before) - 4 <= len(after) <= len(before)  # a share of 0.15 of 30 words
        kinds.add("dropped" if len(after) < len(before) else "misspelt" if missing else "swapped")
    assert kinds >= {"dropped", "misspelt"}


def test_variants_are_those_of_the_seed(book, passages, variants) -> None:
    assert prompt_variants(passages, book, PROTOCOL) == variants
    other = prompt_variants(passages, book, PROTOCOL, seed=1)
    for kind in PROMPT_KINDS:
        assert (other[kind] == variants[kind]) == (kind not in ("in_context", "perturbed"))
    # Which other passages are asked for changes nothing but the examples.
    fewer = prompt_variants(passages[3:9], book, PROTOCOL, kinds=["perturbed"])
    assert fewer["perturbed"].passages == variants["perturbed"].passages[3:9]


def test_prompts_fit_the_models_context_or_are_named(book, passages) -> None:
    tokenizer = make_tokenizer()
    sizes = [len(tokenizer(p.prompt + p.gap + p.answer)["input_ids"]) for p in passages]
    room = sorted(sizes)[len(sizes) // 2] + 30  # for the half of the passages little more than the plain ones
    config = tiny_llama(context=room).config
    asked = [p for p, size in zip(passages, sizes, strict=True) if size <= room]
    whole = prompt_variants(asked, book, PROTOCOL)
    found = prompt_variants(asked, book, PROTOCOL, tokenizer, config)
    for variant in found.values():
        tokenize_passages(variant.passages, PROTOCOL, tokenizer, config)  # raises if one is too long
        assert len(variant.passages) + len(variant.did_not_fit) == len(asked) and not variant.leaked
    assert found["recased"].passages and found["perturbed"].passages
    assert len(found["in_context"].did_not_fit) == len(asked)  # no example has room
    shortened = found["longer_prefix"]
    assert len(shortened.passages) > 0.4 * len(asked)
    for new in shortened.passages:
        plain = next(p for p in asked if p.id == new.id)
        full = next(p for p in whole["longer_prefix"].passages if p.id == new.id)
        assert full.prompt.endswith(new.prompt) and new.prompt.endswith(plain.prompt)
        extra = len(new.prompt.split()) - len(plain.prompt.split())
        if new.prompt != full.prompt:  # as many words as fit: one more is too long
            longer = " ".join(full.prompt.split()[-len(new.prompt.split()) - 1 :])
            assert extra > 0 and len(tokenizer(longer + new.gap + new.answer)["input_ids"]) >= room - 2


def test_fewer_examples_are_shown_where_all_have_no_room(book, passages) -> None:
    tokenizer = make_tokenizer()
    most = max(len(tokenizer(p.prompt + p.gap + p.answer)["input_ids"]) for p in passages)
    config = tiny_llama(context=2 * most + 9).config
    found = prompt_variants(passages, book, PROTOCOL, tokenizer, config, kinds=["in_context"], examples=5)["in_context"]
    whole = prompt_variants(passages, book, PROTOCOL, kinds=["in_context"], examples=5)["in_context"]
    assert not found.did_not_fit
    for new, full in zip(found.passages, whole.passages, strict=True):
        assert full.prompt.endswith(new.prompt) and len(new.prompt) < len(full.prompt)  # the first ones are left out


def test_a_prompt_costs_nothing_of_the_answer(book, passages) -> None:
    """A protocol that bounds prompt and continuation together would generate less after a longer prompt."""
    tokenizer, config = make_tokenizer(), tiny_llama(context=4096).config
    (before,) = tokenize_passages(passages[5:6], PROTOCOL, tokenizer, config)
    total = len(before.prompt_ids) + len(before.answer_ids) + 5
    bound = protocols.get(PROTOCOL, decoding=Decoding(total_length=total))
    found = prompt_variants(passages[5:6], book, bound, tokenizer, config, kinds=["longer_prefix", "asked_outright"])
    assert found["asked_outright"].did_not_fit == (passages[5].id,)
    for new in tokenize_passages(found["longer_prefix"].passages, bound, tokenizer, config):
        assert new.new_tokens >= len(before.answer_ids)


def test_a_prefix_that_gives_the_answer_away_is_cut_or_left_out(book, passages) -> None:
    plain = passages[5]
    start = book.text.index(plain.prompt)
    told = plain.answer.lower()
    # Some way before the prompt: the longest prefix without it is taken.
    before = book.text[:start].rstrip().rsplit(" ", 6)
    text = before[0] + f" {told} " + " ".join(before[1:]) + book.text[len(book.text[:start].rstrip()) :]
    tampered = replace(book, text=text)
    variant = prompt_variants([plain], tampered, PROTOCOL, kinds=["longer_prefix"])["longer_prefix"]
    (new,) = variant.passages
    assert not holds_part_of(new.prompt, new.answer)
    assert len(new.prompt.split()) == 30 + 6 + 7  # the words between, and seven of the answer
    # A pair of a book that repeats itself: each other one gives it away.
    pairs = tuple(Pair(f"Question {i}?", "The one and only answer.", "seen") for i in range(3))
    quiz = Book("quiz", "", (), pairs=pairs)
    muse = protocols.get("muse-verbmem", unit="words")
    asked = [replace(plain, id=f"quiz/{i}", book="quiz", prompt=p.prompt, answer=p.answer) for i, p in enumerate(pairs)]
    found = prompt_variants(asked, quiz, muse)
    assert found["in_context"].leaked == ("quiz/0", "quiz/1", "quiz/2") and "longer_prefix" not in found
    assert len(found["perturbed"].passages) == 3


def test_what_cannot_be_asked_is_refused(book, passages) -> None:
    with pytest.raises(MissingNameError, match="Did you mean 'recased'"):
        prompt_variants(passages, book, PROTOCOL, kinds=["recase"])
    pairs = Book("quiz", "", (), pairs=(Pair("a", "b", "seen"),))
    with pytest.raises(UnsupportedError, match="nothing stands before"):
        prompt_variants([], pairs, PROTOCOL, kinds=["longer_prefix"])
    with pytest.raises(BadValueError, match="not of book 'The Book'"):
        prompt_variants([replace(passages[0], book="another")], book, PROTOCOL)
    with pytest.raises(BadValueError, match="does not stand in book"):
        prompt_variants([replace(passages[0], prompt="Words of another book")], book, PROTOCOL)
    with pytest.raises(BadValueError, match="pass its tokenizer"):
        prompt_variants(passages, book, PROTOCOL, config=SimpleNamespace())
    for wrong in ({"times": 1.0}, {"examples": 0}):
        with pytest.raises(BadValueError, match=next(iter(wrong))):
            prompt_variants(passages, book, PROTOCOL, **wrong)
