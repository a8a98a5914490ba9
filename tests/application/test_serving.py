"""Adapters for vLLM; with its wheel at hand, by its own reading of the config."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.tiny_models import TinyModels, low_rank, make
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.application.serving import max_lora_rank, serving_command
from hf_taskvec.errors import BadValueError, CorruptFileError, UnsupportedError

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


def vector_of(*ranks: int, size: int = 16) -> TaskVector:
    """Layers of different ranks, of the tiny Llama."""
    generator = torch.Generator().manual_seed(0)

    def factors(rows: int, columns: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)

    return TaskVector.from_tensors({Q: factors(size, size, ranks[0]), UP: factors(2 * size, size, ranks[-1])}, name="v")


def test_all_layers_have_one_rank_and_one_scaling(models: TinyModels, tmp_path: Path) -> None:
    base, vector = models.pair("llama").base, vector_of(3, 5)
    folder = vector.to_adapter(tmp_path / "adapter", base=base, serve="vllm")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 5 and not config["rank_pattern"] and not config["alpha_pattern"]
    assert not config["modules_to_save"] and not config["use_dora"] and config["bias"] == "none"
    shapes = {tuple(each.shape) for each in load_file(folder / "adapter_model.safetensors").values()}
    assert shapes == {(5, 16), (16, 5), (32, 5)}
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).merge_and_unload()
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name in vector:
        assert torch.allclose(merged.state_dict()[name], before[name] + vector.dense(name), atol=1e-5)
    assert max_lora_rank(folder) == 8
    command = serving_command(folder, "vllm", "me/base")
    assert command == f"vllm serve me/base --enable-lora --max-lora-rank 8 --lora-modules adapter={folder}"


def test_what_vllm_does_not_take_is_refused_with_the_way_out(models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("llama").base
    with pytest.raises(UnsupportedError, match=r"no whole values.*dense='drop'.*apply\(\)"):
        vector_of(2).to_adapter(tmp_path / "x", base=base, dense="save", serve="vllm")
    with pytest.raises(BadValueError, match="serve='tgi' is not one of 'vllm'"):
        vector_of(2).to_adapter(tmp_path / "x", base=base, serve="tgi")
    make("llama", hidden_size=520, intermediate_size=1040, num_attention_heads=4, head_dim=130).save_pretrained(
        tmp_path / "wide"
    )
    with pytest.raises(UnsupportedError, match=r"rank 513, and vLLM serves no more than 512.*compress\(rank="):
        vector_of(513, size=520).to_adapter(tmp_path / "x", base=tmp_path / "wide", serve="vllm")
    assert not (tmp_path / "x").exists()


def wheel() -> Path | None:
    """vLLM's wheel, of which three files are used: `pip download --no-deps vllm` puts it there."""
    folder = Path(os.environ.get("VLLM_WHEEL", "."))
    return folder if folder.suffix == ".whl" and folder.is_file() else next(folder.glob("vllm-*.whl"), None)


def peft_helper(folder: Path) -> Any:
    """vLLM's `PEFTHelper`, with stand-ins for its logger and its settings, which take the whole of vLLM."""
    found = wheel()
    assert found is not None
    with zipfile.ZipFile(found) as archive:
        archive.extract("vllm/lora/peft_helper.py", folder)
        settings = archive.read("vllm/config/lora.py").decode()
    ranks = next(line for line in settings.splitlines() if line.startswith("MaxLoRARanks"))
    assert ranks == "MaxLoRARanks = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]"
    modules = {
        "vllm": types.ModuleType("vllm"),
        "vllm.config": types.ModuleType("vllm.config"),
        "vllm.config.lora": types.ModuleType("vllm.config.lora"),
        "vllm.logger": types.ModuleType("vllm.logger"),
    }
    modules["vllm.config.lora"].LoRAConfig = types.SimpleNamespace  # type: ignore[attr-defined]
    modules["vllm.logger"].init_logger = lambda name: types.SimpleNamespace(info_once=print)  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        spec = importlib.util.spec_from_file_location("vllm_peft_helper", folder / "vllm" / "lora" / "peft_helper.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["vllm_peft_helper"] = module
        spec.loader.exec_module(module)
        return module.PEFTHelper
    finally:
        for name in (*modules, "vllm_peft_helper"):
            sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.skipif(wheel() is None, reason="no wheel of vLLM: pip download --no-deps vllm -d W, VLLM_WHEEL=W")
def test_vllms_own_helper_takes_what_is_written(models: TinyModels, tmp_path: Path) -> None:
    helper = peft_helper(tmp_path)
    base = models.pair("llama").base
    folder = low_rank(make("llama")).to_adapter(tmp_path / "adapter", base=base, serve="vllm")
    read = helper.from_local_dir(str(folder), 2048)
    read.validate_legal(types.SimpleNamespace(max_lora_rank=max_lora_rank(folder)))
    assert read.vllm_lora_scaling_factor == 1.0
    assert read.get_rank_and_scaling(Q.removesuffix(".weight")) == (read.r, 1.0)
    with pytest.raises(ValueError, match="greater than max_lora_rank"):
        read.validate_legal(types.SimpleNamespace(max_lora_rank=1))
    mixed = TaskVector.from_tensors({**dict.fromkeys([Q], torch.ones(16, 16)), "model.norm.weight": torch.ones(16)})
    whole = mixed.compress(rank=2).to_adapter(tmp_path / "whole", base=base, dense="save")
    with pytest.raises(ValueError, match="modules_to_save"):
        helper.from_local_dir(str(whole), 2048).validate_legal(types.SimpleNamespace(max_lora_rank=8))


def test_a_config_without_ranks_is_refused(tmp_path: Path) -> None:
    for text in (
        '{"r": "8"}',
        '{"r": 0}',
        "{}",
        '{"r": 8, "rank_pattern": {"fc1": null}}',
        '{"r": 8, "rank_pattern": 3}',
    ):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(CorruptFileError, match="names no ranks"):
            max_lora_rank(tmp_path)
