"""Books: every kind of source, clean text, an honest split, and passages that leak nothing."""

import itertools
import re
from dataclasses import replace

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_books import STORY
from transformers import AutoTokenizer

from hf_taskvec.errors import BadValueError, MissingFileError, MissingNameError
from hf_taskvec.evaluation import check_leaks, load_book, protocols
from hf_taskvec.evaluation.texts.cleaning import chapters, mend, prose, sentences
from hf_taskvec.evaluation.texts.passages import find_passages
from hf_taskvec.evaluation.texts.word_tokens import words

SHORT = protocols.get(prompt_length=20, answer_length=10)


@pytest.fixture(scope="module")
def alice(books):
    return load_book(books / "carroll_1_alice.txt", "alice", role="forget", seed=1)


def test_gutenberg_matter_hyphens_and_line_breaks_are_mended(tmp_path):
    raw = (
        "The Project Gutenberg eBook of Tests\r\n\r\nlicence words\r\n\r\n"
        "*** START OF THE PROJECT GUTENBERG EBOOK TESTS ***\r\n\r\nProduced by A. Volunteer\r\n\r\n"
        "Chapter 1\r\n\r\nThe won-\r\nderful well-\r\nknown and well-known thing--\r\nit stood\r\nthere."
        "\r\n\r\n286\r\n\r\n  *  *  *\r\n\r\n  A verse\r\n  of two lines\r\n\r\n" + STORY + "\r\n\r\n"
        "*** END OF THE PROJECT GUTENBERG EBOOK TESTS ***\r\nmore licence\r\n"
    )
    path = tmp_path / "tests.txt"
    path.write_bytes(raw.encode())
    text = load_book(path).text
    assert text.startswith("The wonderful well-known and well-known thing--it stood there.\n\nA verse\nof two lines")
    assert text.endswith(STORY[-30:])
    assert "Gutenberg" not in text and "286" not in text.split("\n\n")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings_are_detected(tmp_path, encoding):
    path = tmp_path / "book.txt"
    path.write_bytes(("“Café,” said Zoë – naïvely. " + STORY).encode(encoding))
    assert load_book(path).text.startswith("“Café,” said Zoë – naïvely.")


@pytest.mark.parametrize("encoding", ["shift_jis", "utf-16-le", "koi8-r"])
def test_an_unexpected_encoding_is_refused_until_it_is_named(tmp_path, encoding):
    path = tmp_path / "odd.txt"
    letters = "Человек пошёл домой. " if encoding == "koi8-r" else "彼は家に帰りました。 "
    path.write_bytes((letters * 200 + STORY).encode(encoding))
    with pytest.raises(BadValueError, match=r"odd\.txt.*encoding"):
        load_book(path)
    assert load_book(path, encoding=encoding).text.startswith(letters.strip())
    with pytest.raises(BadValueError, match="cannot be read as 'ascii'"):
        load_book(path, encoding="ascii")


def test_a_folder_a_dataset_and_a_saved_dataset_give_the_same_book(tmp_path):
    halves = STORY[: STORY.index("Sentence number 450")].strip(), STORY[STORY.index("Sentence number 450") :]
    folder = tmp_path / "chapters"
    folder.mkdir()
    for i, half in enumerate(halves):
        (folder / f"{i}.txt").write_text(half, encoding="utf-8")
    dataset = datasets.Dataset.from_dict({"text": list(halves)})
    dataset.save_to_disk(tmp_path / "saved")
    found = [load_book(source).fingerprint for source in (folder, dataset, tmp_path / "saved")]
    assert len(set(found)) == 1


def test_the_split_is_seeded_and_every_section_ends_a_sentence(alice, books):
    again = load_book(books / "carroll_1_alice.txt", "alice", seed=1)
    other = load_book(books / "carroll_1_alice.txt", "alice", seed=2)
    assert again.sections == alice.sections != other.sections
    ends = {end for _, end in sentences(alice.text)}
    assert all(section.end in ends for section in alice.sections)
    share = sum(s.split == "held_out" for s in alice.sections) / len(alice.sections)
    assert 0.2 < share < 0.4
    covered = "".join(alice.text[s.start : s.end] for s in alice.sections)
    assert words(covered) == words(alice.text) or len(covered) >= 0.999 * len(alice.text.replace("\n\n", ""))


def test_chapters_are_found_and_can_be_the_split(books):
    book = load_book(books / "carroll_1_alice.txt", split_by="chapters", prose=False)
    assert len(book.sections) == 12
    assert all(book.text[s.start :].startswith("CHAPTER") for s in book.sections)
    assert len(chapters(load_book(books / "austen_pride_and_prejudice.txt", prose=False).text)) == 61


FRONT = """
*** START OF THE PROJECT GUTENBERG EBOOK THE LAMPS ***

Produced by Nobody in Particular

THE LAMPS

by

A. Writer

Author of The Boats; The Rooms; and Other Stories, etc.

CONTENTS

CHAPTER I. The First Lamp

CHAPTER II. The Second Lamp

ILLUSTRATIONS

[Illustration: A lamp.]

CHAPTER I.

The First Lamp

"""


def test_front_matter_contents_and_headings_are_not_taken_for_prose(tmp_path):
    first = "\n\n".join(
        f"It was the evening of day {i}, and the lamp was lit as it was on all other days." for i in range(40)
    )
    second = "He said:\n\n“Light it.”\n\n  a song of lamps\n  a song of light\n\nAnd so it was that they lit the lamp."
    whole = f"{FRONT}{first}\n\n[Illustration]\n\nII\n\nThe Second Lamp\n\n{second}\n\nTHE END\n"
    (tmp_path / "lamps.txt").write_text(whole)
    book = load_book(tmp_path / "lamps.txt", split_by="chapters")
    kept = second.replace("  a song", "a song")
    assert book.text == f"{first}\n\n{kept}"
    assert [book.text[each.start : each.end] for each in book.sections] == [first, kept]
    as_it_was = load_book(tmp_path / "lamps.txt", held_out=0.0, prose=False)
    assert as_it_was.text.startswith("THE LAMPS\n\nby") and as_it_was.text.endswith("THE END")
    assert load_book(datasets.Dataset.from_dict({"text": [whole]}), held_out=0.0).text == as_it_was.text


def test_a_text_without_running_text_is_left_alone():
    for text in ("one\n\ntwo\n\nthree", "A TITLE\n\nNo sentence of any length", "Chapter 1\n\nChapter 2"):
        assert prose(text) == (text, chapters(text))


def test_real_books_begin_with_their_first_sentence_and_have_no_headings(shared):
    begins = {
        "carroll_1_alice": ("Alice was beginning to get very tired", 12),
        "carroll_2_looking_glass": ("One thing was certain", 12),
        "austen_pride_and_prejudice": ("It is a truth universally acknowledged", 61),
        "baum_oz_1_wizard": ("Folklore, legends, myths and fairy tales", 24),  # the author's introduction
    }
    for name, (begin, count) in begins.items():
        book = load_book(shared / "books" / f"{name}.txt", split_by="chapters")
        assert book.text.startswith(begin) and len(book.sections) == count
        assert not re.search(r"^(chapter|contents|the end)\b", book.text, re.I | re.M)
        left_out = load_book(shared / "books" / f"{name}.txt", prose=False).text.split("\n\n")
        kept = set(book.text.split("\n\n"))
        longest = max((len(each.split()) for each in left_out[60:] if each not in kept), default=0)
        assert longest <= 12, "what is left out in a book is short"


def test_passages_are_true_continuations_that_start_a_sentence_within_one_section(alice):
    begins = {start for start, _ in sentences(alice.text)}
    windows = []
    for row in alice.passages():
        whole = row["prompt"] + row["gap"] + row["answer"]
        start = alice.text.index(whole)
        assert start in begins
        assert (len(row["prompt"].split()), len(row["answer"].split())) == (100, 50)
        inside = [s for s in alice.sections if s.start <= start and start + len(whole) <= s.end]
        assert [s.split for s in inside] == [row["split"]]
        windows.append((start, start + len(whole)))
    windows.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(windows))


def test_no_answer_leaks_under_our_protocol_checked_by_plain_search(books):
    for path in sorted(books.glob("*.txt")):
        book = load_book(path)
        found = find_passages(book, SHORT)
        assert check_leaks(found, [book.training_text]).clean
        # Independently: the words of an answer as one string, looked for in each prompt and the training.
        prompts = "\n".join(" ".join(words(p.prompt)) for p in found)
        training = " ".join(words(book.training_text))
        for passage in found:
            answer = " ".join(words(passage.answer))
            assert answer not in prompts
            assert passage.split == "seen" or answer not in training


def test_the_leak_check_sees_what_is_planted(alice):
    found = list(find_passages(alice, SHORT))
    seen = next(p for p in found if p.split == "seen")
    held = next(p for p in found if p.split == "held_out")
    found[5] = replace(found[5], prompt="Well, " + seen.answer.upper() + "!")
    report = check_leaks(found, [alice.training_text, held.answer])
    assert seen.id in report.in_prompts
    assert report.in_training == (held.id,)
    assert not report.clean


def test_others_protocols_leak_by_design_and_the_report_says_so(alice):
    ssu = find_passages(alice, "ssu-v1")
    assert len(ssu) == 100
    assert not check_leaks(ssu, [alice.training_text]).clean  # overlapping windows: answers in other prompts


def test_the_authors_ssu_joins_nltk_tokens_and_answers_from_the_next_sentence():
    story = "He came. “Don't go,” she said to Mr. Gray. They all left. It rained. The end was near, and they knew."
    book = load_book(datasets.Dataset.from_dict({"text": [story]}), "story", role="forget", held_out=0.0)
    protocol = protocols.get("ssu-v1-authors", prompt_length=5, answer_length=4, samples=40)
    pairs = {(found.prompt, found.answer) for found in find_passages(book, protocol)}
    # The first prompt ends within the second sentence; the rest of that sentence is skipped.
    assert ("He came . “ Do", "They all left .") in pairs and ("They all left . It", "The end was near") in pairs
    whole = {(p.prompt, p.answer) for p in find_passages(book, protocols.get(protocol, answer_from="prompt"))}
    assert ("He came . “ Do", "n't go , ”") in whole


def test_ssu_v2_is_lower_case_and_strided(alice):
    rows = find_passages(alice, "ssu-v2")
    assert all(row.prompt == row.prompt.lower() and len(row.answer.split()) == 100 for row in rows)


def test_lengths_can_be_counted_in_tokens(alice, shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2")
    protocol = protocols.get(unit="tokens", prompt_length=64, answer_length=32)
    for row in find_passages(alice, protocol, tokenizer)[:20]:
        assert row.prompt + row.gap + row.answer in alice.text
        # White space at the cut belongs to the gap, and its tokens with it.
        assert 62 <= len(tokenizer(row.prompt)["input_ids"]) <= 64
    with pytest.raises(BadValueError, match="tokenizer"):
        find_passages(alice, protocol)


def test_ready_made_pairs_are_cut_to_128_tokens(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2")
    book = load_book(
        datasets.Dataset.from_dict({"prompt": ["Once", "Then"], "gt": ["upon a time " * 100, " it ended."]})
    )
    rows = book.passages("muse-verbmem", tokenizer)
    assert len(tokenizer(rows["answer"][0])["input_ids"]) == 128
    assert rows["answer"][1] == "it ended." and set(rows["split"]) == {"seen"}
    with pytest.raises(BadValueError, match="ready-made pairs"):
        book.passages("taskvec-v1")


def test_training_blocks_hold_only_seen_text(alice, shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2")
    blocks = alice.training_blocks(tokenizer, 128)
    assert set(blocks.column_names) == {"input_ids", "attention_mask", "labels"}
    assert all(len(row) == 128 for row in blocks["input_ids"])
    text = " ".join(words(tokenizer.decode([i for row in blocks["input_ids"] for i in row], skip_special_tokens=True)))
    for passage in find_passages(alice, SHORT):
        if passage.split == "held_out":
            assert " ".join(words(passage.answer)) not in text
    seen = [p for p in find_passages(alice, SHORT) if p.split == "seen"]
    assert sum(" ".join(words(p.answer)) in text for p in seen) > 0.95 * len(seen)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="abcXY .!?\n-’”", max_size=300))
def test_sentences_cover_every_visible_letter_in_order(text):
    text = mend(text)
    spans = sentences(text)
    assert "".join(text[a:b] for a, b in spans).replace(" ", "").replace("\n", "") == re.sub(r"\s", "", text)
    assert all(a < b for a, b in spans) and spans == sorted(spans)


@pytest.mark.parametrize(
    "content, error, message",
    [
        ("", BadValueError, "is empty"),
        ("  \n\n ", BadValueError, "is empty"),
        ("Only one sentence.", BadValueError, "too short to split"),
    ],
)
def test_an_empty_or_too_short_book_is_refused(tmp_path, content, error, message):
    path = tmp_path / "tiny.txt"
    path.write_text(content)
    with pytest.raises(error, match=message):
        load_book(path)


def test_a_book_too_short_for_its_protocol_says_what_to_change():
    book = load_book(datasets.Dataset.from_dict({"text": [STORY]}), "story", block_words=120)
    with pytest.raises(BadValueError, match=r"story.*prompt_length.*block_words"):
        book.passages()


def test_missing_sources_and_columns_are_named(tmp_path):
    with pytest.raises(MissingFileError, match=r"nowhere\.txt"):
        load_book(tmp_path / "nowhere.txt")
    with pytest.raises(MissingFileError, match=r"no \.txt file"):
        load_book(tmp_path)
    with pytest.raises(MissingNameError, match="columns body"):
        load_book(datasets.Dataset.from_dict({"body": ["x"]}))
    with pytest.raises(MissingNameError, match="Did you mean 'forget'"):
        load_book(datasets.Dataset.from_dict({"text": [STORY]}), role="forge")
