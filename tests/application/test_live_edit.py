"""Edits end in the order of a stack, and leave nothing behind."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_models import low_rank
from support.weight_snapshots import same, state
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError


def test_it_is_restored_after_an_exception_and_kept_on_demand(models):
    pair = models.pair("llama")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before, tuned = state(model), state(AutoModelForCausalLM.from_pretrained(pair.tuned))
    with pytest.raises(ZeroDivisionError), pair.vector().applied_to(model):
        assert same(model, tuned)
        _ = 1 / 0
    assert same(model, before)
    pair.vector().edit(model).keep()
    assert same(model, tuned)


def test_a_block_also_ends_the_edits_that_are_open_inside(models):
    pair = models.pair("llama")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before, opened = state(model), []
    with pytest.raises(ZeroDivisionError), pair.vector().applied_to(model, 0.5):
        opened.append(pair.vector().edit(model, -2.0))
        opened.append(low_rank(model).edit(model, merge=False))
        _ = 1 / 0
    assert same(model, before)
    for edit in opened:
        with pytest.raises(BadValueError, match="this edit is over"):
            edit.set_scale(1.0)
    with pair.vector().applied_to(model) as edit:  # nothing is in the way of the next one
        edit.restore()
        later = pair.vector().edit(model, 0.5)
    assert not same(model, before)  # an edit that is over ends no other
    later.restore()
    assert same(model, before)


def test_edits_end_in_the_order_of_a_stack(models):
    pair = models.pair("llama")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before = state(model)
    outer = pair.vector().edit(model, 0.5)
    inner = pair.vector().edit(model, -2.0)
    with pytest.raises(BadValueError, match="another edit was made"):
        outer.restore()
    inner.restore()
    outer.restore()
    assert same(model, before)


def test_a_scale_that_fails_changes_nothing(models):
    pair = models.pair("llama", torch.float16)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    edit = pair.vector().edit(model, 0.5)
    at_half = state(model)
    with pytest.raises(BadValueError, match="too large for float16"):
        edit.set_scale(1e8)
    assert edit.scale == 0.5
    assert same(model, at_half)


def test_edits_of_a_wrapper_and_of_the_model_inside_share_a_stack(models):
    pair = models.pair("phi")
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(pair.base), LoraConfig(r=2, target_modules=["fc1"]))
    outer = pair.vector().edit(wrapped)
    inner = pair.vector().edit(wrapped.get_base_model())
    with pytest.raises(BadValueError, match="another edit was made"):
        outer.restore()
    inner.restore()
    outer.restore()


@pytest.mark.parametrize("merge", [True, False])
def test_edits_of_a_model_and_of_its_part_share_a_stack(models, merge):
    """Restored in the wrong order, the part would keep the weights of the edit that is over."""
    pair = models.pair("llama")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before, vector = state(model), low_rank(model) if not merge else pair.vector()
    inside = vector.filter(include="model.*")
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        logits = model(tokens).logits
    for first, second in ((model, model.model), (model.model, model), (model.model, model.model.layers[0])):
        older = inside.edit(first, 0.5, merge=merge)
        if second is model.model.layers[0]:
            newer = TaskVector.from_tensors({"mlp.up_proj.weight": torch.ones(32, 16)}).edit(second)
        else:
            newer = inside.edit(second, -1.0, merge=merge)
        for act in (older.restore, older.keep, lambda edit=older: edit.set_scale(0.0)):
            with pytest.raises(BadValueError, match="another edit was made"):
                act()
        newer.restore()
        older.restore()
        assert same(model, before)
        with inside.applied_to(first, merge=merge):
            inside.edit(model.model, merge=merge)  # ends with the block, too
        assert same(model, before)
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, logits)


def test_edits_of_models_that_share_a_weight_share_a_stack(models):
    pair = models.pair("llama")
    one, two, three = (AutoModelForCausalLM.from_pretrained(pair.base) for _ in range(3))
    two.model.embed_tokens.weight = one.model.embed_tokens.weight
    three.model.norm.weight.data = two.model.norm.weight.data
    before = [state(model) for model in (one, two, three)]
    edits = [pair.vector().edit(model) for model in (one, two, three)]
    for edit in edits[:2]:
        with pytest.raises(BadValueError, match="shares weights"):
            edit.restore()
    for edit in reversed(edits):
        edit.restore()
    assert all(same(model, weights) for model, weights in zip((one, two, three), before, strict=True))
    first = pair.vector().edit(one)
    pair.vector().edit(three)
    first.restore()  # these two share nothing


def test_an_edit_does_not_keep_the_model_alive(models):
    import gc
    import weakref

    pair = models.pair("llama")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    edit = pair.vector().edit(model)
    watched = weakref.ref(model)
    del edit, model
    gc.collect()
    assert watched() is None
