"""Edited weights in the format that they were stored in, and without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models, tiny_quantised
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.quantised.packed_weight import PackedWeight

NAME = "model.layers.1.mlp.down_proj.weight"
# What rounding to the codes may move a weight, beside the weights' size: half a step of fp8, int8, int4 and int3.
FORMATS = {
    "fp8": 0.03,
    "fp8-one-scale": 0.03,
    "fp8-ue8m0": 0.03,
    "mxfp4": 0.13,
    "gptq": 0.07,
    "gptq-act-order": 0.07,
    "awq": 0.07,
    **dict.fromkeys(("fp8-tensor", "fp8-channel", "fp8-block"), 0.03),
    **dict.fromkeys(("int8-channel", "int8-packed"), 0.01),
    **dict.fromkeys(("int4-group", "int4-zeros"), 0.13),
    "int3-group": 0.26,
}


def made(folder: Path, kind: str) -> tuple[Path, dict[str, Any]]:
    """A base in a format, and how transformers loads it without quantisation."""
    if kind == "mxfp4":
        from transformers import Mxfp4Config

        options = {"quantization_config": Mxfp4Config(dequantize=True)}
        return tiny_quantised.mxfp4(folder, tiny_quantised.gpt_oss()), options
    if kind.startswith("gptq"):
        return tiny_quantised.gptq(folder, tiny_quantised.llama(torch.float16), act_order="act" in kind)[0], {}
    if kind == "awq":
        return tiny_quantised.awq(folder, tiny_quantised.llama(torch.float16))[0], {}
    if kind in tiny_quantised.COMPRESSED:
        pytest.importorskip("compressed_tensors")
        from transformers import CompressedTensorsConfig

        weights, activations = tiny_quantised.COMPRESSED[kind], tiny_quantised.activations_of(kind)
        base = tiny_quantised.compressed(folder, tiny_quantised.llama(), weights, activations)
        return base, {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    block, scale_fmt = (None if "one" in kind else (32, 32)), ("ue8m0" if "ue8m0" in kind else None)
    return tiny_quantised.fp8(folder, tiny_quantised.llama(), block, scale_fmt), {}


def fine_tune(folder: Path, base: Path) -> PreTrainedModel:
    """A model near to a base, saved without quantisation."""
    config = json.loads((base / "config.json").read_text())
    model = tiny_quantised.gpt_oss() if config["model_type"] == "gpt_oss" else tiny_quantised.llama()
    stored = {name: source.read() for name, source in open_checkpoint(base).tensors.items()}
    model.to(stored[next(iter(stored))].dtype).load_state_dict(stored)
    tuned = tiny_models.shake(model, 0.01, 5)
    tuned.save_pretrained(folder)
    return tuned


def report(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / "taskvec_apply.json").read_text())["requantised"]
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_edit_is_stored_as_the_base_is(tmp_path: Path, kind: str) -> None:
    base, options = made(tmp_path / "base", kind)
    tuned = fine_tune(tmp_path / "tuned", base).state_dict()
    vector = TaskVector.from_finetuned(base, tmp_path / "tuned")
    before, stored = open_checkpoint(base).tensors, tiny_quantised.stored(base)

    same = vector.apply(base, tmp_path / "same", requantise="same")
    written, after = tiny_quantised.stored(same), open_checkpoint(same).tensors
    assert {n: (t.dtype, t.shape) for n, t in written.items()} == {n: (t.dtype, t.shape) for n, t in stored.items()}
    told = report(same)
    assert set(told) == {name for name, each in before.items() if isinstance(each, PackedWeight)}
    for name, each in told.items():
        got, was, wanted = after[name].read().double(), before[name].read().double(), tuned[name].double()
        assert (got - wanted).norm() < FORMATS[kind] * wanted.norm(), name
        edit = wanted - was
        assert each["weights"] == got.numel() and each["edited"] == int(edit.count_nonzero())
        assert each["undone"] == int(((edit != 0) & (got == was)).count_nonzero())
        assert each["error"] == pytest.approx(((got - wanted).norm() / edit.norm()).item(), rel=1e-5)
        assert each["share"] == pytest.approx(((got - was) * edit).sum().item() / edit.square().sum().item(), rel=1e-5)
    if not kind.startswith(("gptq", "awq")):  # whose packages need a GPU, or are not there
        model = AutoModelForCausalLM.from_pretrained(same, **options)
        assert model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False).shape == (1, 5)
        loaded = model.state_dict()
        for name in told:
            assert torch.equal(loaded[name], after[name].read()), name


@pytest.mark.parametrize("kind", ["fp8", "fp8-one-scale", "mxfp4", "int4-zeros", "gptq-act-order", "awq"])
def test_what_an_edit_leaves_alone_is_stored_bit_for_bit(tmp_path: Path, kind: str) -> None:
    base, _ = made(tmp_path / "base", kind)
    stored, before = tiny_quantised.stored(base), open_checkpoint(base).tensors
    name = next(name for name, each in before.items() if isinstance(each, PackedWeight))
    change = torch.zeros(before[name].shape)
    same = TaskVector.from_tensors({name: change}).apply(base, tmp_path / "same", requantise="same")
    assert report(same)[name]["edited"] == 0 and report(same)[name]["share"] == 1.0
    for each, tensor in tiny_quantised.stored(same).items():
        assert torch.equal(bits(tensor), bits(stored[each])), each


def test_a_model_without_quantisation_is_rounded_once(tmp_path: Path) -> None:
    base, _ = made(tmp_path / "base", "fp8")
    tuned = fine_tune(tmp_path / "tuned", base).state_dict()
    vector = TaskVector.from_finetuned(base, tmp_path / "tuned")
    plain = vector.apply(base, tmp_path / "plain", requantise="bf16", max_shard_size="20kB")
    config = json.loads((plain / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    for name, tensor in tiny_quantised.loaded(plain).items():
        assert torch.equal(tensor, tuned[name]), name
    half = vector.apply(base, tmp_path / "half", requantise="bf16", scale=-0.3)
    was = open_checkpoint(base).tensors[NAME].read().double()
    exact = was - 0.3 * (tuned[NAME].double() - was)
    assert torch.equal(open_checkpoint(half).tensors[NAME].read(), tiny_models.nearest(exact, torch.bfloat16))


def test_a_larger_weight_gets_a_larger_scale(tmp_path: Path) -> None:
    base, _ = made(tmp_path / "base", "fp8")
    change = torch.zeros(open_checkpoint(base).tensors[NAME].shape)
    change[3, 40] = 5.0  # in the block of rows 0 to 31 and columns 32 to 63
    same = TaskVector.from_tensors({NAME: change}).apply(base, tmp_path / "same", requantise="same")
    old, new = (tiny_quantised.stored(each)[f"{NAME}_scale_inv"] for each in (base, same))
    assert [tuple(place) for place in (old != new).nonzero().tolist()] == [(0, 1)]
    got = open_checkpoint(same).tensors[NAME].read().float()
    assert got[3, 40] == pytest.approx(5.0, rel=0.02) and got.isfinite().all()


def test_a_choice_must_be_made_and_fit(tmp_path: Path, models: tiny_models.TinyModels) -> None:
    base, _ = made(tmp_path / "base", "fp8")
    vector = TaskVector.from_tensors({NAME: torch.ones(64, 96)})
    for options, message in (
        ({}, r"stores 14 weights as FP8. Pass requantise='same' .* or requantise='bf16'"),
        ({"requantise": "fp16"}, r"requantise='fp16' is not one of 'same', 'bf16'"),
        ({"requantise": "same", "dtype": "float16"}, r"dtype= cannot be chosen with requantise='same'"),
    ):
        with pytest.raises(BadValueError, match=message):
            vector.apply(base, tmp_path / "out", **options)
    pair = models.pair("llama")
    with pytest.raises(BadValueError, match=r"no weight of base is stored in fewer bits"):
        pair.vector().apply(pair.base, tmp_path / "out", requantise="bf16")
    assert not (tmp_path / "out").exists()
