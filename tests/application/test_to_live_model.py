"""A vector on a live model: the streamed result, moved and undone without a trace; attached: one λ for each row."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import tiny_models
from support.tiny_models import low_rank
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, ChangedSourceError, MismatchError, UnsupportedError
from hf_taskvec.models.live_model import OnDisk


def state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(model, expected):
    return all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


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
def test_a_scale_set_in_inference_mode_and_one_outside(models, scale):
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


def test_a_vector_made_from_the_model_itself(models):
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
def test_offloaded_models(models, tmp_path, architecture, where):
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


def test_a_device_map_with_disk_offload(models, tmp_path):
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


def test_a_peft_wrapped_model(models):
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


def test_a_scale_that_fails_changes_nothing(models):
    pair = models.pair("llama", torch.float16)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    edit = pair.vector().edit(model, 0.5)
    at_half = state(model)
    with pytest.raises(BadValueError, match="too large for float16"):
        edit.set_scale(1e8)
    assert edit.scale == 0.5
    assert same(model, at_half)


def test_a_head_that_is_not_really_tied_is_refused(models):
    pair = models.pair("gpt2")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with pytest.raises(MismatchError, match="two separate weights"):
        pair.vector().edit(model)


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


# Attached.


@pytest.mark.parametrize("architecture", tiny_models.DENSE)
def test_attached_equals_merged_with_a_scale_for_each_row(models, architecture):
    """Whole sweep in one generate call: each row is what the merged edit at its λ generates."""
    model = AutoModelForCausalLM.from_pretrained(models.pair(architecture).base)
    vector = low_rank(model)
    before = state(model)
    scales = [0.0, -0.5, 1.0, 0.25]
    tokens = torch.tensor([[1, 5, 7, 3]]).repeat(len(scales), 1)
    options = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    edit = vector.edit(model, merge=False)
    edit.set_row_scales(scales)
    attached = model.generate(tokens, **options)
    edit.restore()
    assert same(model, before)
    for row, scale in enumerate(scales):
        with vector.applied_to(model, scale):
            merged = model.generate(tokens[:1], **options)
        assert torch.equal(attached.sequences[row], merged.sequences[0])
        for a, b in zip(attached.logits, merged.logits, strict=True):
            assert torch.allclose(a[row], b[0], atol=1e-4)
    logits = model(tokens[:1]).logits
    assert not torch.allclose(logits[0, -1], attached.logits[0][2], atol=1e-3)  # λ=1 does change something


def test_beams_share_their_rows_scale(models):
    model = AutoModelForCausalLM.from_pretrained(models.pair("llama").base)
    vector = low_rank(model)
    tokens = torch.tensor([[1, 5, 7, 3], [1, 5, 7, 3]])
    edit = vector.edit(model, merge=False)
    edit.set_row_scales([0.0, 1.0])
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 3}
    both = model.generate(tokens, **options)
    for row, scale in enumerate((0.0, 1.0)):
        edit.set_scale(scale)
        assert torch.equal(model.generate(tokens[:1], **options)[0], both[row])
    edit.set_row_scales([0.0, 1.0, 2.0])
    with pytest.raises(BadValueError, match="3 scales were set, but the batch has 2 rows"):
        model(tokens)


@pytest.mark.parametrize("wrapped", [False, True])
def test_positions_are_not_taken_for_rows(models, wrapped):
    """OPT flattens two rows of three positions: three scales must not pass for its six rows."""
    model = AutoModelForCausalLM.from_pretrained(models.pair("opt").base)
    vector = low_rank(model).filter(include=["*fc1.weight", "*fc2.weight"])
    if wrapped:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    tokens = torch.tensor([[1, 5, 7], [1, 5, 3]])
    with vector.applied_to(model, merge=False) as edit:
        edit.set_row_scales([0.0, 0.5, 1.0])
        for call in (
            lambda: model(tokens),
            lambda: model(input_ids=tokens),
            lambda: model.generate(input_ids=tokens, max_new_tokens=2),
        ):
            with pytest.raises(BadValueError, match="3 scales were set, but the batch has 2 rows"):
                call()
        edit.set_row_scales([0.0, 1.0])
        model(tokens)
    model(tokens)  # nothing is left that would check


def test_lora_biases_can_be_attached(models, tmp_path):
    pair = models.pair("phi")
    config = LoraConfig(r=2, target_modules=["q_proj", "fc1"], lora_bias=True, init_lora_weights=False)
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(pair.base), config)
    tiny_models.shake(wrapped, 0.1)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    vector = TaskVector.from_adapter(wrapped, base=pair.base)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad(), vector.applied_to(model, -0.7):
        merged = model(tokens).logits
    with torch.no_grad(), vector.applied_to(model, -0.7, merge=False):
        assert torch.allclose(model(tokens).logits, merged, atol=1e-5)
    assert any(name.endswith(".bias") for name in vector)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_bases(tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model = tiny_models.make(
        "llama", hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=32
    )
    model.save_pretrained(tmp_path / "base")
    vector = low_rank(model).filter(include=["*q_proj*", "*up_proj*"])
    options = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=BitsAndBytesConfig(**options), device_map="cpu"
    )
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        before = quantised(tokens).logits
        wrapped = [m for m in quantised.modules() if type(m).__name__ in ("Linear8bitLt", "Linear4bit")]
        assert wrapped
        with vector.applied_to(quantised, merge=False) as edit:
            one = quantised(tokens).logits
            edit.set_scale(2.0)
            two = quantised(tokens).logits
        # The same change as a hand-written hook on one layer makes
        assert not torch.allclose(one, before, atol=1e-4) and not torch.allclose(two, one, atol=1e-4)
        layer = quantised.model.layers[0].self_attn.q_proj
        x = torch.randn(1, 3, 64)
        plain = layer(x)
        with vector.applied_to(quantised, 0.5, merge=False):
            expected = plain + 0.5 * (x @ vector.dense("model.layers.0.self_attn.q_proj.weight").T).to(plain.dtype)
            assert torch.allclose(layer(x), expected, atol=1e-3)
        assert torch.equal(quantised(tokens).logits, before)
    with pytest.raises(UnsupportedError, match=r"q_proj.weight is quantised .* merge=False"):
        vector.edit(quantised)


def test_what_an_attached_edit_cannot_do(models):
    pair = models.pair("llama")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    attached = low_rank(model).edit(model, merge=False)
    with pytest.raises(BadValueError, match="nothing to keep"):
        attached.keep()
    with pytest.raises(BadValueError, match="at least one scale"):
        attached.set_row_scales([])
    tokens = torch.tensor([[1, 2, 3]] * 2)
    attached.set_row_scales([0.5, 1.0])
    logits = model(tokens).logits
    with pytest.raises(BadValueError, match="scale of nan"):
        attached.set_scale(float("nan"))
    assert torch.equal(model(tokens).logits, logits)  # the rows keep theirs
    attached.restore()
    merged = pair.vector().edit(model)
    assert not hasattr(merged, "set_row_scales")
    with pytest.raises(AttributeError, match="merge=False"):
        merged.set_row_scales([0.5])
    merged.restore()
    biases = models.pair("phi").vector().filter(include="*fc1.bias")  # a difference of two files
    biases.edit(AutoModelForCausalLM.from_pretrained(models.pair("phi").base), merge=False).restore()


# Refusals.


def test_what_cannot_be_attached_is_named(models):
    pair = models.pair("phi")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    with pytest.raises(UnsupportedError, match=r"weight: only low-rank changes .* Compress"):
        pair.vector().filter(include="*q_proj.weight").edit(model, merge=False)
    with pytest.raises(UnsupportedError, match="norm"):
        pair.vector().filter(include="*norm*").edit(model, merge=False)


def test_models_that_do_not_fit(models):
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
    with pytest.raises(UnsupportedError, match=r"experts fused.*vector.apply"):
        pair.vector().edit(model)
    with pair.vector().filter(include="*self_attn*").applied_to(model):
        pass
