"""Edits end in the order of a stack, and leave nothing behind."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_models import low_rank
from support.weight_snapshots import same, state
from transformers import AutoModelForCausalLM

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
