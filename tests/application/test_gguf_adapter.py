"""Adapters for llama.cpp: by what transformers reads of them, and, where it was built, by llama.cpp itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from support.llama_cpp import VOCABULARY, convert_adapter, convert_model, logits, needs_llama_cpp
from support.tiny_models import make
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hf_taskvec import TaskVector
from hf_taskvec.application.gguf_adapter import _ARCHITECTURES
from hf_taskvec.errors import UnsupportedError

TYPES = sorted(_ARCHITECTURES)
UNTIED = [kind for kind in TYPES if kind != "gpt2" and not kind.startswith("gemma")]


# What llama.cpp takes for granted of a type, or asks for by another name.
_ASSUMED: dict[str, dict[str, Any]] = {
    "phi": {"num_key_value_heads": None, "intermediate_size": 128},
    "gemma2": {"query_pre_attn_scalar": 8},
}


def model_of(kind: str, **more: Any) -> PreTrainedModel:
    """Several heads, fewer of keys, no tied head where the type can have its own."""
    if kind == "gpt2":
        return make(kind, n_embd=32, n_head=4, n_positions=64, n_ctx=64, **more)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    others = {"max_position_embeddings": 64, "num_local_experts": None, "num_experts": None}
    return make(
        kind, **{**sizes, **others, "tie_word_embeddings": kind not in UNTIED, **_ASSUMED.get(kind, {}), **more}
    )


def vector_of(model: PreTrainedModel, rank: int = 3, size: float = 1.0) -> TaskVector:
    """Every matrix changed, of tied models all but the embedding."""
    generator = torch.Generator().manual_seed(0)
    tied = model.config.tie_word_embeddings or model.config.model_type == "gpt2"
    left_out = ("embed", "lm_head", "wte", "wpe") if tied else ()
    changes = {
        name: tuple(size * torch.randn(shape, generator=generator) for shape in ((len(weight), rank), (rank, width)))
        for name, weight in model.state_dict().items()
        if weight.dim() == 2 and (width := weight.shape[1]) and not any(word in name for word in left_out)
    }
    return TaskVector.from_tensors(changes, name="v")


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {each.name: torch.tensor(np.array(each.data)) for each in GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "qwen2", "qwen3", "gemma2", "stablelm", "starcoder2"])
def test_transformers_reads_the_change_under_its_own_names(kind: str, tmp_path: Path) -> None:
    """A GGUF file whose weights are the products of the factors is, by transformers' own tables, the vector."""
    model = model_of(kind)
    model.save_pretrained(tmp_path / "base")
    vector = vector_of(model)
    folder = vector.to_adapter(tmp_path / "adapter", base=tmp_path / "base", serve="llama.cpp")
    found = tensors(folder / "adapter.gguf")
    reader = GGUFReader(folder / "adapter.gguf")
    said = {name: reader.fields[name].contents() for name in ("general.type", "adapter.type", "adapter.lora.alpha")}
    assert said == {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 3.0}
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(tmp_path / "change.gguf", architecture)
    writer.add_name("change")
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_embedding_length(32)
    for name in {name.rpartition(".")[0] for name in found}:
        a, b = found[f"{name}.lora_a"].double(), found[f"{name}.lora_b"].double()
        whole = (a @ b.T) if name == "token_embd.weight" else b @ a
        writer.add_tensor(name, whole.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = load_gguf_checkpoint(tmp_path / "change.gguf", return_tensors=True, model_to_load=model)["tensors"]
    assert read.keys() == vector.keys() and len(found) == 2 * len(vector)
    for name in vector:
        assert torch.allclose(read[name].double(), vector.dense(name).double(), atol=1e-5), name


def test_ranks_are_one_and_the_dtype_is_as_asked(tmp_path: Path) -> None:
    model = model_of("llama")
    model.save_pretrained(tmp_path / "base")
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    vector = TaskVector.from_tensors(
        {name: (torch.ones(32, 1), torch.ones(1, 32)), other: (torch.ones(32, 2), torch.ones(2, 32))}
    )
    folder = vector.to_adapter(
        tmp_path / "a", base=tmp_path / "base", serve="llama.cpp", dtype=torch.bfloat16, scale=-0.5
    )
    reader = GGUFReader(folder / "adapter.gguf")
    assert reader.fields["adapter.lora.alpha"].contents() == 2.0
    assert {(each.tensor_type.name, *map(int, each.shape)) for each in reader.tensors} == {
        ("BF16", 32, 2),
        ("BF16", 2, 32),
    }
    record = json.loads((folder / "taskvec_adapter.json").read_text())
    assert record["options"] == {"serve": "llama.cpp"} and record["scale"] == -0.5


def test_what_llama_cpp_cannot_load_is_refused(tmp_path: Path) -> None:
    opt, llama = make("opt"), model_of("llama")
    opt.save_pretrained(tmp_path / "opt")
    llama.save_pretrained(tmp_path / "llama")
    name = "model.decoder.layers.0.fc1.weight"
    with pytest.raises(UnsupportedError, match=r"type 'opt' in another way.*convert_lora_to_gguf\.py --base"):
        TaskVector.from_tensors({name: (torch.ones(32, 1), torch.ones(1, 16))}).to_adapter(
            tmp_path / "x", base=tmp_path / "opt", serve="llama.cpp"
        )
    vector = vector_of(llama)
    with pytest.raises(UnsupportedError, match="needs the base's config"):
        vector.filter("*up_proj*").to_adapter(tmp_path / "x", serve="llama.cpp")
    with pytest.raises(UnsupportedError, match=r"llama\.cpp takes no whole values"):
        vector.to_adapter(tmp_path / "x", base=tmp_path / "llama", serve="llama.cpp", dense="save")
    with pytest.raises(UnsupportedError, match="float64: a GGUF adapter has"):
        vector.to_adapter(tmp_path / "x", base=tmp_path / "llama", serve="llama.cpp", dtype=torch.float64)
    assert not (tmp_path / "x").exists()


def test_what_is_missing_is_named() -> None:
    code = (
        "import sys, torch; sys.modules['gguf'] = None\n"
        "from hf_taskvec.application.gguf_adapter import check_gguf\n"
        "try:\n    check_gguf({'model_type': 'llama'}, torch.float32)\nexcept Exception as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "serve='llama.cpp' needs gguf: pip install 'hf-taskvec[llama-cpp]'"


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "gpt2"])
def test_the_file_is_what_llama_cpps_own_converter_writes(kind: str, tmp_path: Path) -> None:
    """But for GPT-2, whose layers that converter turns the wrong way round: llama.cpp then refuses the file."""
    model = model_of(kind)
    model.save_pretrained(tmp_path / "base")
    folder = vector_of(model).to_adapter(tmp_path / "adapter", base=tmp_path / "base", serve="llama.cpp")
    own, theirs = (
        tensors(path)
        for path in (
            folder / "adapter.gguf",
            convert_adapter(folder, tmp_path / "base", tmp_path / "theirs.gguf"),
        )
    )
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)


# llama.cpp looks GELU up in a table of fp16; the others are in fp32 throughout.
_CLOSE = {"llama": 1e-5, "phi3": 1e-5, "qwen3": 1e-5, "gemma2": 2e-3, "gpt2": 1e-3, "phi": 1e-3}


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("kind", sorted(_CLOSE))
def test_llama_cpp_says_at_each_scale_what_the_edited_model_says(kind: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = model_of(kind, vocab_size=VOCABULARY)
    model.save_pretrained(base)
    vector = vector_of(model, size=0.3)
    folder = vector.to_adapter(tmp_path / "adapter", base=base, serve="llama.cpp")
    converted = convert_model(base, tmp_path / "base.gguf")
    untouched = None
    for scale in (0.0, 0.5, 1.0):
        adapter = folder / "adapter.gguf" if scale else None
        tokens, found = logits(converted, tmp_path / f"at-{scale}", adapter, scale)
        edited = AutoModelForCausalLM.from_pretrained(base)
        with torch.no_grad(), vector.applied_to(edited, scale=scale):
            expected = edited(torch.tensor([tokens])).logits[0, -1]
        untouched = expected if untouched is None else untouched
        moved = float((expected - untouched).abs().max())  # how far the edit goes is what a difference is small beside
        assert scale == 0 or moved > 0.4
        assert np.abs(found - expected.numpy()).max() < _CLOSE[kind] * max(moved, 1.0), scale
