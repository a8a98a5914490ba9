"""A LoRA adapter as a GGUF file, as llama.cpp and what is built on it load one beside a base in GGUF.

Names are those of the gguf package's own table. llama.cpp has the rows of some models' queries and keys in another
order; a change follows them. Models that it stores in a third way (split, fused or stacked weights) are refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra.rounding import round_once
from hf_taskvec.errors import UnsupportedError, some

if TYPE_CHECKING:
    from gguf import MODEL_ARCH, GGUFWriter

# transformers' `model_type` -> llama.cpp's architecture, where each matrix of a layer is one there: as it is, or with
# the rows of queries and keys reordered.
_ARCHITECTURES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "phi": "phi2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
_REORDERED = ("llama", "mistral", "olmo")
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_EMBEDDING = "token_embd.weight"

Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def check_gguf(config: Mapping[str, Any] | None, dtype: torch.dtype) -> None:
    """Refuse what cannot become a GGUF adapter, before anything is computed.

    Args:
        config (`Mapping[str, Any]`, *optional*):
            The base's config; `None` or empty if it is not known.
        dtype (`torch.dtype`):
            Of the factors.

    Raises:
        `UnsupportedError`: If the gguf package is missing, the base is not known or of another kind, or the dtype is.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UnsupportedError("serve='llama.cpp' needs gguf: pip install 'hf-taskvec[llama-cpp]'") from None
    if not config:
        raise UnsupportedError("serve='llama.cpp' needs the base's config: pass base=, a folder or a Hub id.")
    if dtype not in _TYPES:
        raise UnsupportedError(f"dtype={dtype}: a GGUF adapter has float32, float16 or bfloat16.")
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise UnsupportedError(
            f"llama.cpp stores models of the type {str(kind)[:60]!r} in another way, or not at all: serve='llama.cpp' "
            f"is for {some(sorted(_ARCHITECTURES), 20)}. Export without serve=, and try llama.cpp's own "
            "convert_lora_to_gguf.py --base BASE ADAPTER."
        )


def write_gguf_adapter(
    path: Path, factors: Factors, config: Mapping[str, Any], dtype: torch.dtype, description: str
) -> None:
    """Write the factors of one rank as a GGUF file, which at scale 1 is the vector.

    Args:
        path (`Path`):
            The file.
        factors (`Mapping[str, tuple[torch.Tensor, torch.Tensor]]`):
            The name of each stored weight -> PEFT's `B` and `A`: from the rank to outputs, and from inputs to the rank;
            the inputs of an embedding are tokens.
        config (`Mapping[str, Any]`):
            The base's.
        dtype (`torch.dtype`):
            What the factors are rounded to.
        description (`str`):
            What the adapter is, for people.

    Raises:
        `UnsupportedError`: If llama.cpp has no name for one of the weights.
    """
    import gguf

    kind = str(config["model_type"])
    architecture = _ARCHITECTURES[kind]
    names = _names(factors, _member(architecture), int(config.get("num_hidden_layers") or config["n_layer"]))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_description(description)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # llama.cpp scales by alpha / rank.
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(next(iter(factors.values()))[0].shape[1]))
    for name, (up, down) in factors.items():
        # Of an embedding, A is looked up by token: tokens are its rows.
        _add(writer, f"{names[name]}.lora_a", down.T if names[name] == _EMBEDDING else down, dtype)
        _add(writer, f"{names[name]}.lora_b", _reordered(up, name, config) if kind in _REORDERED else up, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _member(architecture: str) -> "MODEL_ARCH":
    from gguf import MODEL_ARCH_NAMES

    return next(member for member, name in MODEL_ARCH_NAMES.items() if name == architecture)


def _names(factors: Factors, architecture: "MODEL_ARCH", layers: int) -> dict[str, str]:
    """llama.cpp's name of each weight."""
    from gguf import get_tensor_name_map

    table = get_tensor_name_map(architecture, layers)
    found = {name: table.get_name(name, try_suffixes=(".weight",)) for name in factors}
    if unknown := [name for name, theirs in found.items() if theirs is None]:
        raise UnsupportedError(
            f"llama.cpp has no name for {some(unknown)}. Leave it out with vector.filter(exclude=...), or write a "
            "whole model with apply() and convert that."
        )
    return {name: str(theirs) for name, theirs in found.items()}


def _reordered(rows: torch.Tensor, name: str, config: Mapping[str, Any]) -> torch.Tensor:
    """The rows of queries and keys as llama.cpp rotates them: the two halves of a head taken in turn."""
    heads = int(config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        heads = int(config.get("num_key_value_heads") or heads)
    elif not name.endswith("q_proj.weight"):
        return rows
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _add(writer: "GGUFWriter", name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    from gguf import GGMLQuantizationType

    rounded = round_once(tensor.contiguous(), dtype, name).contiguous()
    kind = GGMLQuantizationType[_TYPES[dtype]]
    writer.add_tensor(name, rounded.view(torch.uint8).numpy(), raw_dtype=kind)  # numpy has no bfloat16
