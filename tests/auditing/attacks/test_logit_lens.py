"""The logit lens against transformers' own hidden states, put through each architecture's norm and head by hand."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny_models import ARCHITECTURES, low_rank, make, shake
from support.token_rows import token_passages

from hf_taskvec.auditing.attacks.logit_lens import logit_lens
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.models import model_facts

# What comes after the last layer, by hand.
NORMS = {
    "phi": "model.final_layernorm",
    "llama": "model.norm",
    "mistral": "model.norm",
    "qwen3": "model.norm",
    "gpt2": "transformer.ln_f",
    "gptj": "transformer.ln_f",
    "gpt_neox": "gpt_neox.final_layer_norm",
    "opt": "model.decoder.final_layer_norm",
    "gemma2": "model.norm",
}
PASSAGES = token_passages(3)


def lively(architecture, **config):
    """A tiny model whose layers say different things."""
    return shake(make(architecture, **config), 0.3, seed=7)


def by_hand(model, passage, norm):
    """(layers + 1) mean log-probabilities and hit rates of one passage, in fp64 and without padding."""
    model = copy.deepcopy(model).double()
    ids = torch.tensor([passage.prompt_ids + passage.answer_ids])
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
        normed = [model.get_submodule(norm)(each) for each in hidden[:-1]] + [hidden[-1]]  # the last one is normed
        if model.config.model_type == "opt" and model.model.decoder.project_out is not None:
            normed[:-1] = [model.model.decoder.project_out(each) for each in normed[:-1]]
        logits = [model.get_output_embeddings()(each)[0] for each in normed]
        if model.config.model_type == "gemma2":
            logits = [torch.tanh(each / 2.0) * 2.0 for each in logits]
    log_probs, hits = [], []
    for each in logits:
        start = len(passage.prompt_ids) - 1
        lines = each[start : start + len(passage.answer_ids)].log_softmax(-1)
        log_probs.append(np.mean([float(line[token]) for line, token in zip(lines, passage.answer_ids, strict=True)]))
        hits.append(np.mean([int(line.argmax()) == t for line, t in zip(lines, passage.answer_ids, strict=True)]))
    return log_probs, hits


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        *((name, {}) for name in NORMS if name != "gemma2"),
        ("opt", {"word_embed_proj_dim": 8}),  # a projection after the norm
        ("gemma2", {"final_logit_softcapping": 2.0}),  # capped logits
    ],
)
def test_every_layer_is_what_norm_and_head_make_of_its_hidden_states(architecture, config):
    model = lively(architecture, **config)
    found = logit_lens(model, PASSAGES, batch_size=2)
    expected = [by_hand(model, passage, NORMS[architecture]) for passage in PASSAGES]
    assert found.layers == 2 and found.log_probs.shape == found.hits.shape == (5, 3)
    np.testing.assert_allclose(found.log_probs, [each[0] for each in expected], atol=1e-4)
    np.testing.assert_allclose(found.hits, [each[1] for each in expected], atol=1e-12)
    assert np.ptp(found.log_probs, axis=1).min() > 1e-3  # layers differ, so that a wrong one would show


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_last_layer_is_the_models_own_loss(architecture):
    model = lively(architecture, **({"num_experts_per_tok": 1} if architecture == "qwen3_moe" else {}))
    found = logit_lens(model, PASSAGES).log_probs[:, -1]
    for passage, log_prob in zip(PASSAGES, found, strict=True):
        ids = torch.tensor([passage.prompt_ids + passage.answer_ids])
        labels = ids.clone()
        labels[:, : len(passage.prompt_ids)] = -100
        with torch.no_grad():
            assert log_prob == pytest.approx(-model(ids, labels=labels).loss.item(), abs=1e-4)


def test_known_text_shows_in_late_layers(memorised):
    known, unknown = logit_lens(memorised.untouched, memorised.seen), logit_lens(memorised.reference, memorised.seen)
    assert known.hits[:, -1].mean() > 0.9 and unknown.hits[:, -1].mean() < 0.3
    assert known.log_probs[:, 0].mean() < known.log_probs[:, -1].mean() - 1


def test_batches_and_bounds_of_memory_change_nothing(monkeypatch):
    model = lively("llama")
    whole = logit_lens(model, PASSAGES)
    sizes = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.numel() // 20))
    monkeypatch.setattr(model_facts, "_LOGITS_BYTES", 4 * 20 * 24)  # the logits of 24 positions
    bounded = logit_lens(model, PASSAGES, batch_size=3)
    handle.remove()
    assert max(sizes) <= 24 and len(sizes) > 3 * 5
    np.testing.assert_allclose(bounded.log_probs, whole.log_probs, atol=1e-5)
    np.testing.assert_array_equal(bounded.hits, whole.hits)


def test_a_16_bit_model_is_read_as_well():
    model = lively("phi")
    exact = logit_lens(model, PASSAGES).log_probs
    np.testing.assert_allclose(logit_lens(model.to(torch.bfloat16), PASSAGES).log_probs, exact, atol=0.1)


@pytest.mark.parametrize("merge", [True, False])
def test_an_edit_is_seen_whether_merged_or_attached(merge):
    model = lively("phi")
    vector = low_rank(model, size=0.2)
    plain = logit_lens(model, PASSAGES).log_probs
    edited = copy.deepcopy(model)
    with vector.applied_to(edited, 0.5):
        expected = [by_hand(edited, passage, NORMS["phi"])[0] for passage in PASSAGES]
    with vector.applied_to(model, 0.5, merge=merge):
        found = logit_lens(model, PASSAGES).log_probs
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - plain).max() > 0.01
    np.testing.assert_array_equal(logit_lens(model, PASSAGES).log_probs, plain)


def test_an_adapter_is_looked_through():
    from peft import LoraConfig, get_peft_model

    plain = lively("gpt2")
    model = get_peft_model(
        copy.deepcopy(plain), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )
    merged = copy.deepcopy(model).merge_and_unload()
    found = logit_lens(model, PASSAGES).log_probs
    np.testing.assert_allclose(found, logit_lens(merged, PASSAGES).log_probs, atol=1e-4)
    assert np.abs(found - logit_lens(plain, PASSAGES).log_probs).max() > 1e-3


def test_the_model_is_left_as_it_was_even_by_an_error():
    model = lively("gpt_neox", hidden_dropout=0.5).train()
    once = logit_lens(model, PASSAGES).log_probs
    np.testing.assert_array_equal(logit_lens(model, PASSAGES).log_probs, once)  # no dropout
    with torch.no_grad():
        model.gpt_neox.final_layer_norm.weight[3] = float("nan")
    with pytest.raises(BadValueError, match=r"NaN or infinite at passage book/seen/0"):
        logit_lens(model, PASSAGES)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_a_model_that_does_more_after_its_layers_is_refused():
    model = lively("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output.roll(1, dims=1))
    with pytest.raises(UnsupportedError, match="does something else after its layers"):
        logit_lens(model, PASSAGES)


def test_what_a_model_cannot_read_is_refused_by_name():
    model = lively("llama")
    (passage,) = token_passages(0, 1)
    with pytest.raises(BadValueError, match="no passages"):
        logit_lens(model, [])
    with pytest.raises(BadValueError, match="book/seen/0 has no token in its prompt"):
        logit_lens(model, [replace(passage, prompt_ids=())])
    with pytest.raises(BadValueError, match="the token 20, but the model has 20 tokens"):
        logit_lens(model, [replace(passage, answer_ids=(20,))])
    with pytest.raises(BadValueError, match="a row of 34 tokens, but the model reads 32"):
        logit_lens(model, [replace(passage, prompt_ids=(3,) * 30, answer_ids=(4,) * 4)])
    with pytest.raises(BadValueError, match="at least one row"):
        logit_lens(model, [passage], batch_size=0)
    with pytest.raises(BadValueError, match="needs a live model, not str"):
        logit_lens("me/model", [passage])
