"""What engines that serve adapters without PEFT ask of one: uniform ranks, and nothing but factors.

vLLM reads PEFT's files; llama.cpp, a GGUF file beside them (`gguf_adapter.py`).
"""

import json
from pathlib import Path
from typing import Any, Literal, get_args

from hf_taskvec.errors import BadValueError, CorruptFileError, UnsupportedError
from hf_taskvec.filenames import ADAPTER_CONFIG, ADAPTER_GGUF
from hf_taskvec.json_files import read_json

#: engines for which an adapter can be exported
ServeChoice = Literal["vllm", "llama.cpp"]
_ENGINES: tuple[str, ...] = get_args(ServeChoice)
_CALLED = {"vllm": "vLLM", "llama.cpp": "llama.cpp"}
# What vLLM's LoRAConfig takes as max_lora_rank (vllm/config/lora.py, 0.33).
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def check_serving(serve: str | None, dense: str) -> None:
    """Refuse an engine that is not known, and what it cannot be given, before anything is read."""
    if serve is None:
        return
    if serve not in _ENGINES:
        raise BadValueError(f"serve={serve!r} is not one of {', '.join(map(repr, _ENGINES))}.")
    if dense == "save":
        raise UnsupportedError(
            f"{_CALLED[serve]} takes no whole values (modules_to_save, trained biases) in an adapter, so dense='save' "
            f"is not for serve={serve!r}. Leave them out with dense='drop', or write a whole model with apply() and "
            "serve that."
        )


def check_served_rank(serve: str | None, rank: int) -> None:
    """Refuse a rank that the engine cannot be set to."""
    if serve == "vllm" and rank > _RANKS[-1]:
        raise UnsupportedError(
            f"the adapter would have rank {rank}, and vLLM serves no more than {_RANKS[-1]}. Compress it: "
            "vector.compress(rank=...); or write a whole model with apply() and serve that."
        )


def max_lora_rank(adapter: str | Path) -> int:
    """The `max_lora_rank` that vLLM has to be started with for an adapter.

    Args:
        adapter (`str` or `Path`):
            The folder that `to_adapter(…, serve="vllm")` wrote.

    Returns:
        `int`: The smallest of those that vLLM takes which is no smaller than the adapter's rank.

    Raises:
        `UnsupportedError`: If the adapter's rank is larger than all of them.
        `CorruptFileError`: If the folder holds no LoRA adapter's config.

    Example:
        >>> low_rank.to_adapter("adapter", serve="vllm")  # doctest: +SKIP
        >>> LLM("me/base", enable_lora=True, max_lora_rank=max_lora_rank("adapter"))  # doctest: +SKIP

    """
    config: dict[str, Any] = read_json(Path(adapter) / ADAPTER_CONFIG)
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [None])]
    if not all(isinstance(each, int) and each > 0 for each in ranks):
        raise CorruptFileError(f"{ADAPTER_CONFIG} names no ranks: it is not that of a LoRA adapter.")
    rank = max(ranks)
    check_served_rank("vllm", rank)
    return next(each for each in _RANKS if each >= rank)


def serving_command(adapter: Path, serve: ServeChoice, base: str | None) -> str:
    """The command line that serves an adapter."""
    if serve == "llama.cpp":
        return f"llama-server -m BASE.gguf --lora-scaled {adapter / ADAPTER_GGUF}:1.0"
    name = json.dumps(adapter.name)[1:-1]
    return (
        f"vllm serve {base or 'BASE'} --enable-lora --max-lora-rank {max_lora_rank(adapter)} "
        f"--lora-modules {name}={adapter}"
    )
