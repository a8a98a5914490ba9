"""Texts that are the same, or mostly."""

from __future__ import annotations

from hf_taskvec.evaluation.texts.text_overlap import find_overlap, word_runs

WORDS = [f"word{number}" for number in range(400)]


def text(start: int, end: int) -> str:
    return " ".join(WORDS[start:end])


def test_texts_overlap_if_most_of_the_shorter_one_is_in_the_other() -> None:
    assert find_overlap([word_runs(text(0, 200)), word_runs(text(200, 400))]) is None
    assert find_overlap([word_runs(text(0, 200)), word_runs(text(150, 400))]) is None
    assert find_overlap([word_runs(text(300, 400)), word_runs(text(0, 200)), word_runs(text(50, 150))]) == (1, 2)


def test_one_run_in_eight_tells_the_same() -> None:
    some, all_of_them = word_runs(text(0, 400), one_in=8), word_runs(text(0, 400))
    assert some < all_of_them and 20 < len(some) < 100 and len(all_of_them) == 389
    assert find_overlap([some, word_runs(text(0, 300), one_in=8)]) == (0, 1)


def test_a_text_of_fewer_words_than_a_run_overlaps_with_nothing() -> None:
    assert word_runs(text(0, 11)) == set()
    assert find_overlap([word_runs(text(0, 11))] * 2) is None
