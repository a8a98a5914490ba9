"""Live models that cannot be edited are refused, with the way out."""

import pytest
import torch
from support import tiny_models
from support.weight_snapshots import same, state
from transformers import AutoModelForCausalLM

from hf_taskvec.application.to_live_model import check_editable
from hf_taskvec.errors import BadValueError, MismatchError, UnsupportedError
from hf_taskvec.models.live_model import LiveWeight


def test_models_that_do_not_fit_are_refused(models):
    vector = models.pair("phi").vector()
    with pytest.raises(MismatchError, match=r"made for PhiForCausalLM; .* is GPT2LMHeadModel: 0 of 33 names match"):
        vector.edit(AutoModelForCausalLM.from_pretrained(models.pair("gpt2").base))
    with pytest.raises(BadValueError, match=r"use apply\(base"):
        vector.edit("a/folder")
    model = AutoModelForCausalLM.from_pretrained(models.pair("phi").base)
    before = state(model)
    with pytest.raises(BadValueError, match="scale of nan"):
        vector.edit(model, float("nan"))
    assert same(model, before)
    with vector.applied_to(model):  # the failed edit is not in the way
        pass


def test_the_check_alone_refuses_what_an_edit_refuses_in_the_same_words(models):
    vector = models.pair("phi").vector()
    model, other, experts = (
        AutoModelForCausalLM.from_pretrained(models.pair(each).base) for each in ("phi", "gpt2", tiny_models.EXPERTS[0])
    )
    untied = AutoModelForCausalLM.from_pretrained(models.pair("gpt2").base)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.clone())
    quantised = AutoModelForCausalLM.from_pretrained(models.pair("phi").base)
    quantised.model.layers[0].self_attn.q_proj.to(torch.float8_e4m3fn)
    cases = [
        (vector, other, True),
        (vector, "a/folder", True),
        (vector, torch.compile(model), False),
        (vector.filter(include="*layers.0.*.q_proj.weight"), quantised, True),
        (vector.filter(include="*q_proj.weight"), model, False),
        (vector.filter(include="*norm*"), model, False),
        (models.pair("gpt2").vector(), untied, True),
        (models.pair(tiny_models.EXPERTS[0]).vector(), experts, False),
    ]
    for change, of, merge in cases:
        with pytest.raises((BadValueError, MismatchError, UnsupportedError)) as expected:
            change.edit(of, 0.0, merge=merge)
        with pytest.raises(expected.type) as found:
            check_editable(change, of, merge)
        assert str(found.value) == str(expected.value)


def test_the_check_alone_copies_no_weight(models, monkeypatch):
    pair = models.pair("phi")
    model, vector = AutoModelForCausalLM.from_pretrained(pair.base), pair.vector()
    copied = []
    original = LiveWeight.original
    monkeypatch.setattr(LiveWeight, "original", lambda weight: (copied.append(weight.name), original(weight))[1])
    check_editable(vector, model)
    check_editable(vector.filter(include="*fc1.bias"), model, merge=False)
    assert copied == []
    vector.edit(model, 0.0).restore()
    assert len(copied) == len(vector)  # so the list would tell
