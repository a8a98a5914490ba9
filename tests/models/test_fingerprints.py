"""A live model's fingerprint covers all that decides its output, edits and hooks included."""

import copy

import pytest
import torch
from support import tiny_models
from support.tiny_models import low_rank

from hf_taskvec.auditing.attacks.quantising import quantised
from hf_taskvec.models.fingerprints import full_fingerprint, hooked_modules, nameless_hooks


def test_an_attached_edit_is_part_of_what_the_model_is():
    """Results of a model with an edit attached must not be found again as those of the plain model."""
    model = tiny_models.make("opt")
    plain = full_fingerprint(model)
    vector = low_rank(model)
    positions = low_rank(model, exclude="^(?!.*embed_positions)")  # a layer with a forward of its own
    found = {plain}
    for each in (vector, 2 * vector, positions):
        with each.applied_to(model, 0.0, merge=False) as edit:
            assert full_fingerprint(model) == plain  # at λ=0 nothing is added
            for scale in (1.0, -1.0):
                edit.set_scale(scale)
                found.add(full_fingerprint(model))
            edit.set_row_scales([-1.0, -1.0])
            assert full_fingerprint(model) in found  # the same λ for every row
            edit.set_row_scales([-1.0, 0.0])
            found.add(full_fingerprint(model))
            assert nameless_hooks(model) == []
        assert full_fingerprint(model) == plain
    assert len(found) == 1 + 3 * 3


def test_a_merged_edit_is_part_of_what_the_model_is():
    model = tiny_models.make("llama")
    plain, vector = full_fingerprint(model), low_rank(model)
    with vector.applied_to(model, -1.0):
        edited, copied = full_fingerprint(model), copy.deepcopy(model)
    assert edited == full_fingerprint(copied) != plain == full_fingerprint(model)


def test_other_hooks_enter_by_what_they_say_or_else_by_name():
    model = tiny_models.make("llama")
    plain = full_fingerprint(model)
    model(torch.tensor([[1, 2]]), output_hidden_states=True)
    model.enable_input_require_grads()  # hooks of transformers, which change nothing
    assert full_fingerprint(model) == plain and nameless_hooks(model) == []

    def steer(layer, inputs, output):
        return output + 1

    handle = model.model.norm.register_forward_hook(steer)
    nameless = full_fingerprint(model)
    assert nameless != plain
    assert nameless_hooks(model) == [f"{__name__}.{steer.__qualname__}"]
    steer.fingerprint = "steered by 1"
    said = full_fingerprint(model)
    assert len({plain, nameless, said}) == 3 and nameless_hooks(model) == []
    steer.fingerprint = ""
    assert full_fingerprint(model) == plain
    handle.remove()
    model.model.norm.forward = lambda states: states
    assert full_fingerprint(model) != plain and len(nameless_hooks(model)) == 1


def test_modules_with_hooks_are_named_at_whatever_scale():
    model = tiny_models.make("llama")
    model.enable_input_require_grads()  # a hook of transformers, which changes nothing
    assert hooked_modules(model) == []
    vector = low_rank(model)
    with vector.applied_to(model, 0.0, merge=False):
        found = hooked_modules(model)
        assert "LlamaForCausalLM" in found  # which watches for uses that the edit would miss
        assert {f"{name}.weight" for name in found} >= {name for name in vector if name.endswith("weight")}
    with vector.applied_to(model, 1.0):
        assert hooked_modules(model) == []
    model.model.norm.register_forward_hook(lambda layer, inputs, output: output + 1)
    assert hooked_modules(model) == ["model.norm"]


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_the_scales_of_quantised_weights_are_part_of_what_the_model_is(scheme):
    """bitsandbytes keeps them beside its parameters, and moves them about when a model is first run."""
    pytest.importorskip("bitsandbytes")
    model = tiny_models.make("llama", hidden_size=64, intermediate_size=64, head_dim=32)  # whole blocks of 32 outputs
    one, other = quantised(model, scheme), quantised(model, scheme)
    found = full_fingerprint(one)
    assert found != full_fingerprint(model)
    assert found == full_fingerprint(one) == full_fingerprint(other) == full_fingerprint(copy.deepcopy(one))
    with torch.no_grad():
        one(torch.tensor([[1, 2]]))
    assert full_fingerprint(one) == found
    weight = other.model.layers[1].mlp.up_proj.weight
    (weight.quant_state.absmax if scheme == "nf4" else weight.SCB)[3] *= 1.5
    changed = full_fingerprint(other)
    with torch.no_grad():
        assert not torch.equal(other(torch.tensor([[1, 2]])).logits, one(torch.tensor([[1, 2]])).logits)
    assert changed != found and full_fingerprint(other) == changed


def test_weights_that_were_repacked_for_the_processor_stay_so():
    """Asked for its state, bitsandbytes would bring them back with scales in another order, and give other outputs."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if not functional.has_avx512bf16():
        pytest.skip("bitsandbytes does not repack weights for this processor")
    model = quantised(tiny_models.make("llama", hidden_size=64, intermediate_size=64, head_dim=32), "nf4")
    layer = model.model.layers[0].mlp.up_proj
    layer.support_avx512bf16_for_cpu = True  # as transformers makes it

    def logits():
        with torch.no_grad():
            return model(torch.tensor([[1, 2]])).logits

    said, known = logits(), full_fingerprint(model)
    assert layer.weight.quant_state.packing_format_for_cpu
    assert torch.equal(logits(), said) and full_fingerprint(model) == known
    layer.weight.quant_state.absmax[0, 3] *= 1.5
    assert full_fingerprint(model) != known


def test_a_tensor_that_is_made_of_several_enters_with_all_of_them():
    """Such as torchao's quantised weights, which are codes and scales."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = tiny_models.make("llama")
    layer, found = model.model.layers[0].mlp.up_proj, set()
    plain = layer.weight.detach()
    for first, second in ((plain, plain), (plain + 1, plain), (plain, plain + 1)):
        layer.weight = torch.nn.Parameter(TwoTensor(first, second), requires_grad=False)
        found.add(full_fingerprint(model))
        assert full_fingerprint(model) in found
    assert len(found) == 3
