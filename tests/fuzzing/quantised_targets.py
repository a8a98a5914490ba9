"""Models whose weights are stored in fewer bits: what their configs and their tensors say of codes and scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from fuzzing.formats import Bytes, Json, SafetensorsHeader
from fuzzing.runner import AnyOf, MeaninglessError, Target
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file, save_file
from support.tiny_models import make
from support.tiny_quantised import gguf

from hf_taskvec.models.checkpoint import open_checkpoint

_BLOCK = 8
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = "weight_scale_inv"


def make_fp8(folder: Path) -> None:
    make("llama", num_hidden_layers=1, vocab_size=8, intermediate_size=8).save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "proj" in name:
            rows, columns = (size // _BLOCK for size in tensor.shape)
            tensors[name.replace("weight", _SCALES)] = torch.rand(rows, columns) + 0.5
            tensor = tensor.to(torch.float8_e4m3fn)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))


def read_fp8(folder: Path) -> Any:
    return {name: source.read().clone() for name, source in open_checkpoint(folder).tensors.items()}


def expected_fp8(document: Any, folder: Path) -> Any:
    """Code times scale, in the dtype that the config names; what the scales' shape says of the blocks must add up."""
    try:
        stored = load_safetensors((folder / "model.safetensors").read_bytes())
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise MeaninglessError(str(error)[:100]) from None
    exact = {name: tensor for name, tensor in stored.items() if not name.endswith(_SCALES)}
    for name, codes in exact.items():
        if codes.dtype in _CODES:
            scales = stored.get(f"{name}_scale_inv")
            if scales is None or scales.numel() == 0 or codes.ndim != 2 or scales.ndim > 2:
                raise MeaninglessError(f"no scales of {name}")
            grid = scales if scales.ndim == 2 else scales.reshape(-1, 1)
            if any(size % blocks for size, blocks in zip(codes.shape, grid.shape, strict=True)):
                raise MeaninglessError(f"the scales do not fit {name}")
            down, across = (size // blocks for size, blocks in zip(codes.shape, grid.shape, strict=True))
            factors = (grid.float() - 127).exp2() if grid.dtype == torch.uint8 else grid.float()
            exact[name] = codes.float() * factors.repeat_interleave(down, 0).repeat_interleave(across, 1)
    packed = {name for name in exact if stored[name].dtype in _CODES}
    return AnyOf(
        tuple({name: each.to(dtype) if name in packed else each for name, each in exact.items()} for dtype in _DTYPES)
    )


# GGUF: no checksums, so the header alone is changed, and only what it says is looked at.


def make_gguf(folder: Path) -> None:
    gguf(folder / "model.gguf", "Q8_0")


def read_gguf(folder: Path) -> Any:
    return {name: list(source.shape) for name, source in open_checkpoint(folder / "model.gguf").tensors.items()}


TARGETS = [
    Target(
        "gguf",
        ("hf_taskvec.models.gguf_files:open_gguf", "hf_taskvec.models.gguf_header:_Header.__init__"),
        "model.gguf",
        Bytes(head=1_200),
        make_gguf,
        read_gguf,
        share=0.1,
        by_bytes=1.0,
    ),
    Target(
        "quantised config",
        ("hf_taskvec.models.checkpoint:open_checkpoint",),
        "config.json",
        Json(),
        make_fp8,
        read_fp8,
        expected_fp8,
        by_bytes=0.1,
    ),
    Target(
        "quantised weights",
        ("hf_taskvec.models.tensor_files:TensorFile.__init__",),
        "model.safetensors",
        SafetensorsHeader(),
        make_fp8,
        read_fp8,
        expected_fp8,
        by_bytes=0.5,
    ),
]
