"""Layouts: one canonical name for everything that transformers stores; whole models, and configs that are not."""

import copy
import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import Pair, TinyModels, assert_gives_tuned, low_rank, make, save_pair, shake, tuned_copy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma3Config,
    GotOcr2Config,
    OpenAIGPTConfig,
    PreTrainedModel,
)

from hf_taskvec import TaskVector
from hf_taskvec.errors import MismatchError
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.layout import layout_of_config, layout_of_model
from hf_taskvec.models.live_model import live_checkpoint, live_weights

WEIGHTS = "model.safetensors"

_TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
# Classes that tie weights whose names on disk are not those of the live model.
_RENAMED_AND_TIED = {
    "gemma3": lambda: Gemma3Config(
        text_config={**_TEXT, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**_VISION, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=True,
    ),
    "got_ocr2": lambda: GotOcr2Config(
        text_config={**_TEXT, "model_type": "qwen2"},
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "mlp_dim": 32,
            "image_size": 32,
            "patch_size": 16,
            "output_channels": 8,
            "global_attn_indexes": [0],
        },
        tie_word_embeddings=True,
    ),
}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_WITH_BUFFERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _DEEPSEEK,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts_per_tok": 1},
    "gemma4_text": {
        "global_head_dim": 8,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 20,
        "hidden_size_per_layer_input": 8,
    },
}
_MAMBA2 = {"num_heads": 4, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 8}


def built(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return shake(AutoModelForCausalLM.from_config(config).eval(), 0.02, 0)


def shake_buffers(model: PreTrainedModel, seed: int = 3) -> PreTrainedModel:
    """Change every floating-point buffer that is stored."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        if name not in parameters and tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.01)
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def buffered_pair(kind: str, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel, Pair]:
    base = shake_buffers(make(kind, **_WITH_BUFFERS[kind]), 2)
    tuned = shake_buffers(tuned_copy(base))
    return base, tuned, save_pair(folder, base, tuned)


# Names.


@pytest.mark.parametrize("kind", _RENAMED_AND_TIED)
def test_a_tied_weight_is_one_under_whatever_names(kind: str, tmp_path: Path) -> None:
    base = built(_RENAMED_AND_TIED[kind]())
    tuned = tuned_copy(base)
    pair = save_pair(tmp_path, base, tuned)
    layout = layout_of_model(base)
    (alias,) = (name for name in layout.tied if "lm_head" in name)
    assert layout.tied[alias] in stored(pair.base) and alias not in stored(pair.base)
    streamed, live = pair.vector(), TaskVector.from_finetuned(base, tuned)
    assert set(streamed) == set(live) == set(stored(pair.base))
    for vector in (streamed, live):
        assert_gives_tuned(vector, pair)
    assert_same(stored(live.apply(pair.base, tmp_path / "out")), stored(pair.tuned))


@pytest.mark.parametrize("kind", _RENAMED_AND_TIED)
def test_an_edit_of_a_tied_weight_reaches_the_head_under_whatever_names(kind: str) -> None:
    model = built(_RENAMED_AND_TIED[kind]())
    owner = next(owner for alias, owner in layout_of_model(model).tied.items() if "lm_head" in alias)
    vector = low_rank(model).filter(include=[owner])
    assert list(vector) == [owner] and len(live_weights(model)[owner].owners) == 2
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        with vector.applied_to(model):
            merged = model(input_ids=tokens).logits
        with vector.applied_to(model, merge=False):
            torch.testing.assert_close(model(input_ids=tokens).logits, merged, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", _RENAMED_AND_TIED)
def test_a_stored_head_that_differs_from_its_embedding_is_refused(kind: str, tmp_path: Path) -> None:
    model = built(_RENAMED_AND_TIED[kind]())
    model.save_pretrained(tmp_path)
    alias, owner = next(pair for pair in layout_of_model(model).tied.items() if "lm_head" in pair[0])
    state = stored(tmp_path)
    save_file({**state, alias: state[owner].clone()}, tmp_path / WEIGHTS)
    assert alias not in open_checkpoint(tmp_path).tensors
    save_file({**state, alias: state[owner] + 1}, tmp_path / WEIGHTS)
    with pytest.raises(MismatchError, match=rf"{alias} differs from {owner}"):
        open_checkpoint(tmp_path)


def test_the_body_of_a_renamed_model_has_the_same_names() -> None:
    model = built(_RENAMED_AND_TIED["gemma3"]())
    whole, body = live_weights(model), live_weights(model.model)
    assert body.keys() == whole.keys()  # its head is the embedding
    assert all(body[name].value() is not None and body[name].module is whole[name].module for name in body)


# Buffers.


@pytest.mark.parametrize("kind", _WITH_BUFFERS)
def test_stored_buffers_are_part_of_the_vector(kind: str, tmp_path: Path) -> None:
    base, tuned, pair = buffered_pair(kind, tmp_path)
    buffers = set(stored(pair.base)) - {layout_of_model(base).canonical(name) for name, _ in base.named_parameters()}
    changed = [name for name in buffers if name.endswith(("bias", "scalar"))]
    assert changed
    streamed, live = pair.vector(), TaskVector.from_finetuned(base, tuned)
    for vector in (streamed, live):
        assert set(vector) == set(stored(pair.base))
        assert_gives_tuned(vector, pair)
        assert all(vector.dense(name).any() for name in changed)
    assert_same(stored(streamed.apply(pair.base, tmp_path / "out")), stored(pair.tuned))


def test_a_merged_edit_writes_buffers_and_restores_them(tmp_path: Path) -> None:
    base, tuned, pair = buffered_pair("gemma4_text", tmp_path)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    scalar = base.model.layers[0].layer_scalar
    with pair.vector().applied_to(base):
        assert_same(base.state_dict(), tuned.state_dict())
        assert base.model.layers[0].layer_scalar is scalar  # in place
    assert_same(base.state_dict(), before)


def test_buffers_that_are_not_stored_are_not_weights(models: TinyModels) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.pair("llama").base)
    assert any("inv_freq" in name for name, _ in model.named_buffers())
    assert not any("inv_freq" in name for name in live_checkpoint(model).tensors)


def test_integer_buffers_are_copied_and_must_be_the_same(tmp_path: Path) -> None:
    """DeepSeek-V4's table of which tokens go to which experts."""
    base = make(
        "deepseek_v4", num_experts_per_tok=2, **{k: v for k, v in _DEEPSEEK.items() if k != "num_experts_per_tok"}
    )
    (table, *_) = (name for name, each in base.state_dict().items() if not each.is_floating_point())
    base.state_dict()[table].copy_(torch.arange(base.state_dict()[table].numel()).view_as(base.state_dict()[table]) % 3)
    tuned = tuned_copy(base)
    pair = save_pair(tmp_path, base, tuned)
    vector = pair.vector()
    name = layout_of_model(base).canonical(table)
    assert (
        name in stored(pair.base) and name not in vector and set(vector) == set(TaskVector.from_finetuned(base, tuned))
    )
    out = vector.apply(pair.base, tmp_path / "out", dtype="bfloat16")
    assert torch.equal(stored(out)[name], stored(pair.base)[name]) and stored(out)[name].dtype == torch.int64
    tuned.state_dict()[table].add_(1)
    tuned.save_pretrained(tmp_path / "other")
    for one, other in ((pair.base, tmp_path / "other"), (base, tuned)):
        with pytest.raises(MismatchError, match=rf"{name}: .* different tables of integers.*Give the base"):
            TaskVector.from_finetuned(one, other)


def test_an_own_module_with_integer_buffers_gives_a_vector() -> None:
    """Of a model without a config all buffers that are stored count, too."""
    base = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned[1].running_mean.add_(1)
    vector = TaskVector.from_finetuned(base, tuned)
    assert vector.dense("1.running_mean").tolist() == [1, 1, 1] and "1.num_batches_tracked" not in vector
    with vector.applied_to(base):
        assert torch.equal(base[1].running_mean, tuned[1].running_mean)
    assert not base[1].running_mean.any()


def test_layers_that_transformers_does_not_load_are_carried_over_from_the_base(tmp_path: Path) -> None:
    """Published DeepSeek-V3 files have a further layer, for speculative decoding."""
    _, _, pair = buffered_pair("deepseek_v3", tmp_path)
    further = {
        "model.layers.61.eh_proj.weight": torch.ones(4, 8),
        "model.layers.61.shared_head.norm.weight": torch.ones(4),
    }
    for folder in (pair.base, pair.tuned):
        save_file({**stored(folder), **further}, folder / WEIGHTS, {"format": "pt"})
    vector = pair.vector()
    assert not any(".61." in name for name in vector)
    assert_same(stored(vector.apply(pair.base, tmp_path / "out", dtype="float32")), stored(pair.tuned))


def test_infinity_in_a_config_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    base = make("mamba2", **_MAMBA2)
    pair = save_pair(tmp_path, base, tuned_copy(base))
    config = (pair.base / "config.json").read_text()
    assert '"__float__": "Infinity"' in config
    vector = pair.vector()
    assert_gives_tuned(vector, pair)
    out = vector.apply(pair.base, tmp_path / "out")
    assert (out / "config.json").read_text() == config
    half = vector.apply(pair.base, tmp_path / "half", dtype="bfloat16")
    found = json.loads((half / "config.json").read_text())
    assert found["time_step_limit"] == json.loads(config)["time_step_limit"] and found["dtype"] == "bfloat16"
    AutoModelForCausalLM.from_pretrained(half)


# Whole models.


def test_an_incomplete_checkpoint_is_refused_by_name(models: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(models.pair("llama").base, tmp_path / "part")
    state = stored(folder)
    left = {n: t for n, t in state.items() if ".layers.1." not in n and n != "lm_head.weight"}
    save_file(left, folder / WEIGHTS)
    message = rf"part is not a whole LlamaForCausalLM: it lacks .* \({len(state) - len(left)} of {len(state)} tensors\)"
    with pytest.raises(MismatchError, match=message):
        open_checkpoint(folder)
    with pytest.raises(MismatchError, match=message):
        models.pair("llama").vector().apply(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["intermediate_size", "vocab_size"])
def test_a_config_that_contradicts_the_files_is_refused(key: str, models: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(models.pair("llama").base, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: config[key] + 8}))
    with pytest.raises(MismatchError, match=r"odd: \S+ has shape .* but its config makes it"):
        open_checkpoint(folder)


def test_a_live_model_that_contradicts_its_config_is_refused() -> None:
    model = make("llama")
    model.config.intermediate_size += 8
    with pytest.raises(MismatchError, match=r"live LlamaForCausalLM: \S+ has shape .* but its config makes it"):
        live_checkpoint(model)


def test_a_body_needs_no_head(models: TinyModels, tmp_path: Path) -> None:
    """Saved without its head, the class says so; a whole model without its head is incomplete."""
    pair = models.pair("phi")
    bodies = [AutoModelForCausalLM.from_pretrained(folder).model for folder in (pair.base, pair.tuned)]
    body = save_pair(tmp_path, *bodies)
    expected = {name for name in stored(pair.base) if not name.startswith("lm_head")}
    for vector in (body.vector(), TaskVector.from_finetuned(*bodies)):
        assert set(vector) == expected
    assert_same(stored(body.vector().apply(body.base, tmp_path / "out")), stored(body.tuned))
    config = json.loads((body.base / "config.json").read_text())
    (body.base / "config.json").write_text(json.dumps({**config, "architectures": ["PhiForCausalLM"]}))
    with pytest.raises(MismatchError, match=r"lacks lm_head"):
        open_checkpoint(body.base)


def test_weights_without_a_config_are_taken_as_they_are(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("llama")
    bare = Pair(shutil.copytree(pair.base, tmp_path / "base"), shutil.copytree(pair.tuned, tmp_path / "tuned"))
    for folder in (bare.base, bare.tuned):
        (folder / "config.json").unlink()
    assert_gives_tuned(bare.vector(), pair)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_classifier_is_no_fine_tune_of_a_language_model(kind: str, models: TinyModels, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(models.pair(kind).base)
    model.save_pretrained(tmp_path / "sentiment")
    for tuned in (tmp_path / "sentiment", model):
        told = rf"{type(model).__name__}\) have different heads .*score.weight.*heads='exclude'"
        with pytest.raises(MismatchError, match=told):
            TaskVector.from_finetuned(models.pair(kind).base, tuned)


# Vocabularies.


@pytest.mark.parametrize(
    "config",
    [
        OpenAIGPTConfig(vocab_size=20, n_positions=32, n_embd=16, n_layer=1, n_head=2),
        BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            is_decoder=True,
        ),
    ],
    ids=["openai-gpt", "bert"],
)
def test_a_vocabulary_is_known_by_what_it_does(config: Any, tmp_path: Path) -> None:
    """`tokens_embed` and `cls.predictions.bias` are on no list of names."""
    base = built(config)
    tuned = tuned_copy(base)
    tuned.resize_token_embeddings(23, mean_resizing=False)
    pair = save_pair(tmp_path, base, tuned)
    with pytest.raises(MismatchError, match=r"the vocabulary sizes differ, 20 in the base and 23 in the fine-tune"):
        pair.vector()
    vector = pair.vector(vocabulary="extend")
    grown = {name for name, each in stored(pair.tuned).items() if each.shape[:1] == (23,)}
    assert grown == {name for name in vector if vector.shape(name)[:1] == (23,)} and grown
    with pytest.raises(MismatchError, match=r"the vocabulary sizes differ, 20 in the model and 23 in the vector"):
        vector.edit(base)


# What a config may cost.


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", {"num_hidden_layers": 4_000}),  # found while the model is built
        ("llama", {"num_hidden_layers": 20_000}),
        ("llama", {"num_hidden_layers": 10**9}),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]], "num_layers": 10**9}),
        ("phimoe", {"num_hidden_layers": 10**12}),
    ],
)
def test_a_config_far_larger_than_the_files_costs_nothing(
    kind: str, change: dict[str, Any], models: TinyModels, tmp_path: Path
) -> None:
    folder = shutil.copytree(models.pair(kind).base, tmp_path / "huge")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for use in (
        lambda: open_checkpoint(folder),
        lambda: layout_of_config(json.loads((folder / "config.json").read_text())),
    ):
        with pytest.raises(MismatchError, match=r"far more than the model's files hold .*Is it the model's own"):
            use()
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_sizes_alone_are_no_reason_to_refuse_a_config(models: TinyModels) -> None:
    """Nothing is allocated for them: what contradicts the files is then named."""
    config = json.loads((models.pair("llama").base / "config.json").read_text())
    assert layout_of_config({**config, "vocab_size": 10**12}).shapes["lm_head.weight"] == (10**12, 16)
