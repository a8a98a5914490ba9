"""Noise on the logits: the same for the same text, however the model is asked."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_books import make_tokenizer, tiny_gpt2, tiny_llama

from hf_taskvec.application.output_noise import OutputNoise
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.evaluation.asking.batch_plan import Row
from hf_taskvec.evaluation.asking.batched_asking import ask
from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.passages import find_passages
from hf_taskvec.models.fingerprints import full_fingerprint, nameless_hooks

ROWS = torch.randint(1, 400, (4, 12), generator=torch.Generator().manual_seed(0))
SIZE = 0.5


def noise_of(model, size: float = SIZE, seed: int = 0, **inputs) -> torch.Tensor:
    """What is added to the logits."""
    with torch.no_grad():
        plain = model(**inputs).logits
        with OutputNoise(model, size, seed) as edit:
            edit.set_scale(1.0)
            return model(**inputs).logits - plain


def test_the_noise_has_its_size_and_follows_lambda():
    model = tiny_llama()
    found = noise_of(model, input_ids=ROWS).double()
    assert found.std().item() == pytest.approx(SIZE, rel=0.03) and abs(found.mean()) < 0.02
    assert (found.abs() < 1.959964 * SIZE).double().mean().item() == pytest.approx(0.95, abs=0.01)
    places = found.flatten(0, 1)
    alike = torch.corrcoef(places) - torch.eye(len(places))
    assert alike.abs().max() < 0.3  # 48 places, all of other noise
    with OutputNoise(model, SIZE) as edit, torch.no_grad():
        plain = model(input_ids=ROWS).logits
        edit.set_scale(-2.0)
        doubled = model(input_ids=ROWS).logits
        edit.set_scale(0.0)
        assert torch.equal(model(input_ids=ROWS).logits, plain)
    assert torch.allclose(doubled - plain, -2 * found.float(), atol=1e-5)
    assert not torch.allclose(noise_of(model, seed=1, input_ids=ROWS).double(), found, atol=0.1)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_padding_batch_and_cache_do_not_change_the_noise_of_a_text(make):
    model = make()
    text = ROWS[:1, :9]
    expected = noise_of(model, input_ids=text)[0]
    pad = torch.zeros(1, 3, dtype=torch.long)
    ones, zeros = torch.ones_like(text), torch.zeros_like(pad)
    for ids, mask, place in (
        (torch.cat([text, pad], 1), torch.cat([ones, zeros], 1), slice(0, 9)),
        (torch.cat([pad, text], 1), torch.cat([zeros, ones], 1), slice(3, 12)),
    ):
        batch = {
            "input_ids": torch.cat([ROWS[1:3], ids]),
            "attention_mask": torch.cat([torch.ones(2, 12).long(), mask]),
        }
        assert torch.allclose(noise_of(model, **batch)[2, place], expected, atol=1e-5)
    last = noise_of(model, input_ids=text, logits_to_keep=2)[0]
    assert torch.allclose(last, expected[-2:], atol=1e-5)
    with OutputNoise(model, SIZE) as edit, torch.no_grad():
        plain = model(input_ids=text).logits[0]
        edit.set_scale(1.0)
        cache, found = None, []
        for i in range(9):
            output = model(input_ids=text[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits[0, -1])
    assert torch.allclose(torch.stack(found) - plain, expected, atol=1e-4)


def test_noise_of_a_token_hangs_on_the_whole_text_before_it():
    model, other = tiny_llama(), ROWS.clone()
    other[:, 3] = (other[:, 3] + 1) % 400
    one, two = noise_of(model, input_ids=ROWS), noise_of(model, input_ids=other)
    assert torch.allclose(one[:, :3], two[:, :3], atol=1e-5)
    assert (one[:, 3:] - two[:, 3:]).abs().mean() > 0.3 * SIZE


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_the_harness_gets_the_same_answers_in_any_batch_and_generates_what_it_predicts(make, story, tokenizer):
    model = make()
    protocol = protocols.get(prompt_length=12, answer_length=6, samples=6)
    found = {}
    for size in (1, 5):
        with OutputNoise(model, 3.0, seed=4) as noise:
            options = {"passages": find_passages(story, protocol), "protocol": protocol, "tokenizer": tokenizer}
            found[size] = ask(model, noise, (1.0,), store=FinishedPassages(None), batch_size=size, **options)
    assert len({len(passage.prompt_ids) for passage in found[1].passages}) > 1  # so there is padding
    for row, one in found[1].work.rows.items():
        other = found[5].work.rows[row]
        assert one.text == other.text and one.hits == other.hits
        assert one.log_probs == pytest.approx(other.log_probs, rel=1e-4, abs=1e-4)
    # Greedily: the noise is that of the text so far, which one pass over the whole text has as well.
    passage = found[1].passages[0]
    with OutputNoise(model, 3.0, seed=4) as noise, torch.no_grad():
        noise.set_scale(1.0)
        text = list(passage.prompt_ids)
        for _ in range(passage.new_tokens):
            text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
            if text[-1] == 0:  # the end of a text
                text.pop()
                break
    assert tokenizer.decode(text[len(passage.prompt_ids) :]) == found[1].work.rows[Row(1.0, 0)].text


@pytest.mark.parametrize("kind", ["Mamba", "Gemma3"])
def test_other_kinds_of_cache_are_followed(kind):
    """Mamba's has another name and no length, and there is no mask beside it; Gemma's has windows."""
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    if kind == "Mamba":
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))
    else:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4}
        config = transformers.Gemma3TextConfig(**sizes, **heads, intermediate_size=32)
        model = transformers.Gemma3ForCausalLM(config)
    ids = ROWS[:2, :7] % 50
    with OutputNoise(model.eval(), 3.0) as noise, torch.no_grad():
        noise.set_scale(1.0)
        mask = torch.ones_like(ids)
        found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, eos_token_id=None, do_sample=False)
        for row in found:
            for length in range(7, 12):
                assert int(model(input_ids=row[None, :length]).logits[0, -1].argmax()) == row[length]
        if kind == "Mamba":  # a cache from elsewhere
            noise.set_scale(0.0)
            cache = model(input_ids=ids, use_cache=True).cache_params
            noise.set_scale(1.0)
            with pytest.raises(UnsupportedError, match="not seen from its first token"):
                model(input_ids=ids[:, :1], cache_params=cache)


def test_a_model_in_a_wrapper_of_peft_gets_it_once():
    model = tiny_llama()
    expected = noise_of(model, input_ids=ROWS)
    wrapped = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"]))
    assert torch.allclose(noise_of(wrapped, input_ids=ROWS), expected, atol=1e-5)


def test_logits_of_sixteen_bits_keep_small_noise():
    model = tiny_llama().to(torch.bfloat16)
    with OutputNoise(model, 1e-4) as edit, torch.no_grad():
        plain = model(input_ids=ROWS).logits
        edit.set_scale(1.0)
        noisy = model(input_ids=ROWS).logits
    assert (noisy - plain.float()).std().item() == pytest.approx(1e-4, rel=0.05)


def test_it_leaves_no_trace_and_says_what_it_is():
    model = tiny_llama()
    before = full_fingerprint(model)
    with OutputNoise(model, SIZE) as edit:
        assert full_fingerprint(model) == before  # at λ=0 it changes nothing
        edit.set_scale(1.0)
        noisy = full_fingerprint(model)
        assert noisy != before and not nameless_hooks(model)
    assert full_fingerprint(model) == before and "forward" not in vars(model)
    names = {OutputNoise(tiny_llama(), size, seed).fingerprint for size in (0.5, 0.25) for seed in (0, 1)}
    assert len(names) == 4


def test_what_it_cannot_follow_is_refused():
    model = tiny_llama()
    with pytest.raises(BadValueError, match="live model"):
        OutputNoise("me/model", 1.0)
    for size in (-1.0, float("nan"), float("inf")):
        with pytest.raises(BadValueError, match="standard deviation"):
            OutputNoise(model, size)
    with torch.no_grad():
        cache = model(input_ids=ROWS[:, :5], use_cache=True).past_key_values
        with OutputNoise(model, SIZE) as edit:
            edit.set_scale(1.0)
            with pytest.raises(UnsupportedError, match="input_ids"):
                model(inputs_embeds=model.get_input_embeddings()(ROWS))
            with pytest.raises(UnsupportedError, match="not seen from its first token"):
                model(input_ids=ROWS[:, 5:6], past_key_values=cache)
            with pytest.raises(UnsupportedError, match="attention_mask of two dimensions"):
                model(input_ids=ROWS, attention_mask=torch.ones(4, 1, 12, 12, dtype=torch.bool))
            with pytest.raises(BadValueError, match="scale of nan"):
                edit.set_scale(float("nan"))


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def story():
    import datasets
    from support.tiny_books import STORY

    from hf_taskvec.evaluation import load_book

    return load_book(datasets.Dataset.from_dict({"text": [STORY]}), "story", role="forget", block_words=400)
