"""The whole way on a real model and real books: fine-tune, sweep, read the report."""

import copy
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from support.tiny_books import InPlaceEdit, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_taskvec.evaluation import load_book, protocols, rouge_l, sweep
from hf_taskvec.evaluation.scoring.statistics import Bootstrap

SHORT = protocols.get(prompt_length=20, answer_length=12, samples=40)
FAST = {"resamples": 500, "permutations": 500}


def excerpt(path, name, role, begin, words):
    """The beginning of a real book: so much as a tiny model can learn by heart in seconds."""
    text = load_book(path, prose=False).text
    text = " ".join(text[text.index(begin) :].split(" ")[:words])
    return load_book(datasets.Dataset.from_dict({"text": [text]}), name, role=role, block_words=100, held_out=0.4)


def difference_edit(model, tuned, base):
    """λ(θ_tuned − θ_base) on top of another model of the same shape."""
    edit = InPlaceEdit(base, tuned, "tuned − base")
    edit._pairs = [
        (parameter, parameter.detach().clone(), delta)
        for parameter, (_, _, delta) in zip(model.parameters(), edit._pairs, strict=True)
    ]
    return edit


@pytest.fixture(scope="module")
def learnt(shared, books):
    folder = shared / "models" / "stories260K"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    alice = excerpt(books / "carroll_1_alice.txt", "Alice", "forget", "CHAPTER I.", 800)
    oz = excerpt(books / "baum_oz_1_wizard.txt", "Oz", "retain", "Dorothy lived in", 800)
    torch.manual_seed(0)
    joint = train(copy.deepcopy(base), tokenizer, [alice, oz], 500, length=96, lr=3e-3)
    single = train(copy.deepcopy(base), tokenizer, [alice], 45, length=96, lr=2e-3)
    return tokenizer, base, joint, single, [alice, oz]


@pytest.fixture(scope="module")
def report(learnt, tmp_path_factory):
    tokenizer, base, joint, single, books = learnt
    model = copy.deepcopy(joint)
    output = tmp_path_factory.mktemp("sweep")
    edit = difference_edit(model, single, base)
    scales = (0, -0.4, -0.8)
    return sweep(model, edit, scales, books, SHORT, tokenizer=tokenizer, output=output, reference=base, **FAST)


def test_what_was_trained_on_scores_higher_than_what_was_held_out(report):
    for book in ("Alice", "Oz"):
        for metric in ("rouge_l", "rouge_l_recall", "exact_memorisation", "longest_run", "min_k"):
            seen = report.score(book, 0.0, metric, "seen").value
            held_out = report.score(book, 0.0, metric, "held_out").value
            assert seen.low > held_out.high, (book, metric)
        perplexity = [report.score(book, 0.0, "perplexity", split).value for split in ("seen", "held_out")]
        assert perplexity[0].high < perplexity[1].low
    assert all(found.auc.low > 0.5 for found in report.membership if found.scale == 0)


def test_shuffled_answers_score_at_chance(report):
    """Each output against every other passage's answer: within 0.05 of what true answers score against each other."""
    seen = [p for p in report.passages if p.split == "seen"]

    def against_others(texts):
        pairs = [
            [rouge_l(text, q.answer).fmeasure for q in seen if q is not p] for p, text in zip(seen, texts, strict=True)
        ]
        return np.mean(pairs, axis=1)

    shuffled = against_others([p.at[0].output for p in seen])
    chance = against_others([p.answer for p in seen])
    true = [p.at[0].values["rouge_l"] for p in seen]
    assert Bootstrap(len(seen)).difference(shuffled, chance).within(0.05)
    assert np.mean(true) > 2 * np.mean(shuffled)


def test_an_untouched_model_shows_no_significant_drop(learnt):
    """Weights that moved by a ten-thousandth of their spread: other logits, but nothing was forgotten."""
    tokenizer, _, joint, _, books = learnt
    model = copy.deepcopy(joint)
    noisy = copy.deepcopy(joint)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        for parameter in noisy.parameters():
            parameter.add_(1e-4 * parameter.std() * torch.randn(parameter.shape, generator=draw))
    found = sweep(model, InPlaceEdit(model, noisy), [0, 1], books, SHORT, tokenizer=tokenizer, **FAST)
    for book in ("Alice", "Oz"):
        assert found.score(book, 1.0).difference.covers(0)
        assert found.score(book, 1.0, "exact_memorisation").difference.covers(0)
    assert all(test.p_value > 0.05 for test in found.tests)


def test_negation_forgets_the_book_and_the_report_is_sure_of_it(report):
    assert report.score("Alice", -0.8).difference.high < 0
    assert report.score("Alice", -0.8, "perplexity").relative.low > 0
    assert report.leaks.clean
    reference = report.choice.candidates[0].target
    assert reference < report.score("Alice", 0.0).value.low  # the untuned model never saw the book
    counts = Counter((p.book, p.split) for p in report.passages)
    assert min(counts.values()) >= 6


@pytest.mark.slow
def test_of_three_books_the_one_to_forget_surely_loses_at_minus_one(shared, books, tmp_path):
    """stories15M on excerpts of three books: forget, aligned (same author), less aligned (another)."""
    folder = shared / "models" / "stories15M"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    three = [
        excerpt(books / "carroll_1_alice.txt", "Alice", "forget", "CHAPTER I.", 1500),
        excerpt(books / "carroll_2_looking_glass.txt", "Looking-Glass", "aligned", "One thing was", 1500),
        excerpt(books / "baum_oz_1_wizard.txt", "Oz", "retain", "Dorothy lived in", 1500),
    ]
    torch.manual_seed(0)
    joint = train(copy.deepcopy(base), tokenizer, three, 150, length=96, lr=1e-3)
    single = train(copy.deepcopy(base), tokenizer, three[:1], 40, length=96, lr=1e-3)
    edit = difference_edit(joint, single, base)
    scales = (0, -0.2, -0.4, -0.6, -0.8, -1)
    found = sweep(joint, edit, scales, three, SHORT, tokenizer=tokenizer, output=tmp_path, reference=base, **FAST)
    for book in three:
        seen, held_out = (found.score(book.name, 0.0, split=s).value for s in ("seen", "held_out"))
        assert seen.low > held_out.high
    assert found.score("Alice", -1.0).relative.high < 0
