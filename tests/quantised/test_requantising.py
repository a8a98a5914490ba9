"""Edited weights in the format that they were stored in, and without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import launch, tiny_models, tiny_quantised
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_taskvec import TaskVector
from hf_taskvec.algebra.deltas import Dense
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.errors import BadValueError
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.quantised.packed_weight import PackedWeight, ScaledWeight
from hf_taskvec.quantised.requantising import EditTally, requantise
from hf_taskvec.quantised.scaled_matrix import ScaledMatrix

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


def test_codes_that_a_dtype_cannot_tell_apart_are_kept(tmp_path: Path) -> None:
    """With small scales, FP8's smallest codes stand for numbers that fp16 rounds to 0, or to others."""
    base = tiny_quantised.fp8(tmp_path / "base", tiny_quantised.llama(torch.float16), (32, 32))
    stored = tiny_quantised.stored(base)
    shape, scales = stored[NAME].shape, stored[f"{NAME}_scale_inv"]
    codes = torch.randint(0, 0x20, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes[::32, ::32] = 0x7E  # 448: the scale fits the block
    stored[NAME] = codes.view(torch.float8_e4m3fn)
    stored[f"{NAME}_scale_inv"] = torch.full_like(scales, 3e-6)
    settings = json.loads((base / "config.json").read_text())["quantization_config"]
    tiny_quantised.write(base, stored, settings)
    weight = open_checkpoint(base).tensors[NAME]
    assert weight.dtype == torch.float16
    assert int((weight.read() == 0).sum()) > 4 * int((codes == 0).sum())
    change = torch.zeros(shape)
    change[5, 7] = 1e-3
    same = TaskVector.from_tensors({NAME: change}).apply(base, tmp_path / "same", requantise="same")
    found = tiny_quantised.stored(same)[NAME].view(torch.uint8)
    assert [tuple(place) for place in (found != codes).nonzero().tolist()] == [(5, 7)]


@pytest.mark.parametrize("kind", ["mxfp4", "blocks", "channels", "channels of a column", "one scale"])
def test_experts_are_stored_alike_in_any_parts(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real expert is a row of many million weights, which are read and stored some outputs at a time."""
    generator = torch.Generator().manual_seed(0)
    if kind == "mxfp4":
        base, _ = made(tmp_path / "base", kind)
        weight = next(each for each in open_checkpoint(base).tensors.values() if isinstance(each, PackedWeight))
    else:
        scales = {"blocks": (3, 5, 2), "channels": (3, 40), "channels of a column": (3, 40, 1), "one scale": (3,)}[kind]
        block = {"blocks": (8, 16), "one scale": (40, 32)}.get(kind, (1, 32))
        codes = torch.randint(0, 0x70, (3, 40, 32), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
        numbers = torch.rand(scales, generator=generator) * 1e-3 + 1e-4
        parts = tuple((r, r, InMemory(t)) for r, t in (("codes", codes), ("scales", numbers)))
        weight = ScaledMatrix("experts", (3, 40, 32), torch.bfloat16, parts, block, torch.float32)
    assert isinstance(weight, ScaledWeight)
    change = torch.randn(weight.shape, generator=generator) * 0.05

    def stored() -> tuple[torch.Tensor, dict[str, list[torch.Tensor]], dict[str, Any]]:
        tally, found = EditTally(weight), dict[str, list[torch.Tensor]]()
        whole = Sum(weight.shape, [Term(1.0, Dense((InMemory(change),)))], weight)
        for piece in requantise(weight, whole, tally):
            found.setdefault(piece.role, []).append(piece.elements)
        return weight.read(), found, tally.result().to_dict()

    expected = stored()
    for role, pieces in expected[1].items():
        part = weight.part(role)
        assert part is not None and torch.cat(pieces).shape == part.shape
    monkeypatch.setattr("hf_taskvec.quantised.packed_weight.TILE", 300)
    found = stored()
    assert torch.equal(found[0], expected[0])
    for role, pieces in expected[1].items():
        assert torch.equal(bits(torch.cat(found[1][role])), bits(torch.cat(pieces))), role
    for key, value in expected[2].items():
        assert found[2][key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)


_LAUNCHED = """
import os, signal, sys
import hf_taskvec.application.checkpoint_writing as module
from support.launch import leave_processes
from hf_taskvec import TaskVector
base, tuned, out, tiles = sys.argv[1:]
real, left = module._write_tiles, [int(tiles)]
def counted(task):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(task)
module._write_tiles = counted
TaskVector.from_finetuned(base, tuned).apply(base, out, requantise="same", max_shard_size="12kB", threads=1)
leave_processes()
"""


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_two_processes_and_a_killed_run_write_the_same_bytes_as_one(tmp_path: Path, kind: str) -> None:
    base, _ = made(tmp_path / "base", kind)
    fine_tune(tmp_path / "tuned", base)
    script = tmp_path / "script.py"
    script.write_text(_LAUNCHED)
    given = script, base, tmp_path / "tuned"
    launch.succeed(*given, tmp_path / "one", "-1")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert len([name for name in expected if name.endswith(".safetensors")]) > 2
    launch.succeed(*given, tmp_path / "two", "-1", processes=2)
    killed = launch.start(*given, tmp_path / "resumed", "25")
    assert killed.wait() != 0 and not (tmp_path / "resumed").exists()
    assert list((tmp_path / ".resumed.unfinished").glob("*.safetensors"))
    launch.succeed(*given, tmp_path / "resumed", "-1")
    for name in ("two", "resumed"):
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == expected, name
    assert len(report(tmp_path / "resumed")) == len(report(tmp_path / "one")) > 0


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


@pytest.mark.parametrize("kind", ["fp8", "int4-group", "gptq"])
def test_a_negative_scale_is_kept_where_it_reaches(tmp_path: Path, kind: str) -> None:
    base, _ = made(tmp_path / "base", kind)
    stored = tiny_quantised.stored(base)
    name = next(name for name in stored if "down_proj" in name and "scale" in name)
    stored[name] = -stored[name]
    tiny_quantised.write(base, stored, json.loads((base / "config.json").read_text())["quantization_config"])
    before = open_checkpoint(base).tensors
    weight = next(key for key, each in before.items() if isinstance(each, PackedWeight) and "down_proj" in key)
    was = before[weight].read().double()
    change = was.abs().max() * torch.randn(was.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    same = TaskVector.from_tensors({weight: change.float()}).apply(base, tmp_path / "same", requantise="same")
    assert report(same)[weight]["share"] == pytest.approx(1.0, abs=0.02)


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
