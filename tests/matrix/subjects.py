"""A model type under test: a base and a fine-tune, live and in folders, and what checks do with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from matrix.outcomes import ImpossibleError, WrongError, others
from matrix.tiny_types import RESET_BY_LOADING, build, inputs
from safetensors.torch import load_file
from transformers import PreTrainedModel

Tensors = Mapping[str, torch.Tensor]


class Subject:
    """One model type, in a folder of its own."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.model_type, self.folder = model_type, folder

    @cached_property
    def base(self) -> PreTrainedModel:
        """A base whose every weight and persistent buffer is random and finite."""
        model = build(self.model_type)
        with torch.no_grad():
            for tensor in floats(model):
                tensor.nan_to_num_(posinf=9.0, neginf=-9.0)
        return shaken(model, 0.02, seed=1)

    @cached_property
    def tuned(self) -> PreTrainedModel:
        """The base with every weight and persistent buffer changed."""
        return shaken(copy.deepcopy(self.base), 0.01, seed=2)

    def saved(self, model: PreTrainedModel, name: str) -> Path:
        """The model in a folder of that name, as transformers writes it."""
        folder = self.folder / name
        if not folder.exists():
            model.save_pretrained(folder)
        return folder

    @property
    def base_folder(self) -> Path:
        """The base in a folder."""
        return self.saved(self.base, "base")

    @property
    def tuned_folder(self) -> Path:
        """The fine-tune in a folder."""
        return self.saved(self.tuned, "tuned")


def floats(model: PreTrainedModel) -> list[torch.Tensor]:
    """Every floating-point tensor that a checkpoint holds, tied ones once."""
    state = model.state_dict(keep_vars=True)
    reset = RESET_BY_LOADING.get(model.config.model_type)
    unique = {tensor.data_ptr(): tensor for name, tensor in state.items() if reset is None or reset not in name}
    return [tensor for tensor in unique.values() if tensor.is_floating_point()]


def shaken(model: PreTrainedModel, size: float, seed: int) -> PreTrainedModel:
    """Change every weight and persistent buffer in place; upwards, so that variances stay positive."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in floats(model):
            tensor.add_((torch.rand(tensor.shape, generator=generator) * size + size / 10).to(tensor.dtype))
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """A folder's tensors as they are on disk."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    """What transformers makes of a folder, by the class that its config names."""
    with others("loading by transformers"):
        return _class_of(folder).from_pretrained(folder, **options).eval()


def _class_of(folder: Path) -> Any:
    (name,) = json.loads((folder / "config.json").read_text("utf-8"))["architectures"]
    return getattr(transformers, name)


def logits(model: PreTrainedModel) -> torch.Tensor:
    """The model's answer to its inputs; the seed is for models that draw random numbers (Reformer's hashes)."""
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs(model)).logits.double()


def assert_same_bits(found: Tensors, expected: Tensors, what: str) -> None:
    """The same names, and the same bits."""
    _assert_same_names(found, expected, what)
    for name, tensor in expected.items():
        other = found[name]
        if other.dtype != tensor.dtype or other.shape != tensor.shape:
            raise WrongError(f"{what}: {name} is {_kind(other)}, not {_kind(tensor)}")
        if not torch.equal(_bits(other), _bits(tensor)):
            worst = (other.double() - tensor.double()).abs().max().item()
            raise WrongError(f"{what}: {name} is off by {worst:.2g}")


def assert_close(found: Tensors, expected: Tensors, what: str) -> None:
    """The same names, and values at most two units in the last place of each tensor's largest value apart."""
    _assert_same_names(found, expected, what)
    for name, tensor in expected.items():
        if not tensor.numel() or not found[name].is_floating_point():
            continue
        largest = max(tensor.abs().max().item(), 1e-3)
        worst = (found[name].double() - tensor).abs().max().item()
        if not worst <= 2 * torch.finfo(found[name].dtype).eps * largest:
            raise WrongError(f"{what}: {name} is off by {worst:.2g}")


def assert_loads_alike(folder: Path, reference: Path) -> None:
    """transformers takes a folder as it takes one that it wrote itself."""
    expected, told = _loaded_with_notes(reference)
    try:
        model, notes = _loaded_with_notes(folder)
    except ImpossibleError as error:
        raise WrongError(f"transformers does not load the result: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if new := set(notes[kind]) - set(told[kind]):
            raise WrongError(f"transformers loads the result with {kind} {sorted(new)[:3]}")
    assert_same_bits(model.state_dict(), expected.state_dict(), "loaded by transformers")


def _loaded_with_notes(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    with others("loading by transformers"):
        return _class_of(folder).from_pretrained(folder, output_loading_info=True)


def _assert_same_names(found: Iterable[str], expected: Iterable[str], what: str) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise WrongError(f"{what}: missing {missing[:3]}, unexpected {extra[:3]}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
