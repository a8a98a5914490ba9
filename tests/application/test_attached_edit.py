"""A vector attached beside the weights of a live model: the merged result, with one λ for each row."""

import copy
import pickle

import pytest
import torch
from matrix.tiny_types import build
from peft import LoraConfig, get_peft_model
from support import tiny_models
from support.tiny_models import low_rank
from support.weight_snapshots import same, state
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    Llama4TextConfig,
    MambaConfig,
    RoFormerConfig,
    XLNetConfig,
)

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.models.live_model import live_weights


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
def test_vectors_are_attached_to_quantised_bases(tmp_path, bits):
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


def test_an_attached_bias_is_the_sum_that_every_other_way_gives(models):
    model = AutoModelForCausalLM.from_pretrained(models.pair("phi").base)
    layer, name = model.model.layers[0].mlp.fc1, "model.layers.0.mlp.fc1.bias"
    shape = tuple(layer.bias.shape)
    a, b = (TaskVector.from_tensors({name: torch.randn(shape)}, name=each) for each in "ab")
    vector = 0.3 * a - 0.7 * b
    x = torch.zeros(1, layer.in_features)
    with torch.no_grad():
        plain = layer(x)
        with vector.applied_to(model, merge=False):
            assert torch.equal(layer(x), plain + vector.dense(name))


def test_an_attached_edit_refuses_what_it_cannot_do(models):
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


def test_what_cannot_be_attached_is_named(models):
    pair = models.pair("phi")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    with pytest.raises(UnsupportedError, match=r"weight: only low-rank changes .* Compress"):
        pair.vector().filter(include="*q_proj.weight").edit(model, merge=False)
    with pytest.raises(UnsupportedError, match="norm"):
        pair.vector().filter(include="*norm*").edit(model, merge=False)


def logits_of(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


def one_by_one(model, names):
    """A low-rank vector (a dense one of a bias) for each of the named parameters."""
    torch.manual_seed(7)
    shapes = {name: tuple(weight.shape) for name, weight in live_weights(model).items()}
    for name in names:
        shape = shapes[name]
        change = torch.randn(shape) if len(shape) == 1 else (torch.randn(shape[0], 2), torch.randn(2, shape[1]))
        yield TaskVector.from_tensors({name: change})


def assert_attached_equals_merged(model, vector, tokens):
    before = logits_of(model, tokens)
    with vector.applied_to(model, -0.7):
        merged = logits_of(model, tokens)
    with vector.applied_to(model, -0.7, merge=False):
        assert (logits_of(model, tokens) - merged).abs().max() < 1e-5
    with vector.applied_to(model, merge=False) as edit:
        edit.set_row_scales([0.0, -0.7])
        assert (logits_of(model, tokens) - torch.stack([before[0], merged[1]])).abs().max() < 1e-5
    assert not torch.allclose(merged, before, atol=1e-4)
    assert torch.equal(logits_of(model, tokens), before)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("opt", "model.decoder.embed_positions.weight"),  # looks up other rows than it is asked for
        ("gpt2", "transformer.wpe.weight"),  # once for all rows of the batch
        ("gemma3_text", "model.embed_tokens.weight"),  # multiplied by a constant
        ("bart", "model.decoder.embed_positions.weight"),
        ("phimoe", "model.layers.0.block_sparse_moe.gate.weight"),  # returns a tuple
        ("llama4_text", "model.layers.0.feed_forward.router.weight"),
    ],
)
def test_layers_with_a_forward_of_their_own_are_exact(architecture, name):
    model = own_forward(architecture)
    tokens = torch.tensor([[1, 5, 7, 3], [1, 5, 4, 6]])
    for vector in one_by_one(model, [name]):
        assert_attached_equals_merged(model, vector, tokens)


def own_forward(architecture):
    if architecture == "bart":
        sizes = {"d_model": 16, "decoder_layers": 1, "decoder_ffn_dim": 32, "decoder_attention_heads": 2}
        config = BartConfig(vocab_size=20, max_position_embeddings=32, is_encoder_decoder=False, **sizes)
        return tiny_models.shake(AutoModelForCausalLM.from_config(config).double().eval(), 0.2)
    if architecture == "llama4_text":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
        config = Llama4TextConfig(vocab_size=20, pad_token_id=0, max_position_embeddings=32, **sizes, **heads)
        return tiny_models.shake(AutoModelForCausalLM.from_config(config).eval(), 0.2)
    options = {"num_local_experts": 4} if architecture == "phimoe" else {}  # all of two would be chosen always
    return tiny_models.shake(tiny_models.make(architecture, **options).eval(), 0.2)


def test_a_use_outside_of_the_layer_is_refused_by_name(models):
    """Mamba reads `dt_proj.weight` itself, so a change attached to that layer would be missed silently."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 20, "time_step_rank": 4}
    mamba = tiny_models.shake(AutoModelForCausalLM.from_config(MambaConfig(**sizes)).double().eval(), 0.2)
    tokens = torch.tensor([[1, 5, 7, 3], [1, 5, 4, 6]])
    inner, outer = "backbone.layers.0.mixer.dt_proj.weight", "backbone.layers.0.mixer.x_proj.weight"
    used, plain = one_by_one(mamba, [inner, outer])
    before = logits_of(mamba, tokens)
    with used.applied_to(mamba, merge=False) as edit:
        for call in (mamba, mamba.backbone):
            with pytest.raises(UnsupportedError, match=r"dt_proj.weight: Mamba.* outside of its own layer.*merge=True"):
                call(tokens)
        edit.set_scale(0.0)
        assert torch.equal(logits_of(mamba, tokens), before)  # nothing is missed where nothing is added
    assert_attached_equals_merged(mamba, plain, tokens)
    with (used + plain).filter(exclude=inner).applied_to(mamba, merge=False):  # as the error says
        mamba(tokens)

    class Tied(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.embed, self.norm = model.model.embed_tokens, model.model.norm

        def forward(self, ids):
            return self.norm(self.embed(ids)) @ self.embed.weight.T

    model = Tied(AutoModelForCausalLM.from_pretrained(models.pair("llama").base))
    vector = TaskVector.from_tensors({"embed.weight": (torch.ones(20, 1), torch.ones(1, 16))})
    with vector.applied_to(model, merge=False), pytest.raises(UnsupportedError, match=r"embed\.weight: Tied also uses"):
        model(tokens)


def test_a_layer_whose_rows_cannot_be_told_has_no_scale_for_each(models):
    """A layer that is given positions, or some tokens only, must not take them for rows."""
    sizes = {"embedding_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RoFormerConfig(vocab_size=20, intermediate_size=16, is_decoder=True, max_position_embeddings=32, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    (vector,) = one_by_one(model, ["roformer.encoder.embed_positions.weight"])
    tokens = torch.tensor([[1, 5, 7, 3], [1, 5, 4, 6]])
    with vector.applied_to(model, merge=False) as edit:
        edit.set_row_scales([0.0, 1.0])
        with pytest.raises(
            BadValueError, match=r"embed_positions.weight: its layer gives \[4, 8\] for a batch of 2 rows"
        ):
            model(tokens)
    sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    xlnet = AutoModelForCausalLM.from_config(XLNetConfig(vocab_size=20, **sizes)).eval()
    (vector,) = one_by_one(xlnet, ["transformer.word_embedding.weight"])
    with vector.applied_to(xlnet, merge=False) as edit, pytest.raises(UnsupportedError, match="positions before rows"):
        edit.set_row_scales([0.0, 1.0])


def test_an_interrupted_call_leaves_nothing_behind(models):
    """Whatever ends a forward, Ctrl-C included, no mode of torch stays on."""
    model = AutoModelForCausalLM.from_pretrained(models.pair("opt").base)
    (vector,) = one_by_one(model, ["model.decoder.embed_positions.weight"])
    tokens = torch.tensor([[1, 5, 7, 3]])

    def interrupt(*_):
        raise KeyboardInterrupt

    with vector.applied_to(model, merge=False):
        handle = model.model.decoder.layers[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(tokens)
        handle.remove()
        assert torch.overrides._get_current_function_mode() is None
    assert "forward" not in vars(model) and "forward" not in vars(model.model.decoder.embed_positions)


def test_a_model_with_an_attached_edit_is_not_copied_but_its_weights_are_saved(models, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(models.pair("opt").base)
    before = state(model)
    for name in ("model.decoder.embed_positions.weight", "model.decoder.layers.0.fc1.weight"):
        (vector,) = one_by_one(model, [name])
        with vector.applied_to(model, merge=False):
            for copied in (copy.deepcopy, pickle.dumps):
                with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled.*edit.restore"):
                    copied(model)
            model.save_pretrained(tmp_path / name)
        assert same(AutoModelForCausalLM.from_pretrained(tmp_path / name), before)
        assert same(copy.deepcopy(model), before)


def test_biases_of_normalisations_are_attached(models):
    model = AutoModelForCausalLM.from_pretrained(models.pair("gpt2").base)
    tokens = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    names = [name for name in live_weights(model) if "ln_" in name and name.endswith(".bias")]
    assert len(names) == 5
    for vector in one_by_one(model, names):
        plain = logits_of(model, tokens)
        with vector.applied_to(model, 0.7):
            expected = logits_of(model, tokens)
        with vector.applied_to(model, merge=False) as edit:
            edit.set_row_scales([0.7, 0.0])
            found = logits_of(model, tokens)
        assert not torch.allclose(expected[0], plain[0], atol=1e-4)
        assert torch.allclose(found[0], expected[0], atol=1e-5) and torch.equal(found[1], plain[1])


def test_a_router_in_sixteen_bits_that_computes_in_thirty_two_is_attached():
    """DeepSeek's routers read `self.weight.type(torch.float32)`."""
    model = build("deepseek_v3").to(torch.bfloat16)
    name = next(each for each in live_weights(model) if each.endswith("mlp.gate.weight"))
    router = model.get_submodule(name.removesuffix(".weight"))
    (vector,) = one_by_one(model, [name])
    states = torch.randn(1, 5, router.weight.shape[1]).to(torch.bfloat16)
    with torch.no_grad():
        plain, changed = router(states), vector.dense(name)
        expected = torch.nn.functional.linear(states.float()[0], router.weight.float() + 0.5 * changed)
        with vector.applied_to(model, 0.5, merge=False):
            found = router(states)
    given = found if isinstance(found, torch.Tensor) else found[0]
    assert torch.allclose(given.view_as(expected), expected, atol=1e-5)
    assert not torch.allclose(given, plain if isinstance(plain, torch.Tensor) else plain[0], atol=1e-3)


def test_a_bias_that_a_head_shares_with_its_layer_is_added_once():
    model = AutoModelForCausalLM.from_config(
        BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            is_decoder=True,
        )
    ).eval()
    (name,) = [each for each in live_weights(model) if each in ("cls.predictions.bias", "cls.predictions.decoder.bias")]
    (vector,) = one_by_one(model, [name])
    tokens = torch.tensor([[1, 2, 3]])
    plain = logits_of(model, tokens)
    with vector.applied_to(model, 0.5, merge=False):
        assert torch.allclose(logits_of(model, tokens), plain + 0.5 * vector.dense(name), atol=1e-5)


def test_one_expert_of_a_layer_cannot_be_attached_and_is_named(models):
    model = AutoModelForCausalLM.from_pretrained(models.pair("mixtral").base)
    name = next(each for each in live_weights(model) if ".experts." in each)
    (vector,) = one_by_one(model, [name])
    with pytest.raises(
        UnsupportedError, match=r"experts\.\d.*holds it in one parameter with others, as .*Merge the vector"
    ):
        vector.edit(model, merge=False)
