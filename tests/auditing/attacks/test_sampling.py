"""leak@k: the estimator against every choice of samples, and samples that depend on nothing but passage and seed."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from support.tiny_books import make_books, make_tokenizer, tiny_llama, train

from hf_taskvec.auditing.attacks.sampling import LeakAtK, expected_best, leak_at_k
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation import protocols
from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages
from hf_taskvec.evaluation.texts.passages import find_passages

PROTOCOL = protocols.get(prompt_length=12, answer_length=6, samples=8)


# The estimator.


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_the_estimate_is_the_mean_over_every_choice_of_samples(scores: list[float]) -> None:
    found = expected_best(np.array([scores]))
    for j in range(1, len(scores) + 1):
        brute = np.mean([max(chosen) for chosen in combinations(scores, j)])
        assert found[0, j - 1] == pytest.approx(brute, abs=1e-12)
    assert np.all(np.diff(found[0]) >= -1e-12)


def test_it_is_unbiased() -> None:
    """Over all outcomes of five draws from three values, the estimate for j is the true expected best of j draws."""
    values, chances, k = (0.1, 0.4, 0.9), (0.5, 0.3, 0.2), 5
    expected = np.zeros(k)
    for outcome in product(range(3), repeat=k):
        weight = np.prod([chances[i] for i in outcome])
        expected += weight * expected_best(np.array([[values[i] for i in outcome]]))[0]
    below = np.cumsum(chances)  # P(best of j ≤ value) is this to the power of j
    for j in range(1, k + 1):
        true = np.sum(np.diff(below**j, prepend=0) * values)
        assert expected[j - 1] == pytest.approx(true, abs=1e-12)


def test_hundreds_of_samples_are_no_difficulty() -> None:
    scores = np.random.default_rng(0).random((3, 400))
    found = expected_best(scores)
    np.testing.assert_allclose(found[:, 0], scores.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found[:, -1], scores.max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(expected_best(np.ones((1, 400))), 1, rtol=1e-12)
    leak = LeakAtK(("a", "b", "c"), scores)
    assert leak.leak_at(400) == pytest.approx(scores.max(axis=1).mean())
    with pytest.raises(BadValueError, match=r"leak@401 .* 400 samples"):
        leak.leak_at(401)
    for wrong in (np.ones(3), np.ones((3, 0))):
        with pytest.raises(BadValueError, match="rows of at least one sample"):
            expected_best(wrong)


# Asking.


@pytest.fixture(scope="module")
def asked():
    """A tokenizer, a model that knows a book in part, and passages of it."""
    tokenizer, books = make_tokenizer(), make_books()
    model = train(tiny_llama(), tokenizer, books[:1], 120)
    return model, tokenizer, [p for p in find_passages(books[0], PROTOCOL) if p.split == "seen"]


def test_samples_do_not_depend_on_batches_order_or_number(asked) -> None:
    model, tokenizer, passages = asked
    state = torch.get_rng_state()
    leak = leak_at_k(model, passages, PROTOCOL, tokenizer, samples=6)
    assert leak.scores.shape == (8, 6) == leak.expected_best.shape
    assert leak.ids == tuple(passage.id for passage in passages)
    again = leak_at_k(model, passages[::-1], PROTOCOL, tokenizer, samples=4, batch_size=3)
    np.testing.assert_array_equal(again.scores[::-1], leak.scores[:, :4])
    other = leak_at_k(model, passages, PROTOCOL, tokenizer, samples=6, seed=1)
    # Seeds share no sample, in whatever column.
    same = [(i, j) for i in range(6) for j in range(6) if (leak.scores[:, i] == other.scores[:, j]).all()]
    assert same == [] and len({tuple(column) for column in leak.scores.T}) == 6
    assert torch.equal(torch.get_rng_state(), state)
    assert leak.leak_at(1) == pytest.approx(leak.scores.mean()) and leak.leak_at(6) > leak.leak_at(1)


def test_scores_are_those_of_rouge_score_for_text_of_the_model(asked, tmp_path) -> None:
    """The texts are read from the store's own records; each must be among what the model can say."""
    model, tokenizer, passages = asked
    store = FinishedPassages(None)
    protocol = protocols.get(PROTOCOL, score_factor=100.0)
    leak = leak_at_k(model, passages[:1], protocol, tokenizer, samples=5, store=store)
    scorer = RougeScorer(["rougeL"])
    texts = [record.text for record in store._records.values()]
    expected = [100 * scorer.score(passages[0].answer, text)["rougeL"].fmeasure for text in texts]
    assert len(texts) == 5 and leak.scores[0].tolist() == expected


def test_samples_follow_the_models_probabilities(asked) -> None:
    model, tokenizer, passages = asked
    passage, most = passages[0], 150
    protocol = protocols.get(PROTOCOL, decoding=protocols.Decoding(max_new_tokens=1))
    store = FinishedPassages(None)
    leak_at_k(model, [passage], protocol, tokenizer, samples=most, temperature=2.0, store=store)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer(passage.prompt)["input_ids"]])).logits[0, -1].double() / 2
    token = int(logits.argmax())
    chance = logits.softmax(-1)[token].item()
    found = sum(record.text == tokenizer.decode([token]) for record in store._records.values()) / most
    assert 0.05 < chance < 0.95 and abs(found - chance) < 4 * (chance * (1 - chance) / most) ** 0.5


def test_an_interrupted_attack_continues(asked, tmp_path, monkeypatch) -> None:
    model, tokenizer, passages = asked
    first = leak_at_k(model, passages, PROTOCOL, tokenizer, samples=2, store=FinishedPassages(tmp_path))
    calls = []
    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda *args, **kwargs: calls.append(1) or generate(*args, **kwargs))
    whole = leak_at_k(model, passages, PROTOCOL, tokenizer, samples=3, store=FinishedPassages(tmp_path))
    np.testing.assert_array_equal(whole.scores[:, :2], first.scores)
    assert len(calls) == 1  # the third sample of all passages, in one batch


def test_what_cannot_be_drawn_is_refused(asked) -> None:
    model, tokenizer, passages = asked
    with pytest.raises(BadValueError, match="samples=0"):
        leak_at_k(model, passages, PROTOCOL, tokenizer, samples=0)
    with pytest.raises(BadValueError, match="of 0 passages"):
        leak_at_k(model, [], PROTOCOL, tokenizer)
    with pytest.raises(BadValueError, match=r"temperature=0\.0"):
        leak_at_k(model, passages, PROTOCOL, tokenizer, temperature=0.0)
