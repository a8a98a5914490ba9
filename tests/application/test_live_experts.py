"""Edits of parameters that a live model holds in another form than the files: fused experts, split projections."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from matrix.tiny_types import tiny_config
from peft import LoraConfig, get_peft_model
from support import tiny_models
from support.weight_snapshots import same, state
from transformers import AutoModelForCausalLM, InklingForConditionalGeneration

from hf_taskvec import TaskVector
from hf_taskvec.application.to_live_model import check_editable
from hf_taskvec.errors import UnsupportedError

KINDS = [*tiny_models.EXPERTS, "hrm_text"]


def _pair(models, kind):
    return models.pair(kind, **({"num_layers_per_stack": 1} if kind == "hrm_text" else {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, -0.6])
def test_fused_parameters_are_edited_as_checkpoints_are(models, kind, scale, tmp_path):
    pair = _pair(models, kind)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before = state(model)
    vector = TaskVector.from_finetuned(model, AutoModelForCausalLM.from_pretrained(pair.tuned))
    expected = AutoModelForCausalLM.from_pretrained(pair.vector().apply(pair.base, tmp_path / "out", scale=scale))
    for each in (vector, pair.vector()):
        with each.applied_to(model, scale):
            assert same(model, state(expected)) and not same(model, before)
        assert same(model, before)
    # one expert, or one of the projections, and nothing else
    name = next(
        name for name in vector if name.endswith(("experts.1.w3.weight", "experts.1.up_proj.weight")) or "gqkv" in name
    )
    with vector.filter(include=name).applied_to(model, scale, original=pair.base) as edit:
        changed = [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])]
        assert len(changed) == (4 if "gqkv" in name else 1)
        edit.set_scale(0.0)
        assert same(model, before)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_experts_are_edited(models, where, tmp_path):
    pair = models.pair("mixtral")
    model, tuned = (AutoModelForCausalLM.from_pretrained(each) for each in (pair.base, pair.tuned))
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        before, expected = model(tokens).logits, tuned(tokens).logits
        if where == "cpu":
            cpu_offload(model, execution_device="cpu")
        else:
            disk_offload(model, str(tmp_path), execution_device="cpu")
        with pair.vector().applied_to(model):
            assert torch.equal(model(tokens).logits, expected)
        assert torch.equal(model(tokens).logits, before)


def test_experts_below_an_adapter_are_the_base_s(models):
    pair = models.pair("mixtral")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    tokens = torch.tensor([[3, 4, 5, 6]])
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=targets))
    with torch.no_grad(), pair.vector().applied_to(wrapped):
        found = wrapped(tokens).logits  # the adapter is untrained
        expected = AutoModelForCausalLM.from_pretrained(pair.tuned)(tokens).logits
    torch.testing.assert_close(found, expected)


def test_what_is_stored_in_another_order_is_refused_with_the_way_out():
    """Inkling's files hold a gate and an up projection row by row in turns."""
    model = InklingForConditionalGeneration._from_config(tiny_config("inkling_mm_model"))
    vector = TaskVector.from_finetuned(model, tiny_models.tuned_copy(model))
    with pytest.raises(UnsupportedError, match=r"gate_up|w13.*in another order.*vector\.apply"):
        check_editable(vector, model)
