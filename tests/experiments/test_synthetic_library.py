"""The synthetic library and the tiny Phi: deterministic, readable, and free of what would give the experiment away."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from hf_taskvec import TaskVectorError
from hf_taskvec.evaluation.texts.cleaning import sentences
from hf_taskvec.experiments.synthetic_library.book_writer import Library, write_library
from hf_taskvec.experiments.synthetic_library.themes import COMMON, PLAIN, THEMES, VOICES
from hf_taskvec.experiments.synthetic_library.tiny_phi import make_phi, train_tokenizer

WORDS = 3000


@pytest.fixture(scope="module", params=[0, 1, 2])
def texts(request: pytest.FixtureRequest) -> Library:
    return write_library(request.param, words=WORDS, general_words=8000)


def names(text: str) -> set[str]:
    """Capitalised words that do not begin a sentence: people and places."""
    return set(re.findall(r"(?<=[a-z,;] )[A-Z][a-z]+", text))


def test_the_same_seed_writes_the_same_library() -> None:
    one, two = (write_library(5, words=500, general_words=500, unrelated=3) for _ in range(2))
    assert one == two and one != write_library(6, words=500, general_words=500, unrelated=3)


def test_the_words_of_a_seed_stay_the_same_between_versions() -> None:
    """The default experiment's texts are frozen: its published numbers are about them."""
    import hashlib

    found = write_library(0)
    text = "".join([found.general, *(book.text for book in (*found.series, *found.unrelated))])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == FROZEN


def test_lengths_are_as_asked(texts: Library) -> None:
    for book in (*texts.series, *texts.unrelated):
        assert WORDS <= len(book.text.split()) < WORDS + 200
    assert 8000 <= len(texts.general.split()) < 8200


def test_books_are_made_of_sentences(texts: Library) -> None:
    for book in (*texts.series, *texts.unrelated):
        for paragraph in book.text.strip().split("\n\n"):
            if not paragraph.startswith("Chapter "):
                assert re.fullmatch(r"""["A-Z].*[.!?]"?""", paragraph), paragraph
                assert "{" not in paragraph and "  " not in paragraph
                assert not re.search(r"\b[Aa] [aeiou]", paragraph), paragraph
                assert not re.search(r"\b(\w+) \1\b", paragraph), paragraph  # a word twice in a row
        lengths = [len(book.text[a:b].split()) for a, b in sentences(book.text)]
        assert 6 < sum(lengths) / len(lengths) < 18


def test_a_book_does_not_repeat_itself(texts: Library) -> None:
    for book in (*texts.series, *texts.unrelated):
        found = book.text.split()
        runs = [tuple(found[i : i + 12]) for i in range(len(found) - 11)]
        assert len(set(runs)) > 0.95 * len(runs)


def test_the_series_shares_its_cast_and_nothing_else_does(texts: Library) -> None:
    first, second = (names(book.text) for book in texts.series)
    days = {*COMMON["day"], "Saturn"}
    shared = first & second - days
    assert len(shared) >= 10  # six people, five places
    assert (first - second) and (second - first)  # each volume has some of its own
    for other in (*(book.text for book in texts.unrelated), texts.general):
        assert not (shared - {"Dear", "Dearest"}) & names(other)


def test_the_volumes_agree_on_what_their_places_are_like() -> None:
    """Which sight goes with which place can be learnt from the other volume."""
    found = write_library(0, words=12_000, general_words=200)
    theme = THEMES[found.series[0].name.removesuffix("-1")]
    first: dict[str, Counter[str]] = {}
    second: dict[str, Counter[str]] = {}
    for volume, seen in zip(found.series, (first, second), strict=True):
        for scene in volume.text.split("\n\n"):
            places = re.findall(r"the [a-z ]+ of [A-Z][a-z]+", scene)
            for sight in theme.sight:
                if places and sight in scene:
                    seen.setdefault(places[0], Counter())[sight] += 1
    shared = [place for place in first.keys() & second.keys() if min(first[place].total(), second[place].total()) >= 8]
    assert len(shared) >= 4
    agreed = [place for place in shared if first[place].most_common(1)[0][0] == second[place].most_common(1)[0][0]]
    assert len(agreed) >= 0.7 * len(shared)  # by chance one in eight


def test_the_volumes_tell_different_scenes(texts: Library) -> None:
    first, second = (set(book.text.split("\n\n")) for book in texts.series)
    assert not {scene for scene in first & second if not scene.startswith("Chapter")}


def test_as_many_unrelated_books_as_there_are_themes() -> None:
    found = write_library(0, words=300, general_words=300, unrelated=len(THEMES) - 1)
    titles = [book.name for book in (*found.series, *found.unrelated)]
    assert len(set(titles)) == len(titles) == len(THEMES) + 1
    with pytest.raises(TaskVectorError, match="themes for 0 to"):
        write_library(0, unrelated=len(THEMES))
    with pytest.raises(TaskVectorError, match="at least 200"):
        write_library(0, words=10)


def test_every_slot_of_every_pattern_can_be_filled() -> None:
    known = {*COMMON, *vars(next(iter(THEMES.values()))), "a", "b", "place"}
    for beats in (*VOICES.values(), PLAIN):
        assert len(beats) == 5
        for pattern in (pattern for beat in beats for pattern in beat):
            for slot in re.findall(r"\{(\w+)", pattern):
                assert slot.rstrip("2") in known, pattern


def test_the_tokenizer_loses_nothing(texts: Library) -> None:
    tokenizer = train_tokenizer(texts.general, 600)
    for text in (texts.series[0].text, "Ünïcode — “quoted” 猫\n\ttabs"):
        assert tokenizer.decode(tokenizer(text, verbose=False)["input_ids"]) == text
    assert train_tokenizer(texts.general, 600).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(TaskVectorError, match="byte-level"):
        train_tokenizer(texts.general, 100)


def test_the_model_is_a_real_phi_of_about_a_million() -> None:
    import torch
    from transformers import PhiForCausalLM

    state = torch.get_rng_state()
    model = make_phi(2048)
    assert isinstance(model, PhiForCausalLM) and 0.8e6 < model.num_parameters() < 1.6e6
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's random numbers are touched
    same, other = make_phi(2048), make_phi(2048, seed=1)
    assert torch.equal(same.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


FROZEN = "0e00c330296789bf"
