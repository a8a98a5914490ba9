"""Weights that are stored in fewer bits are what transformers, or the format's definition, makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import tiny_models, tiny_quantised

from hf_taskvec import TaskVector
from hf_taskvec.algebra.sources import sampled_fingerprint
from hf_taskvec.errors import CorruptFileError, MismatchError, TaskVectorError, UnsupportedError
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.live_model import live_checkpoint
from hf_taskvec.quantised.packed_weight import PackedWeight

NAME = "model.layers.1.mlp.down_proj.weight"


def assert_same(folder: Path, expected: dict[str, torch.Tensor], packed: int) -> None:
    """Every weight, bit for bit, read whole and in rows that begin within a block."""
    found = open_checkpoint(folder)
    assert sum(isinstance(each, PackedWeight) for each in found.tensors.values()) == packed
    for name, source in found.tensors.items():
        if name in expected:
            whole = source.read()
            assert whole.dtype == source.dtype == expected[name].dtype
            assert torch.equal(whole.view(torch.int16), expected[name].view(torch.int16)), name
            opened = source.readable()
            if not isinstance(opened, torch.Tensor):
                assert torch.equal(opened.rows(1, 3), whole[1:3]), name
    live = {name: tiny_models.InMemory(expected.get(name, source.read())) for name, source in found.tensors.items()}
    assert found.sampled_fingerprint == sampled_fingerprint(live)


@pytest.mark.parametrize(
    ("block", "scale_fmt"), [((32, 32), None), ((16, 32), "ue8m0"), (None, None)], ids=["blocks", "ue8m0", "tensor"]
)
def test_fp8_is_what_transformers_loads(tmp_path: Path, block: tuple[int, int] | None, scale_fmt: str | None) -> None:
    folder = tiny_quantised.fp8(tmp_path / "fp8", tiny_quantised.llama(), block, scale_fmt)
    assert_same(folder, tiny_quantised.loaded(folder), 14)


def test_mxfp4_is_what_transformers_loads(tmp_path: Path) -> None:
    from transformers import Mxfp4Config

    folder = tiny_quantised.mxfp4(tmp_path / "mxfp4", tiny_quantised.gpt_oss())
    assert_same(folder, tiny_quantised.loaded(folder, quantization_config=Mxfp4Config(dequantize=True)), 4)


@pytest.mark.parametrize("kind", tiny_quantised.COMPRESSED)
def test_compressed_tensors_are_what_transformers_loads(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    weights, activations = tiny_quantised.COMPRESSED[kind], tiny_quantised.activations_of(kind)
    folder = tiny_quantised.compressed(tmp_path / kind, tiny_quantised.llama(), weights, activations)
    wide = {  # scales that the model's dtype does not have
        name: tensor.float() * 1.001 if name.endswith("scale") else tensor
        for name, tensor in tiny_quantised.stored(folder).items()
    }
    save_file(wide, folder / "model.safetensors", {"format": "pt"})
    assert_same(folder, tiny_quantised.loaded(folder, quantization_config=CompressedTensorsConfig(dequantize=True)), 14)


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-tensor", "int4-group"])
def test_experts_in_compressed_tensors_are_what_transformers_loads(tmp_path: Path, kind: str) -> None:
    """transformers stacks experts as it unpacks them; a live model keeps scales of other layers beside its weights."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = tiny_quantised.compressed_experts(tmp_path / kind, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
    expected = {name: source.read().bfloat16() for name, source in live_checkpoint(model).tensors.items()}
    assert_same(folder, expected, 26)
    name = "model.layers.0.self_attn.q_proj.weight"
    before, tokens = {name: each.clone() for name, each in model.state_dict().items()}, torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        logits = model(tokens).logits
        with TaskVector.from_tensors({name: torch.ones(64, 64)}).applied_to(model):
            changed = [key for key, each in model.state_dict().items() if not torch.equal(each, before[key])]
            assert changed == [name] and not torch.equal(model(tokens).logits, logits)
        assert torch.equal(model(tokens).logits, logits)


@pytest.mark.parametrize(
    "options",
    [{"bits": 2}, {"bits": 3}, {"bits": 4}, {"bits": 8}, {"act_order": True}, {"act_order": True, "version": 2}],
    ids=str,
)
def test_gptq_is_what_its_definition_says(tmp_path: Path, options: dict[str, Any]) -> None:
    folder, expected = tiny_quantised.gptq(tmp_path / "gptq", tiny_quantised.llama(torch.float16), **options)
    assert_same(folder, expected, 14)


def test_awq_is_what_its_definition_says(tmp_path: Path) -> None:
    folder, expected = tiny_quantised.awq(tmp_path / "awq", tiny_quantised.llama(torch.float16))
    assert_same(folder, expected, 14)


def test_blocks_that_do_not_fill_a_matrix_lie_as_declared(tmp_path: Path) -> None:
    """DeepSeek's 576 rows in blocks of 128, which transformers refuses to dequantise."""
    folder = tiny_quantised.fp8(tmp_path / "fp8", tiny_quantised.llama())
    tensors = tiny_quantised.stored(folder)
    before = open_checkpoint(folder).tensors[NAME].read()
    codes = tensors[NAME].float() * tensors[f"{NAME}_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
    rows, columns = codes.shape
    scales = torch.rand(-(-rows // 40), -(-columns // 40)) + 0.5
    tensors[f"{NAME}_scale_inv"] = scales
    settings = {"quant_method": "fp8", "weight_block_size": [40, 40]}
    tiny_quantised.write(folder, tensors, settings)
    spread = scales.repeat_interleave(40, 0)[:rows].repeat_interleave(40, 1)[:, :columns]
    found = open_checkpoint(folder).tensors[NAME]
    assert torch.equal(found.read(), (tensors[NAME].float() * spread).bfloat16()) and found.shape == before.shape
    assert torch.equal(found.readable().rows(39, 42), found.read()[39:42])  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2], ids=["FP4 experts", "e5m2"])
def test_other_codes_are_what_transformers_makes_of_them(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder = tiny_quantised.fp8(tmp_path / "fp8", tiny_quantised.llama())
    tensors = tiny_quantised.stored(folder)
    rows, columns = tensors[NAME].shape
    if dtype == torch.int8:  # two codes in a byte
        tensors[NAME] = torch.randint(-128, 128, (rows, columns // 2)).to(torch.int8)
        tensors[f"{NAME}_scale_inv"] = torch.randint(118, 122, (rows, columns // 32), dtype=torch.uint8)
    else:
        tensors[NAME] = tensors[NAME].float().to(dtype)
    tiny_quantised.write(folder, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    expected = Fp8Dequantize(None)._dequantize_one(tensors[NAME], tensors[f"{NAME}_scale_inv"], torch.bfloat16)
    assert torch.equal(open_checkpoint(folder).tensors[NAME].read(), expected)


def test_a_vector_between_an_fp8_base_and_a_bf16_fine_tune_is_exact(tmp_path: Path) -> None:
    folder = tiny_quantised.fp8(tmp_path / "fp8", tiny_quantised.llama())
    tuned = tiny_models.shake(tiny_quantised.llama(), 0.01, 3)
    tuned.save_pretrained(tmp_path / "tuned")
    vector = TaskVector.from_finetuned(folder, tmp_path / "tuned")
    loaded, wanted = tiny_quantised.loaded(folder), tuned.state_dict()
    expected = wanted[NAME].double() - loaded[NAME].double()
    assert torch.equal(vector[NAME].dense(dtype=torch.float64), expected)
    vector.save(tmp_path / "vector")
    assert torch.equal(TaskVector.load(tmp_path / "vector")[NAME].dense(dtype=torch.float64), expected)
    with pytest.raises(UnsupportedError, match=r"reference"):
        vector.save(tmp_path / "reference", reference=True)


# What is damaged, missing or of another kind.

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def _changed(folder: Path, change: Change) -> Path:
    tensors, config = tiny_quantised.stored(folder), json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"]
    change(tensors, settings)
    tiny_quantised.write(folder, tensors, settings)
    return folder


SCALE = f"{NAME}_scale_inv"
DAMAGES: dict[str, tuple[Change, type[TaskVectorError], str]] = {
    "no scale": (lambda t, s: t.pop(SCALE), MismatchError, rf"{SCALE}, without which"),
    "another shape": (lambda t, s: t.update({SCALE: torch.ones(5, 7)}), MismatchError, rf"{SCALE} is float32 of shape"),
    "no scales": (lambda t, s: t.update({SCALE: torch.ones(0, 3)}), MismatchError, SCALE),
    "integer scales": (lambda t, s: t.update({SCALE: t[SCALE].int()}), MismatchError, rf"{SCALE} is int32"),
    "NaN": (lambda t, s: t[SCALE].fill_(float("nan")), CorruptFileError, rf"{SCALE} has scales that are NaN"),
    "a vector of codes": (lambda t, s: t.update({NAME: t[NAME].flatten()}), MismatchError, NAME),
    "another method": (lambda t, s: s.update(quant_method="aqlm"), UnsupportedError, r"'aqlm', which is not read here"),
    "NVFP4": (lambda t, s: s.update(quant_method="nvfp4"), UnsupportedError, r"'nvfp4', which is not read here"),
    "ModelOpt": (lambda t, s: s.update(quant_method="modelopt"), UnsupportedError, r"'modelopt', which is not read"),
    "no method": (lambda t, s: s.update(quant_method=[1]), UnsupportedError, r"\[1\], which is not read here"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    change, error, message = DAMAGES[damage]
    folder = tiny_quantised.fp8(tmp_path / "fp8", tiny_quantised.llama())
    _changed(folder, change)
    with pytest.raises(error, match=message):
        open_checkpoint(folder).tensors[NAME].read()


def test_codes_without_any_scales_are_refused(tmp_path: Path) -> None:
    model = tiny_quantised.llama()
    model.save_pretrained(tmp_path / "cast")
    cast = {name: each.to(torch.float8_e4m3fn) for name, each in tiny_quantised.stored(tmp_path / "cast").items()}
    save_file(cast, tmp_path / "cast" / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match=r"weight_scale_inv, without which it cannot be read"):
        open_checkpoint(tmp_path / "cast")


def test_a_format_of_compressed_tensors_that_is_not_read_is_named(tmp_path: Path) -> None:
    folder = tiny_quantised.fp8(tmp_path / "fp8", tiny_quantised.llama())
    _changed(folder, lambda t, s: s.update(quant_method="compressed-tensors", format="nvfp4-pack-quantized"))
    with pytest.raises(UnsupportedError, match=r"'nvfp4-pack-quantized', which is not read here.*bf16"):
        open_checkpoint(folder)


def test_nvfp4_is_named_where_no_config_names_it(tmp_path: Path) -> None:
    """As ModelOpt wrote it: what it is called stands in `hf_quant_config.json` alone."""
    tiny_quantised.llama().save_pretrained(tmp_path / "base")
    tensors = tiny_quantised.stored(tmp_path / "base")
    tensors[NAME] = torch.zeros(64, 48, dtype=torch.uint8)
    tensors[f"{NAME}_scale"] = torch.ones(64, 6).to(torch.float8_e4m3fn)
    tensors[f"{NAME}_scale_2"] = torch.ones(())
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"weight_scale_2, as NVFP4 has.*hf_quant_config\.json.*bf16"):
        open_checkpoint(tmp_path / "base")


@pytest.mark.parametrize(
    "settings",
    [
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}},
    ],
    ids=["sparse", "rotated"],
)
def test_weights_that_are_not_codes_times_scales_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    pytest.importorskip("compressed_tensors")
    made = tiny_quantised.COMPRESSED["fp8-tensor"], tiny_quantised.activations_of("fp8-tensor")
    folder = tiny_quantised.compressed(tmp_path / "fp8", tiny_quantised.llama(), *made)
    _changed(folder, lambda t, s: s.update({"sparsity_config": {"format": "dense"}, "transform_config": {}}))
    open_checkpoint(folder)
    _changed(folder, lambda t, s: s.update(settings))
    with pytest.raises(UnsupportedError, match=r"rotated, or some of them left out.*bf16"):
        open_checkpoint(folder)


def test_groups_beyond_the_scales_are_refused(tmp_path: Path) -> None:
    folder, _ = tiny_quantised.gptq(tmp_path / "gptq", tiny_quantised.llama(torch.float16), act_order=True)
    groups = NAME.replace("weight", "g_idx")
    _changed(folder, lambda t, s: t[groups].fill_(7))
    with pytest.raises(CorruptFileError, match=rf"{groups} names groups beyond"):
        open_checkpoint(folder).tensors[NAME].read()
