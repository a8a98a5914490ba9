"""Noise on the output of a live model: the control that damages a model without touching what it knows.

The noise of a position hangs on the seed and on the tokens up to there, nothing else. So a text gets the same noise
in one pass and token by token with a cache, padded on either side, in any batch and any process; and asking twice gives
the same answer.
"""

import hashlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from typing_extensions import Self, override

from hf_taskvec.algebra.noise import standard_normal
from hf_taskvec.application.live_edit import checked_scale
from hf_taskvec.application.replaced_forward import ReplacedForward
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.models.layout import without_peft


class OutputNoise:
    """Gaussian noise on a live model's logits, as an edit: λ can be set, and 0 is the model as it was.

    It can be swept as a task vector's edit can. It ends with `restore`, or with its `with` block.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A causal language model.
        size (`float`):
            The standard deviation of the noise at λ=1, in units of logits. The noise of different tokens, and that
            after different texts, is independent.
        seed (`int`, *optional*, defaults to 0):
            Of the noise.

    Attributes:
        model (`torch.nn.Module`):
            The model, as it was given.
        scale (`float`):
            The present λ; 0 at first.

    Raises:
        `BadValueError`: If `model` is no live model, or `size` is not a finite number of 0 or more.

    Example:
        >>> with OutputNoise(model, 0.5) as noise:  # doctest: +SKIP
        ...     report = sweep(model, noise, [0, 1], books)

    """

    def __init__(self, model: Any, size: float, seed: int = 0) -> None:
        if not isinstance(model, torch.nn.Module):
            raise BadValueError("noise is put on the output of a live model, which this is not: load it first.")
        if not 0.0 <= size < float("inf"):
            raise BadValueError(f"size={size}: noise has a standard deviation of 0 or more.")
        self.model, self.size, self.seed = model, float(size), seed
        self.scale = 0.0
        self._forward = _NoisyForward(without_peft(model), self)

    @property
    def fingerprint(self) -> str:
        """Tells this noise from any other."""
        return f"noise on the logits, size={self.size!r}, seed={self.seed}"

    def set_scale(self, scale: float) -> None:
        """Move to another λ, by which the noise is multiplied."""
        self.scale = checked_scale(scale)

    def restore(self) -> None:
        """End the noise: the model answers as before."""
        self._forward.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


class _NoisyForward(ReplacedForward):
    """In the place of a model's forward: it follows the text of each row, and adds the noise to the logits."""

    def __init__(self, model: torch.nn.Module, noise: OutputNoise) -> None:
        super().__init__(model)
        self._noise = noise
        self._texts: list[Any] = []  # of each row, the running hash of its tokens
        self._columns = 0  # how many tokens, padding included, they have read
        self._cache: ref[Any] | None = None  # what continues them

    @property
    @override
    def fingerprint(self) -> str:
        return f"{self._noise.scale!r} * {self._noise.fingerprint}" if self._noise.scale else ""

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._noise.scale:
            return self.forward(*args, **kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or isinstance(kwargs.get("logits_to_keep"), torch.Tensor):
            raise UnsupportedError(
                "noise on the output hangs on the text, so the model must be given input_ids, and logits_to_keep as a "
                "number."
            )
        keys = self._keys(ids, kwargs.get("attention_mask"), _cache_in(kwargs))
        output = self.forward(*args, **kwargs)
        cache = _cache_in(output)
        self._cache = None if cache is None else ref(cache)
        # In fp32: in a logit of 16 bits, small noise would be rounded away.
        output["logits"] = self._noisy(output["logits"].float(), keys)
        return output

    def _keys(self, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> list[list[bytes | None]]:
        """For each token a digest of its row's text up to there; none for padding."""
        if mask is not None:
            past = mask.shape[-1] - ids.shape[1]
            here = mask[:, past:]
        else:  # Mamba's generation gives none after the prompt
            is_ours = self._cache is not None and self._cache() is cache
            past = 0 if cache is None else self._columns if is_ours else _length(cache)
            here = torch.ones_like(ids)
        if past == 0 and here.shape == ids.shape:
            self._texts = [hashlib.blake2b(f"{self._noise.seed}|".encode(), digest_size=32) for _ in ids]
        elif (past, len(ids)) != (self._columns, len(self._texts)) or here.shape != ids.shape:
            raise UnsupportedError(
                "noise on the output hangs on the whole text, but a text is continued that it has not seen from its "
                "first token on: begin without a cache, with an attention_mask of two dimensions, and keep the rows."
            )
        self._columns = past + ids.shape[1]
        return [_read(*row) for row in zip(self._texts, ids.tolist(), here.tolist(), strict=True)]

    def _noisy(self, logits: torch.Tensor, keys: list[list[bytes | None]]) -> torch.Tensor:
        size, vocabulary = self._noise.scale * self._noise.size, logits.shape[-1]
        rows = []
        for row, given in zip(logits, keys, strict=True):
            kept = given[len(given) - len(row) :]  # only the last positions may have been asked for
            drawn = [torch.zeros(vocabulary) if key is None else standard_normal(key, 0, vocabulary) for key in kept]
            rows.append(row + torch.stack(drawn).mul_(size).to(row.device))
        return torch.stack(rows)


def _cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among a model's inputs or outputs: Mamba has another name for it."""
    return next((cache for name in ("past_key_values", "cache_params") if (cache := given.get(name)) is not None), None)


def _length(cache: Any) -> int:
    """How many tokens a cache holds; -1 if it holds some, but does not say how many."""
    try:
        return int(cache.get_seq_length())
    except ValueError:  # of linear attention alone
        return -1 if cache.has_previous_state() else 0


def _read(text: Any, tokens: list[int], are_there: list[int]) -> list[bytes | None]:
    keys: list[bytes | None] = []
    for token, is_there in zip(tokens, are_there, strict=True):
        if is_there:
            text.update(token.to_bytes(8, "little"))
        keys.append(text.digest() if is_there else None)
    return keys
