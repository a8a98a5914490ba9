"""A vector merged into a live model: the streamed result, moved and undone without a trace."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import tiny_models
from support.tiny_models import TinyModels, low_rank, make, tuned_copy
from support.weight_snapshots import same, state
from transformers import AutoConfig, AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, ChangedSourceError, MismatchError, UnsupportedError
from hf_taskvec.models.live_model import OnDisk


@pytest.mark.parametrize("dtype", tiny_models.DTYPES)
@pytest.mark.parametrize("architecture", tiny_models.DENSE)
def test_live_is_streamed_to_the_last_bit(models, tmp_path, architecture, dtype):
    pair = models.pair(architecture, dtype)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before = state(model)
    for number, vector in enumerate((pair.vector(), low_rank(model, size=0.1))):
        streamed = AutoModelForCausalLM.from_pretrained(vector.apply(pair.base, tmp_path / f"out{number}", scale=-0.6))
        with vector.applied_to(model, scale=-0.6):
            assert same(model, state(streamed))
            assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, min_new_tokens=2).shape == (1, 4)
        assert same(model, before)


@pytest.mark.parametrize("dtype", tiny_models.DTYPES)
@pytest.mark.parametrize("architecture", ["phi", "gpt2"])
def test_live_is_streamed_at_any_scale_and_for_any_mixture(models, tmp_path, architecture, dtype):
    pair = models.pair(architecture, dtype)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before = state(model)
    dense, factors = pair.vector(), low_rank(model, size=0.1)
    targets = ["q_proj", "fc1"] if architecture == "phi" else ["c_attn"]
    config = LoraConfig(r=2, target_modules=targets, use_dora=True, fan_in_fan_out=architecture == "gpt2")
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(pair.base, dtype=torch.float32), config)
    dora = TaskVector.from_adapter(tiny_models.shake(adapter, 0.1))
    mixed = 0.3 * dense - 0.7 * factors.named("factors") + 0.2 * dora.named("dora")
    for number, vector in enumerate((dense, factors, dora, mixed)):
        edit = vector.edit(model)
        for scale in (1.0, -1.0, -0.3):
            out = vector.apply(pair.base, tmp_path / f"out{number}", scale=scale, overwrite=True)
            edit.set_scale(scale)
            assert same(model, state(AutoModelForCausalLM.from_pretrained(out)))
        edit.restore()
    assert same(model, before)


def test_a_scale_is_set_from_the_original_and_everything_is_restored(models):
    pair = models.pair("phi", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before, tuned = state(model), state(AutoModelForCausalLM.from_pretrained(pair.tuned))
    edit = pair.vector().edit(model, scale=0.37)
    at_first = state(model)
    for scale in (-1.0, 0.9, 0.1, -0.4):
        edit.set_scale(scale)
    assert not same(model, at_first)
    edit.set_scale(0.37)
    assert same(model, at_first)
    edit.set_scale(1.0)
    assert same(model, tuned)
    edit.set_scale(0.0)
    assert same(model, before)
    edit.set_scale(-1)
    edit.restore()
    assert same(model, before)
    edit.restore()  # once more does no harm
    with pytest.raises(BadValueError, match="this edit is over"):
        edit.set_scale(1)


@pytest.mark.parametrize("scale", [-1.0, -0.3])
def test_a_scale_set_in_inference_mode_gives_the_same_bits(models, scale):
    pair = models.pair("phi", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before = state(model)

    def both() -> bool:
        edit = pair.vector().edit(model, 0.0)
        with torch.inference_mode():
            edit.set_scale(scale)
        inside = state(model)
        edit.set_scale(0.5)
        edit.set_scale(scale)
        return same(model, inside) and not same(model, before)

    with ThreadPoolExecutor(1) as fresh:  # a thread that has worked on nothing yet
        assert fresh.submit(both).result()


def test_a_vector_of_the_edited_model_itself_does_not_change_with_it(models):
    pair = models.pair("llama", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    tuned = AutoModelForCausalLM.from_pretrained(pair.tuned)
    vector = TaskVector.from_finetuned(model, tuned)
    expected = state(tuned)
    with vector.applied_to(model):
        assert same(model, expected)
        tiny_models.shake(tuned)  # training goes on: the vector does not
    with vector.applied_to(model):
        assert same(model, expected)


def test_the_original_can_be_reread_instead_of_copied(models):
    pair = models.pair("phi", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    before = state(model)
    edit = pair.vector().edit(model, -0.5, original=pair.base)
    assert all(not hasattr(source, "tensor") for source in edit._originals.values())  # nothing held in memory
    edit.set_scale(1.0)
    assert same(model, state(AutoModelForCausalLM.from_pretrained(pair.tuned)))
    edit.restore()
    assert same(model, before)
    with pair.vector().applied_to(model, original=pair.base) as edit:
        assert all(not hasattr(source, "tensor") for source in edit._originals.values())
    assert same(model, before)
    with pytest.raises(ChangedSourceError, match="is not what the live model was loaded from"):
        pair.vector().edit(model, original=pair.tuned)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_models_are_edited_and_restored(models, tmp_path, architecture, where):
    """accelerate's `cpu_offload` and `disk_offload`: what `device_map` does to layers that do not fit."""
    from accelerate import cpu_offload, disk_offload

    pair = models.pair(architecture)
    plain, tuned = (AutoModelForCausalLM.from_pretrained(f) for f in (pair.base, pair.tuned))
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path / "offload", execution_device=torch.device("cpu"))
    assert any(parameter.is_meta for parameter in model.parameters())
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        before = model(tokens).logits
        assert torch.equal(before, plain(tokens).logits)
        with pair.vector().applied_to(model) as edit:
            assert torch.equal(model(tokens).logits, tuned(tokens).logits)
            edit.set_scale(0)
            assert torch.equal(model(tokens).logits, before)
        assert torch.equal(model(tokens).logits, before)
        factors = low_rank(plain)
        with factors.applied_to(model, -0.5, merge=False), factors.applied_to(plain, -0.5):
            assert torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-5)
            assert not torch.allclose(model(tokens).logits, before, atol=1e-2)
        assert torch.equal(model(tokens).logits, before)


def test_what_is_offloaded_to_disk_is_not_copied_and_edits_of_it_nest(models, tmp_path):
    from accelerate import disk_offload

    pair = models.pair("gpt2")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    disk_offload(model, tmp_path / "offload", execution_device=torch.device("cpu"))
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        before = model(tokens).logits
        with pair.vector().applied_to(model, 0.5) as outer:
            assert all(isinstance(source, OnDisk) for source in outer._originals.values())
            at_half = model(tokens).logits
            with pair.vector().applied_to(model, -2.0):
                assert not torch.equal(model(tokens).logits, at_half)
            assert torch.equal(model(tokens).logits, at_half)
            outer.set_scale(1.0)
            outer.set_scale(0.5)
            assert torch.equal(model(tokens).logits, at_half)
        assert torch.equal(model(tokens).logits, before)
        pair.vector().edit(model, 0.5).keep()
        with pair.vector().applied_to(model, 3.0):
            pass
        assert torch.equal(model(tokens).logits, at_half)  # what was kept, not what is on the disk


def test_a_model_with_a_device_map_and_disk_offload_is_edited_and_restored(models, tmp_path):
    pair = models.pair("llama")
    tokens = torch.tensor([[1, 2, 3, 4]])
    tuned = AutoModelForCausalLM.from_pretrained(pair.tuned)
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    device_map |= {"lm_head": "cpu", "model.rotary_emb": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(pair.base, device_map=device_map, offload_folder=tmp_path / "offload")
    assert any(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        before = model(tokens).logits
        with pair.vector().applied_to(model):
            assert torch.equal(model(tokens).logits, tuned(tokens).logits)
        assert torch.equal(model(tokens).logits, before)


def test_a_peft_wrapped_model_is_edited_and_restored(models):
    """The base inside is edited; the adapter stays as it is."""
    pair = models.pair("phi")
    config = LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(pair.base), copy.deepcopy(config))
    before = state(model)
    with pair.vector().applied_to(model):
        inside = {
            n.replace(".base_layer", "").removeprefix("base_model.model."): p for n, p in model.named_parameters()
        }
        for name, expected in AutoModelForCausalLM.from_pretrained(pair.tuned).named_parameters():
            assert torch.equal(inside[name], expected)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if "lora_" in n)
    assert same(model, before)
    attached = low_rank(model.get_base_model())
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        with attached.applied_to(model, merge=True):
            merged = model(tokens).logits
        with attached.applied_to(model, merge=False):
            assert torch.allclose(model(tokens).logits, merged, atol=1e-5)


def test_peft_copies_are_not_edited_in_vain(models):
    """With modules_to_save the model uses PEFT's copy: an edit of the base would do nothing."""
    pair = models.pair("phi")
    for options in ({"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [1, 2]}):
        config = LoraConfig(r=2, target_modules=["q_proj"], **options)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(pair.base), config)
        with pytest.raises(UnsupportedError, match=r"(lm_head|embed_tokens).*PEFT trains a copy"):
            pair.vector().edit(model)
        pair.vector().filter(include="*mlp*").edit(model).restore()


def test_a_head_that_is_not_really_tied_is_refused(models):
    pair = models.pair("gpt2")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with pytest.raises(MismatchError, match="two separate weights"):
        pair.vector().edit(model)


def test_another_vector_takes_the_place_of_one_and_leaves_the_rest_untouched():
    model = make("phi", torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole, factors = TaskVector.from_finetuned(model, tuned_copy(model)), low_rank(model)
    part = whole.filter("*.mlp.*")
    with whole.edit(model, 0.5) as edit:
        for vector in (factors - 0.3 * whole, part):
            edit.set_vector(vector)
            placed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            other = make("phi", torch.bfloat16)
            vector.edit(other, 0.5).keep()
            assert all(torch.equal(placed[name], tensor) for name, tensor in other.state_dict().items())
        assert edit.fingerprint == part.fingerprint
        wide = TaskVector.from_tensors({"lm_head.bias": torch.ones(3)})
        with pytest.raises(MismatchError, match=r"lm_head\.bias: shapes"):
            edit.set_vector(wide)
        with pytest.raises(MismatchError, match=r"not made for .*Make a new one"):
            edit.set_vector(TaskVector.from_tensors({"model.norm.weight": torch.ones(16)}))
        with pytest.raises(BadValueError, match="too large for bfloat16"):
            edit.set_vector(1e42 * whole)
        assert edit.vector is part
        assert all(torch.equal(placed[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_without_values_is_refused(models: TinyModels) -> None:
    pair = models.pair("llama")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pair.base))
    with pytest.raises(UnsupportedError, match=r"on the meta device and has no values.*from_pretrained"):
        pair.vector().edit(model)
    with pytest.raises(UnsupportedError, match="on the meta device and has no values"):
        TaskVector.from_finetuned(pair.base, model)
