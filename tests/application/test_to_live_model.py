"""Live models that cannot be edited are refused, with the way out."""

import pytest
import torch
from support import tiny_models
from support.weight_snapshots import same, state
from transformers import AutoModelForCausalLM

from hf_taskvec.errors import BadValueError, MismatchError, UnsupportedError


def test_models_that_do_not_fit_are_refused(models):
    vector = models.pair("phi").vector()
    with pytest.raises(MismatchError, match=r"made for PhiForCausalLM; .* is GPT2LMHeadModel: 0 of 33 names match"):
        vector.edit(AutoModelForCausalLM.from_pretrained(models.pair("gpt2").base))
    with pytest.raises(BadValueError, match=r"use apply\(base"):
        vector.edit("a/folder")
    model = AutoModelForCausalLM.from_pretrained(models.pair("phi").base)
    with pytest.raises(UnsupportedError, match="wrapped by OptimizedModule"):
        vector.edit(torch.compile(model))
    compiled = AutoModelForCausalLM.from_pretrained(models.pair("phi").base)
    compiled.compile()
    with pytest.raises(UnsupportedError, match=r"compiled in place.*load it again"):
        vector.edit(compiled)
    before = state(model)
    with pytest.raises(BadValueError, match="scale of nan"):
        vector.edit(model, float("nan"))
    assert same(model, before)
    with vector.applied_to(model):  # the failed edit is not in the way
        pass


@pytest.mark.parametrize("architecture", tiny_models.EXPERTS)
def test_fused_experts_are_refused_with_the_way_out(models, architecture):
    pair = models.pair(architecture)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    with pytest.raises(UnsupportedError, match=r"splits or joins.*vector.apply"):
        pair.vector().edit(model)
    with pair.vector().filter(include="*self_attn*").applied_to(model):
        pass
