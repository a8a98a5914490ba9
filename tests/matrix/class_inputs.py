"""What a forward pass of a model of any class takes: tokens, pictures or sounds, as its own `forward` names them.

Which sizes a type of tiny model reads is not told by its config alone, so several are tried, and the first that the
model computes with is taken. One that computes with none of them cannot be compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from matrix.outcomes import ImpossibleError
from transformers import PreTrainedConfig, PreTrainedModel

Inputs = dict[str, torch.Tensor]

# An end of text last, for classifiers that read it there; no padding.
_TOKENS = torch.tensor([[5, 7, 9, 11, 13, 4, 6, 2]])
#: what is given together
_TOGETHER = (
    *(("input_ids",), ("pixel_values",), ("input_ids", "pixel_values"), ("input_values",), ("input_features",)),
    *(("input_ids", "input_values"), ("input_ids", "input_features"), ("pixel_values_videos",)),
)


def outputs(model: PreTrainedModel, given: Inputs, with_gradients: bool = False) -> torch.Tensor:
    """All numbers that a forward pass gives; the seed is for models that draw random numbers."""
    torch.manual_seed(0)
    with torch.set_grad_enabled(with_gradients):
        found = model(**given)
    leaves = torch.utils._pytree.tree_leaves(tuple(found.values()) if isinstance(found, dict) else found)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return torch.cat([each.double().flatten() for each in tensors])


def inputs_of_class(model: PreTrainedModel) -> Inputs:
    """The first inputs with which the model computes finite numbers.

    Raises:
        `ImpossibleError`: If it does with none of them, or what it gives differs from one pass to the next.
    """
    first = ""
    for given in _tries(model):
        try:
            found = outputs(model, given)
        except Exception as error:  # whatever the model raises
            first = first or f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            continue
        if not found.isfinite().all() or not torch.equal(found, outputs(model, given)):
            raise ImpossibleError("a forward pass: what it gives is not finite, or not always the same")
        return given
    raise ImpossibleError(f"a forward pass: {first or 'it takes neither tokens nor pictures nor sounds'}")


def _tries(model: PreTrainedModel) -> Iterator[Inputs]:
    names = inspect.signature(model.forward).parameters
    made = _candidates(model.config)
    if type(model).__name__.endswith("ForMultipleChoice"):
        made["input_ids"] = [_TOKENS.repeat(2, 1)[None]]
    main = model.main_input_name  # one name, or several in a list
    first = tuple(name for name in ([main] if isinstance(main, str) else main) if name in made)
    for together in dict.fromkeys((first or _TOGETHER[0], *_TOGETHER)):
        if not all(name in names for name in together):
            continue
        for values in product(*(made[name] for name in together)):
            given = dict(zip(together, values, strict=True))
            if "decoder_input_ids" in names:
                yield {**given, "decoder_input_ids": _TOKENS}
            yield given


def _candidates(config: PreTrainedConfig) -> dict[str, list[torch.Tensor]]:
    """Name of an input -> what it may be."""
    size, frames = _number(config, 28, "image_size", "crop_size"), _number(config, 8, "num_frames", "frames_per_clip")
    channels = _number(config, 3, "num_channels", "in_channels", "in_chans")
    bands = _number(config, 80, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim")
    positions, length = _number(config, 64, "max_source_positions"), _number(config, 1024, "max_length")
    shapes: dict[str, list[tuple[int, ...]]] = {
        "pixel_values": [(channels, each, each) for each in (size, 64, 224)] + [(frames, channels, size, size)],
        "pixel_values_videos": [(frames, channels, size, size)],
        "input_values": [(4000,), (1, 4000), (length, bands)],
        "input_features": [(bands, 2 * positions), (40, bands)],
    }
    generator = torch.Generator().manual_seed(3)
    drawn = {name: [torch.randn(1, *each, generator=generator) for each in some] for name, some in shapes.items()}
    return {"input_ids": [_TOKENS], **drawn}


def _number(config: PreTrainedConfig, otherwise: int, *names: str) -> int:
    """The first whole number of these names, in the config or one inside it."""
    inside = [getattr(config, name, None) for name in config.sub_configs]
    for each, name in product([config, *filter(None, inside)], names):
        found: Any = getattr(each, name, None)
        found = found[0] if isinstance(found, list | tuple) and found else found
        if type(found) is int:
            return found
    return otherwise
