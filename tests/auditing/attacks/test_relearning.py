"""Relearning: an independent loop as reference, a model that stays as it was, and no leak between the two parts."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support import launch
from support.launched_relearning import FULL, LORA, fingerprints
from support.launched_training import make_blocks
from support.tiny_books import STORY, make_tokenizer, tiny_llama
from support.tiny_models import low_rank, make
from support.weight_snapshots import same, state

from hf_taskvec.auditing.attacks.relearning import Relearning, relearned, split_for_relearning
from hf_taskvec.errors import BadValueError, DivergedError, MismatchError, MissingNameError, UnsupportedError
from hf_taskvec.evaluation import load_book, protocols
from hf_taskvec.evaluation.texts.books import Book, Pair
from hf_taskvec.evaluation.texts.passages import Passage, find_passages
from hf_taskvec.evaluation.texts.word_tokens import ngrams, words
from hf_taskvec.models.fingerprints import full_fingerprint
from hf_taskvec.training.token_blocks import epoch_order


def loss(model, blocks) -> float:
    ids = torch.tensor(blocks["input_ids"])
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


# Training.


def test_it_trains_as_a_loop_written_by_hand() -> None:
    model, blocks = make("llama"), make_blocks()
    settings = Relearning(learning_rate=2e-3, epochs=2, batch_size=4, points=2)  # 6 steps in an epoch, the last of 1
    found = {step: state(each) for step, each in relearned(model, blocks, settings)}

    by_hand = copy.deepcopy(model).double()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=2e-3, weight_decay=0.0)
    ids = torch.tensor(blocks["input_ids"])
    for step in range(12):
        epoch, index = divmod(step, 6)
        rows = ids[epoch_order(21, 0, epoch)[4 * index : 4 * index + 4]]
        optimizer.param_groups[0]["lr"] = 1e-3 if step == 0 else 2e-3  # a twentieth of 12 steps is one step of warm-up
        by_hand(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in found:
            for name, parameter in by_hand.named_parameters():
                torch.testing.assert_close(found[step + 1][name], parameter.float(), rtol=1e-3, atol=2e-5)
    assert list(found) == [6, 12]


@pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])
def test_the_text_is_learnt_and_the_given_model_stays_as_it_is(settings: Relearning) -> None:
    model, blocks = make("gpt2"), make_blocks()
    model.requires_grad_(False)  # as a model that is only asked may be
    model.transformer.h[0].train()
    before, fingerprint, random_state = state(model), full_fingerprint(model), torch.get_rng_state()
    losses = [loss(copy.deepcopy(model).eval(), blocks)]
    for step, attacked in relearned(model, blocks, replace(settings, epochs=8, learning_rate=1e-2)):
        assert not any(module.training for module in attacked.modules())
        assert type(attacked) is type(model) and not isinstance(attacked, PeftModel)
        assert set(state(attacked)) == set(before)  # no factors of LoRA among them
        assert step in (6, 12, 24, 48)
        losses.append(loss(attacked, blocks))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.05 and len(losses) == 5
    assert same(model, before) and full_fingerprint(model) == fingerprint
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert model.transformer.h[0].training and not model.transformer.h[1].training


@pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])
def test_the_same_settings_give_the_same_bits_whatever_happens_in_between(settings: Relearning) -> None:
    model, blocks = make("gpt2"), make_blocks()  # which has dropout
    first = fingerprints(model, blocks, settings)
    again = {}
    torch.manual_seed(99)
    with torch.inference_mode():  # of the caller, as in an evaluation
        for step, attacked in relearned(model, blocks, settings):
            attacked(torch.tensor([[3, 4]]))
            torch.rand(7)
            again[step] = full_fingerprint(attacked)
    assert first == again and len(set(first.values())) == len(first) == 3
    last = fingerprints(model, blocks, replace(settings, points=1))  # never measured on the way
    assert last == {6: first[6]}
    assert fingerprints(model, blocks, replace(settings, seed=1))[6] != first[6]


def test_lora_is_handed_over_merged_and_trains_on() -> None:
    model, blocks = make("llama"), make_blocks()
    attacked = dict(relearned(model, blocks, LORA))
    changed = {name for name, weight in state(attacked[6]).items() if not torch.equal(weight, state(model)[name])}
    assert changed and all(name.endswith("proj.weight") for name in changed)
    difference = attacked[6].model.layers[0].mlp.up_proj.weight - model.model.layers[0].mlp.up_proj.weight
    values = torch.linalg.svdvals(difference.double())
    assert values[4] < 1e-4 * values[0]  # of LoRA's rank
    assert not same(attacked[1], state(attacked[6]))  # each is a copy of its own


def test_sixteen_bits_are_trained_in_thirty_two() -> None:
    model, blocks = make("llama", torch.bfloat16), make_blocks()
    ((step, attacked),) = relearned(model, blocks, Relearning(learning_rate=2e-5, batch_size=4, points=1))
    assert step == 6 and attacked.dtype == torch.float32 and model.dtype == torch.bfloat16
    moved = attacked.lm_head.weight - model.lm_head.weight.float()
    assert 0 < moved.abs().max() < 1e-3  # less than bf16 tells apart beside most weights
    assert attacked.generation_config.eos_token_id == model.generation_config.eos_token_id


def test_steps_may_be_given_and_points_are_where_things_happen() -> None:
    assert Relearning(steps=100).measured_steps(blocks=3) == (12, 25, 50, 100)
    assert Relearning(points=1).measured_steps(blocks=17) == (3,)
    assert Relearning(points=9, epochs=2).measured_steps(blocks=17) == (1, 3, 6)  # no step twice
    steps = [step for step, _ in relearned(make("llama"), make_blocks(), replace(FULL, steps=14, points=2))]
    assert steps == [7, 14]  # over the end of an epoch


def test_two_processes_have_the_bits_of_one(tmp_path: Path) -> None:
    """The second process computes something else here: it takes over what the first one has."""
    launch.succeed(launch.SUPPORT / "launched_relearning.py", tmp_path, processes=2)
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in (0, 1)]
    for settings in (FULL, LORA):
        alone = fingerprints(make("gpt2"), make_blocks(), settings)
        assert list(alone) == [1, 3, 6] and len(set(alone.values())) == 3
        for each in found:
            assert each[settings.method] == {str(step): bits for step, bits in alone.items()}
    assert found[0]["broken"].startswith("DivergedError: the loss is")
    assert "another process failed: the loss is" in found[1]["broken"]  # and does not wait forever


# What is refused.


def test_a_model_that_diverges_is_an_error_with_advice() -> None:
    settings = replace(FULL, learning_rate=1e30)
    with pytest.raises(DivergedError, match=r"step \d of 6.*learning_rate \(it is 1e\+30\)|not finite"):
        list(relearned(make("llama"), make_blocks(), settings))


def test_what_a_copy_of_the_weights_would_lack_is_refused_by_name() -> None:
    model, blocks = make("llama"), make_blocks()
    vector = low_rank(model)
    for scale in (0.0, -1.0):
        with (
            vector.applied_to(model, scale, merge=False),
            pytest.raises(UnsupportedError, match=r"hooks at LlamaForCausalLM.*edit\(model\).keep"),
        ):
            relearned(model, blocks, FULL)
    with vector.applied_to(model, -1.0):  # in the weights, so it is copied with them
        edited = fingerprints(model, blocks, FULL)
    assert edited != fingerprints(model, blocks, FULL)
    with pytest.raises(UnsupportedError, match="merge_and_unload"):
        relearned(get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM")), blocks, FULL)
    with pytest.raises(BadValueError, match="live model, not a str"):
        relearned("me/model", blocks, FULL)
    with pytest.raises(UnsupportedError, match=r"spread over.*meta"):
        relearned(copy.deepcopy(model).to("meta"), blocks, FULL)


def test_blocks_of_another_model_are_refused_before_anything_is_trained() -> None:
    with pytest.raises(MismatchError, match="vocabulary"):
        relearned(make("llama"), make_blocks(vocabulary=30), FULL)


@pytest.mark.parametrize(
    "wrong, kind, words",
    [
        ({"on": "aligne"}, MissingNameError, "Did you mean 'aligned'"),
        ({"method": "dora"}, MissingNameError, "no method 'dora'"),
        ({"points": 0}, BadValueError, "points=0"),
        ({"steps": 0}, BadValueError, "steps=0"),
        ({"block_length": 1}, BadValueError, "block_length=1"),
        ({"learning_rate": -1.0}, BadValueError, "learning_rate"),
        ({"batch_size": 0}, BadValueError, "batch_size"),
    ],
)
def test_settings_are_checked_when_they_are_made(wrong: dict, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        Relearning(**wrong)


# Which part is relearnt, and which is asked for.

PROTOCOL = protocols.get(prompt_length=14, answer_length=12, samples=None)


def made_up_words(count: int, seed: int = 0) -> str:
    chooser = random.Random(seed)
    sentences = [" ".join(f"w{chooser.randrange(10**6)}" for _ in range(9)) for _ in range(count // 9)]
    return " ".join(f"{sentence.capitalize()}." for sentence in sentences)


def book_of(text: str, block_words: int = 100) -> Book:
    data = datasets.Dataset.from_dict({"text": [text]})
    return load_book(data, "made up", role="forget", block_words=block_words)


@pytest.mark.parametrize("lower_case", [False, True])
def test_no_words_of_an_asked_answer_are_relearnt(lower_case: bool) -> None:
    book = book_of(made_up_words(3000))
    passages = find_passages(book, protocols.get(PROTOCOL, lower_case=lower_case))
    split = split_for_relearning(book, passages)
    assert not split.leaked
    text = words(split.text.training_text)
    learnt = set(ngrams(text, 8))
    for passage in split.passages:
        for part in (passage.prompt, passage.answer):
            assert not learnt & set(ngrams(words(part), 8))
        assert passage in passages and passage.split == "seen"
    # Every seen passage is asked for or relearnt, and about half of each.
    seen = [passage for passage in passages if passage.split == "seen"]
    rest = [p for p in seen if p not in split.passages]
    assert all(set(ngrams(words(passage.answer), 8)) <= learnt for passage in rest)
    assert len(rest) > 0.3 * len(seen) < len(split.passages)
    # The training text is a part of what may be trained on: nothing held out, nothing that is asked for.
    seen_words = set(words(book.training_text))
    assert set(text) < seen_words and 0.3 < len(text) / len(seen_words) < 0.7


def test_the_parts_are_those_of_the_seed_and_the_share() -> None:
    book = book_of(made_up_words(3000))
    passages = find_passages(book, PROTOCOL)
    split = split_for_relearning(book, passages)
    assert split == split_for_relearning(book, passages)
    assert split != split_for_relearning(book, passages, seed=1)
    sizes = [len(split_for_relearning(book, passages, share).text.training_text) for share in (0.01, 0.3, 0.6, 0.99)]
    assert sizes == sorted(set(sizes))
    assert split.text.name == book.name and split.text.role == "forget"
    blocks = split.text.training_blocks(make_tokenizer(), 32)
    assert set(blocks.column_names) >= {"input_ids", "labels"}


def test_passages_of_other_books_and_held_out_ones_are_passed_over() -> None:
    book = book_of(made_up_words(3000))
    passages = find_passages(book, PROTOCOL)
    stranger = Passage("other/seen/0000", "other", "seen", "a b", " ", "c d")
    split = split_for_relearning(book, [stranger, *passages])
    assert split == split_for_relearning(book, [p for p in passages if p.split == "seen"])


def test_an_answer_that_the_book_repeats_is_left_out_and_named() -> None:
    text = made_up_words(3000)
    book = book_of(text)
    passages = find_passages(book, PROTOCOL)
    split = split_for_relearning(book, passages)
    asked = split.passages[3]
    # The same words once more, in the first section that is relearnt.
    begin = next(section.start for section in split.text.sections if section.split == "seen")
    repeated = " ".join(words(asked.answer)[:8]).upper()
    tampered = replace(book, text=book.text[:begin] + repeated + book.text[begin + len(repeated) :])
    again = split_for_relearning(tampered, passages)
    assert again.leaked == (asked.id,) and asked not in again.passages
    seven = " ".join(words(asked.answer)[:7]).upper()
    tampered = replace(book, text=book.text[:begin] + seven + book.text[begin + len(seven) :])
    assert split_for_relearning(tampered, passages).leaked == ()


def test_a_book_that_cannot_be_divided_is_refused() -> None:
    book = book_of(made_up_words(3000))
    passages = find_passages(book, PROTOCOL)
    with pytest.raises(BadValueError, match="ready-made pairs"):
        split_for_relearning(Book("pairs", "", (), pairs=(Pair("a", "b", "seen"),)), passages)
    with pytest.raises(BadValueError, match=r"share=1\.5"):
        split_for_relearning(book, passages, 1.5)
    with pytest.raises(BadValueError, match=r"1 seen section.*block_words"):
        split_for_relearning(book_of(made_up_words(300), 140), passages)
    same_words = book_of("The same nine words are said again and again. " * 400)
    with pytest.raises(BadValueError, match=r"no seen passage .* is left.*repeats itself less"):
        split_for_relearning(same_words, find_passages(same_words, protocols.get(PROTOCOL, leak_free=False)))


def test_a_book_comes_back_from_a_part_of_it() -> None:
    """Relearning one half moves what a model says of the other half, where the two share something."""
    tokenizer = make_tokenizer()
    book = book_of(STORY)
    passages = find_passages(book, PROTOCOL)
    split = split_for_relearning(book, passages)
    settings = Relearning(learning_rate=3e-3, epochs=3, block_length=64)
    blocks = split.text.training_blocks(tokenizer, settings.block_length)
    ids = [tokenizer(p.prompt + p.gap + p.answer, return_tensors="pt").input_ids for p in split.passages[:10]]

    def asked(model) -> float:
        with torch.no_grad():
            return sum(model(input_ids=each, labels=each).loss.item() for each in ids) / len(ids)

    model = tiny_llama()
    losses = [asked(model), *(asked(attacked) for _, attacked in relearned(model, blocks, settings))]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.6 * losses[0]
