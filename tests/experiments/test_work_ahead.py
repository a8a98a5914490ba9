"""What is told before work begins: the counts are those of the work, and nothing is read or trained for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_books import make_books, make_tokenizer, tiny_llama

from hf_taskvec.evaluation import protocols, sweep
from hf_taskvec.evaluation.asking.asking_cost import asking_cost
from hf_taskvec.evaluation.asking.batch_plan import tokenize_passages
from hf_taskvec.evaluation.texts.leaks import find_all_passages
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig
from hf_taskvec.experiments.unlearning.unlearn_inputs import prepare_unlearning
from hf_taskvec.experiments.unlearning.work_ahead import work_ahead
from hf_taskvec.training import TrainingSettings
from hf_taskvec.training.training_cost import training_cost

SHORT = protocols.get("taskvec-v1", prompt_length=8, answer_length=8, samples=6)


def test_a_sweep_tells_its_answers_and_tokens_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, tokenizer, books = tiny_llama(), make_tokenizer(), make_books()
    passages, _ = find_all_passages(books, SHORT, tokenizer)
    tokenized = tokenize_passages(passages, SHORT, tokenizer, model.config)
    tokens = sum(each.new_tokens for each in tokenized)
    options = {"protocol": SHORT, "tokenizer": tokenizer, "store": tmp_path}
    report = sweep(model, None, [0.0], books, progress=True, **options)
    said = capsys.readouterr().err
    assert f"batches: {len(passages)} answers, {tokens:,} tokens at most; roughly " in said
    assert report.timing.generated == len(passages)
    sweep(model, None, [0.0], books, progress=True, **options)  # finished: nothing is ahead
    assert "answers" not in capsys.readouterr().err
    sweep(model, None, [0.0], books, protocol=SHORT, tokenizer=tokenizer)
    assert capsys.readouterr().err == ""  # short, and no terminal


def test_twice_the_passages_take_twice_the_time() -> None:
    model, tokenizer = tiny_llama(), make_tokenizer()
    passages, _ = find_all_passages(make_books(), SHORT, tokenizer)
    tokenized = tokenize_passages(passages, SHORT, tokenizer, model.config)
    one, two = asking_cost(model, [tokenized]), asking_cost(model, [tokenized, tokenized])
    assert (two.answers, two.tokens) == (2 * one.answers, 2 * one.tokens)
    assert two.seconds == pytest.approx(2 * one.seconds)
    assert two.memory == one.memory > 0
    assert asking_cost(model, [tokenized], likelihood=False).seconds < one.seconds


def test_a_training_tells_its_blocks_time_and_memory() -> None:
    model, tokenizer = tiny_llama(), make_tokenizer()
    blocks = make_books()[0].training_blocks(tokenizer, 32)
    once = training_cost(model, blocks, TrainingSettings(epochs=1, batch_size=4))
    twice = training_cost(model, blocks, TrainingSettings(epochs=2, batch_size=4))
    assert str(twice).startswith(f"{len(blocks)} blocks of 32 tokens, 2 times; roughly ")
    assert twice.seconds == pytest.approx(2 * once.seconds)
    assert once.memory.weights == 4 * model.num_parameters()


def test_a_recipe_tells_what_is_ahead() -> None:
    sizes = {"words": 600, "general_words": 1500, "section_words": 100, "block_length": 32, "vocabulary": 300}
    asking = {"prompt_length": 8, "answer_length": 8, "samples": 4}
    config = UnlearnConfig(hidden_size=32, layers=2, scales=[0.0, -0.5], **sizes, **asking)
    given = prepare_unlearning(config)
    said = work_ahead(config, given)
    passages, _ = find_all_passages(given.books, config.asking, given.tokenizer)
    # The embedded model, the joint one, the book's own and the reference; θ_0' at two λ, θ_0 and the reference.
    assert said.startswith("ahead: 4 trainings, roughly ")
    assert f"{len(passages)} passages at 4 λ and models, {4 * len(passages)} answers, roughly " in said
    assert said.endswith("of memory; and the edits")
    few = UnlearnConfig(hidden_size=32, layers=2, scales=[-0.5], audit=True, edit="paper", **sizes, **asking)
    said = work_ahead(few, prepare_unlearning(few))
    assert "at 4 λ and models" in said and said.endswith("; and the audit")  # λ = 0 is asked, too
    none = UnlearnConfig(hidden_size=32, layers=2, scales=[-0.5], retrain=False, edit="paper", **sizes, **asking)
    said = work_ahead(none, prepare_unlearning(none))
    assert said.startswith("ahead: 3 trainings") and "at 3 λ and models" in said and said.endswith("of memory")
