"""A forward pass in two parts against the whole one."""

import pytest
import torch
from support.tiny_models import ARCHITECTURES, make, shake
from support.token_rows import rows

from hf_taskvec.analysis.layer_features import layers_of
from hf_taskvec.analysis.resumed_forward import layer_states, resumed_logits
from hf_taskvec.analysis.token_batches import make_batch
from hf_taskvec.errors import UnsupportedError


def lively(architecture):
    options = {"num_experts_per_tok": 1} if architecture == "qwen3_moe" else {}
    return shake(make(architecture, **options), 0.3, seed=7)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_rest_of_a_pass_gives_the_whole_passs_logits_and_runs_no_earlier_layer(architecture):
    model, batch = lively(architecture), make_batch(rows(0, 3))
    inputs = batch.inputs(model)
    with torch.no_grad():
        whole = model(**inputs, output_hidden_states=True, use_cache=False)
    states = layer_states(model, inputs)
    assert len(states.hidden) == 3 and len(states.others) == 2
    for found, expected in zip(states.hidden[:-1], whole.hidden_states[:-1], strict=True):
        assert torch.equal(found, expected)  # the last of transformers' own is already normed
    real = batch.attention_mask.bool()
    for layer in (0, 1):
        ran = []
        handles = [
            next(block.children()).register_forward_hook(lambda m, a, o, i=i, ran=ran: ran.append(i))
            for i, block in enumerate(layers_of(model))
        ]
        logits = resumed_logits(model, layer, states.hidden[layer + 1], inputs, states.others)
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(logits[real], whole.logits[real], atol=1e-5, rtol=1e-5)
        assert ran in ([], [1]) and (layer == 0 or not ran)
    other = resumed_logits(model, 0, states.hidden[0], inputs, states.others)
    assert not torch.allclose(other[real], whole.logits[real], atol=1e-3)


def test_only_what_is_kept_is_held():
    model, inputs = lively("phi"), make_batch(rows(0, 3)).inputs(lively("phi"))
    every, last = layer_states(model, inputs), layer_states(model, inputs, lambda hidden: hidden[:, -1])
    for kept, hidden in zip(last.hidden, every.hidden, strict=True):
        assert torch.equal(kept, hidden[:, -1])


def test_hooks_of_others_on_a_layer_work_once():
    model, inputs = lively("llama"), make_batch(rows(0, 2)).inputs(lively("llama"))
    blocks = layers_of(model)
    for block in blocks:
        block.register_forward_hook(lambda module, args, output: output + 1.0)
    with torch.no_grad():
        whole = model(**inputs).logits
    states = layer_states(model, inputs)
    for layer in (0, 1):
        found = resumed_logits(model, layer, states.hidden[layer + 1], inputs, states.others)
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(block) or len(block._forward_hooks) > 1 for block in blocks)


def test_a_forward_that_was_replaced_before_is_put_back():
    model, inputs = lively("gpt2"), make_batch(rows(0, 2)).inputs(lively("gpt2"))
    block = layers_of(model)[0]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)  # as accelerate does for a dispatched model
    replaced = block.forward
    states = layer_states(model, inputs)
    with pytest.raises(RuntimeError):  # states of another size: the pass fails half way
        resumed_logits(model, 0, states.hidden[1][..., :3], inputs, states.others)
    assert block.forward is replaced and not block._forward_hooks


def test_layers_that_take_their_states_by_name_are_refused():
    model, inputs = lively("phi"), make_batch(rows(0, 2)).inputs(lively("phi"))
    block = layers_of(model)[0]
    call = type(block).__call__

    class ByName(type(block)):
        def __call__(self, hidden, **kwargs):
            return call(self, hidden_states=hidden, **kwargs)

    block.__class__ = ByName
    with pytest.raises(UnsupportedError, match="by name"):
        layer_states(model, inputs)
