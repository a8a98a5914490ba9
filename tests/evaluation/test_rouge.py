"""Rouge-L against the two packages whose numbers it promises to give."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer

from hf_taskvec.evaluation import rouge_l
from hf_taskvec.evaluation.scoring.rouge import pypi_rouge_l
from hf_taskvec.evaluation.texts.word_tokens import words

PEER = {stemmer: RougeScorer(["rougeL"], use_stemmer=stemmer) for stemmer in (False, True)}
# Few words, so that they repeat and common subsequences are long; endings that the stemmer cuts; odd letters.
VOCABULARY = [
    "the",
    "cats",
    "running",
    "runner",
    "ran",
    "happily",
    "x",
    "42",
    "naïve",
    "İstanbul",
    "don't",
    "’",
    "ﬁne",
]
texts = st.one_of(st.text(max_size=80), st.lists(st.sampled_from(VOCABULARY), max_size=60).map(" ".join))


def assert_equal_to_the_peer(prediction: str, reference: str, stemmer: bool) -> None:
    ours = dataclasses.astuple(rouge_l(prediction, reference, stemmer=stemmer))
    peer = PEER[stemmer].score(reference, prediction)["rougeL"]
    assert ours == (peer.precision, peer.recall, peer.fmeasure)  # no tolerance: the same bits


@settings(max_examples=300, deadline=None)
@given(texts, texts, st.booleans())
def test_any_text_scores_as_in_rouge_score(prediction, reference, stemmer):
    assert_equal_to_the_peer(prediction, reference, stemmer)


@pytest.mark.parametrize("stemmer", [False, True])
def test_real_passages_score_as_in_rouge_score(books, stemmer):
    for path in sorted(books.glob("*.txt")):
        found = path.read_text(encoding="utf-8").split()
        for start in range(2000, 12000, 2500):
            assert_equal_to_the_peer(
                " ".join(found[start : start + 200]), " ".join(found[start + 77 : start + 227]), stemmer
            )


@pytest.mark.parametrize("prediction, reference", [("", ""), ("", "a"), ("a", ""), ("…—", "a b"), ("a", "…")])
def test_empty_texts_score_zero(prediction, reference):
    assert dataclasses.astuple(rouge_l(prediction, reference)) == (0.0, 0.0, 0.0)


def test_precision_and_recall_are_not_swapped():
    score = rouge_l("the cat", "the cat sat down")
    assert (score.precision, score.recall) == (1.0, 0.5)


def test_words_are_those_of_rouge_score():
    from rouge_score import tokenize

    text = "The naïve cats’ 3 INFRARED_lamps\tdon't\n\nrun—ever."
    assert words(text) == tokenize.tokenize(text, None)


@settings(max_examples=150, deadline=None)
@given(*[st.lists(st.sampled_from([*VOCABULARY, "end.", "."]), min_size=1, max_size=40).map(" ".join)] * 2)
def test_the_pypi_variant_gives_the_numbers_of_that_package(prediction, reference):
    try:
        peer = Rouge(metrics=["rouge-l"]).get_scores(prediction, reference)[0]["rouge-l"]
    except ValueError:  # nothing but full stops
        return
    ours = pypi_rouge_l(prediction, reference)
    assert (ours.precision, ours.recall, ours.fmeasure) == (peer["p"], peer["r"], peer["f"])


def test_the_evaluate_metric_loads_offline_and_agrees():
    from hf_taskvec.evaluation.scoring.rouge_metric import RougeL

    predictions, references = ["the cats ran", "", "a b c"], ["the cat runs home", "a", "c b a"]
    each = RougeL().compute(predictions=predictions, references=references, use_stemmer=True, use_aggregator=False)
    expected = [PEER[True].score(r, p)["rougeL"].fmeasure for p, r in zip(predictions, references, strict=True)]
    assert each["rougeL"] == expected
    means = RougeL().compute(predictions=predictions, references=references, use_stemmer=True)
    assert means["rougeL"] == pytest.approx(sum(expected) / 3)


def test_importing_the_package_costs_neither_torch_nor_transformers():
    code = (
        "import sys, hf_taskvec.evaluation as e; e.rouge_l; e.protocols;"
        "print([m for m in ('torch', 'transformers', 'datasets', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
