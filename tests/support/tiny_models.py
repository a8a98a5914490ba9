"""Tiny random language models of every supported architecture, and what tests do with them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hf_taskvec import TaskVector
from hf_taskvec.algebra.sources import InMemory, Source
from hf_taskvec.algebra.sums import Sum
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.live_model import live_checkpoint

transformers.logging.set_verbosity_error()

DENSE = ["phi", "phi3", "gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "llama", "mistral", "qwen3", "gemma3_text"]
EXPERTS = ["phimoe", "mixtral", "qwen3_moe"]
ARCHITECTURES = DENSE + EXPERTS
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

_TOKENS = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "rotary_dim": 4, **_TOKENS}
_GPT_NEO = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32, **_TOKENS}
_OTHERS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "num_local_experts": 2,
    "num_experts": 2,
    "moe_intermediate_size": 8,
    "ffn_dim": 32,
    "word_embed_proj_dim": 16,
    **_TOKENS,
}
_CONFIGS = {
    "gpt2": _GPT2,
    "gptj": _GPT2,
    "gpt_neo": {**_GPT_NEO, "attention_types": [[["global", "local"], 1]]},
}


def make(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A model of random weights, none of them 0 or 1: biases and norms as well."""
    torch.manual_seed(seed)
    settings = {**_CONFIGS.get(architecture, _OTHERS), **config}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**settings))
    return shake(model, 0.02, seed).to(dtype).eval()


def shake(model: PreTrainedModel, size: float = 0.01, seed: int = 1) -> PreTrainedModel:
    """Change every parameter in place, but for those that are calculated and not saved."""
    generator = torch.Generator().manual_seed(seed)
    never = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in never:
                continue
            noise = torch.randn(parameter.shape, generator=generator) * size
            parameter.add_(noise.to(parameter.dtype))
    return model


def tuned_copy(model: PreTrainedModel, size: float = 0.01, seed: int = 1) -> PreTrainedModel:
    return shake(copy.deepcopy(model), size, seed)


@dataclass(frozen=True)
class Pair:
    """A base and its fine-tune, in folders."""

    base: Path
    tuned: Path

    def vector(self, **options: Any) -> TaskVector:
        return TaskVector.from_finetuned(self.base, self.tuned, **options)


def save_pair(folder: Path, base: PreTrainedModel, tuned: PreTrainedModel, **options: Any) -> Pair:
    pair = Pair(folder / "base", folder / "tuned")
    base.save_pretrained(pair.base, **options)
    tuned.save_pretrained(pair.tuned, **options)
    return pair


class TinyModels:
    """Pairs in folders, each made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pair(self, architecture: str, dtype: torch.dtype = torch.float32, **config: Any) -> Pair:
        label = "-".join([architecture, str(dtype).removeprefix("torch."), *(f"{k}={v}" for k, v in config.items())])
        folder = self.folder / label
        if not folder.exists():
            base = make(architecture, dtype, **config)
            return save_pair(folder, base, tuned_copy(base))
        return Pair(folder / "base", folder / "tuned")


def tensors(folder: Path) -> Mapping[str, Source]:
    """A checkpoint's tensors under their canonical names."""
    return open_checkpoint(folder).tensors


def added(vector: TaskVector, name: str, target: torch.Tensor | Source, scale: float = 1.0) -> torch.Tensor:
    """`target + scale * vector` of one parameter, in the target's dtype."""
    source = InMemory(target) if isinstance(target, torch.Tensor) else target
    out = torch.empty(source.shape, dtype=source.dtype)
    Sum(source.shape, vector.terms_of(name), source, scale).into(out, name)
    return out


def assert_gives_tuned(vector: TaskVector, pair: Pair) -> None:
    """`base + 1 * vector` is the fine-tune, bit for bit, parameter by parameter; nothing else is changed."""
    base, tuned = tensors(pair.base), tensors(pair.tuned)
    assert set(vector) <= set(base)
    for name in base:
        expected = _bits(tuned[name].read())
        # The vector's own base is not even read; a copy of it takes part in the arithmetic.
        for target in (base[name], base[name].read().clone()):
            assert torch.equal(_bits(added(vector, name, target)), expected), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.atleast_1d(tensor).view(torch.uint8)


def nearest(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 rounded once to nearest even, by other means than the library's: integer arithmetic or numpy."""
    if dtype == torch.float16:
        return torch.from_numpy(exact.numpy().astype("float16"))
    if dtype == torch.bfloat16:
        bits = exact.view(torch.int64)
        return ((bits + ((1 << 44) - 1) + ((bits >> 45) & 1)) >> 45 << 45).view(torch.float64).to(dtype)
    return torch.from_numpy(exact.numpy().astype("float32"))


def low_rank(model, rank=3, size=0.3, exclude="(norm|ln_|bias|wpe|embed_positions|experts|router|gate\\.)"):
    """A random low-rank vector over a live model's matrices, under their canonical names."""
    torch.manual_seed(5)
    tensors = live_checkpoint(model).tensors
    chosen = {n: t.shape for n, t in tensors.items() if len(t.shape) == 2 and not re.search(exclude, n)}
    return TaskVector.from_tensors(
        {n: (torch.randn(a, rank) * size, torch.randn(rank, b) * size) for n, (a, b) in chosen.items()}
    )
