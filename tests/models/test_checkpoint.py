"""Opened checkpoints: stored and canonical names, fingerprints of copies."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import TinyModels
from transformers import AutoModelForCausalLM

from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.live_model import live_checkpoint


def test_stored_tensors_have_their_names_in_the_files_and_buffers_have_no_canonical_one(
    models: TinyModels, tmp_path: Path
) -> None:
    """The Hub's GPT-2: without the prefix, and with its causal masks."""
    pair = models.pair("gpt2")
    weights = load_file(pair.base / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    (tmp_path / "config.json").write_text((pair.base / "config.json").read_text())
    save_file(old, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert set(found.stored) == set(old)
    assert set(found.canonical_of) == set(old) - {"h.0.attn.bias"}
    assert found.canonical_of["h.0.attn.c_attn.weight"] == "transformer.h.0.attn.c_attn.weight"
    assert {found.canonical_of[name] for name in found.canonical_of} == set(found.tensors)
    for name, canonical in found.canonical_of.items():
        assert found.tensors[canonical] == found.stored[name]


def test_the_sampled_fingerprint_is_that_of_each_copy_and_of_no_other_model(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    expected = open_checkpoint(pair.base).sampled_fingerprint
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert open_checkpoint(tmp_path / "sharded").sampled_fingerprint == expected
    assert live_checkpoint(model).sampled_fingerprint == expected
    assert open_checkpoint(pair.tuned).sampled_fingerprint != expected
