"""What PEFT makes of an adapter, asked of PEFT itself: on a model without weights, before anything gets its name."""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from hf_taskvec.errors import UnsupportedError, some

# What PEFT calls the layer of a tensor, in its results and in its errors.
_LAYER = re.compile(r"base_model\.model\.([\w.]+?)\.(?:lora_|base_layer|modules_to_save)")
_WAY_OUT = "Leave such layers out with vector.filter(exclude=...), or write a whole model with apply()."


def target_modules(model: Any, layers: Collection[str]) -> list[str] | str:
    """What the config must call the target modules so that PEFT takes exactly these layers of the model.

    Short names, as serving engines expect them, if no other module ends in one of them; else full paths; else, if
    another path ends in one of those, a regular expression.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    paths = [path for path, _ in model.named_modules()]

    def meant(targets: list[str] | str) -> set[str]:
        config = LoraConfig(target_modules=targets)
        return {path for path in paths if check_target_module_exists(config, path)}

    short, full = sorted({_short(layer) for layer in layers}), sorted(layers)
    named = next((each for each in (short, full) if meant(each) == set(layers)), None)
    return named or _exactly(full)


def check_layers(model: Any, names: Mapping[str, str]) -> None:
    """Refuse layers that PEFT takes for what they are not: it would run them otherwise than it merges them.

    Args:
        model (`torch.nn.Module`):
            The base.
        names (`Mapping[str, str]`):
            The path of each layer that is to get a LoRA -> the name of its weight.

    Raises:
        `UnsupportedError`: Naming those that are no plain linear or embedding layers.

    """
    modules = dict(model.named_modules())
    other = {layer: name for layer, name in names.items() if layer in modules and _is_disguised(modules[layer])}
    if other:
        kinds = sorted({type(modules[layer]).__name__ for layer in other})
        raise UnsupportedError(
            f"{some(other.values())}: PEFT cannot run LoRA on {type(model).__name__}'s {some(kinds)}, which is neither "
            f"a plain linear layer nor a plain embedding. {_WAY_OUT}"
        )


def _is_disguised(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer or an embedding by its class, and computes something else."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, torch.nn.Embedding) and hasattr(module, "embed_scale"):  # PEFT multiplies by it as well
        return False
    plain = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    return isinstance(module, plain) and type(module).forward not in [each.forward for each in plain]


def check_loads(build: Callable[[], Any], folder: Path, names: Mapping[str, str]) -> None:
    """Refuse an adapter that PEFT does not load whole, or into other layers than those that it holds.

    Args:
        build (`Callable`):
            Gives the base, on the meta device. PEFT changes it.
        folder (`Path`):
            The adapter.
        names (`Mapping[str, str]`):
            The path of each layer that it has a LoRA for -> the name of its weight.

    Raises:
        `UnsupportedError`: Naming what PEFT does not load.

    """
    from peft import LoraConfig
    from peft.utils.other import ModulesToSaveWrapper

    model = build()
    architecture = type(model).__name__
    paths = {path for path, _ in model.named_modules()}
    experts = [name for layer, name in names.items() if layer not in paths]
    config = LoraConfig.from_pretrained(str(folder))
    saved = set(config.modules_to_save or ())
    try:
        wrapped = _wrapped(model, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mapping = getattr(model, "_checkpoint_conversion_mapping", {})
            loaded = wrapped.load_adapter(str(folder), "default", torch_device="cpu", key_mapping=mapping)
    except Exception as error:  # PEFT raises whatever it comes upon
        wrong = _layers_in([str(error)]) or _not_taken(build, names)
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedError(
            f"PEFT cannot load an adapter of {architecture} with {_named(wrong, names, experts)} "
            f"({type(error).__name__}: {reason}). {_WAY_OUT}"
        ) from None
    copies = {path for path, module in wrapped.named_modules() if isinstance(module, ModulesToSaveWrapper)}
    wrong = _layers_in([*loaded.missing_keys, *loaded.unexpected_keys])
    wrong += sorted(saved ^ {path.removeprefix("base_model.model.") for path in copies})
    if wrong:
        raise UnsupportedError(
            f"PEFT would not load an adapter of {architecture} as it is meant: it takes "
            f"{_named(wrong, names, experts)} for something else. {_WAY_OUT}"
        )


def _wrapped(model: Any, config: Any) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel(model, config)


def _not_taken(build: Callable[[], Any], layers: Iterable[str]) -> list[str]:
    """Those layers, told by their short names, that PEFT refuses when they are all that is asked for."""
    from peft import LoraConfig

    paths = {path for path, _ in build().named_modules()}
    refused = []
    for _, each in groupby(sorted(paths.intersection(layers), key=_short), _short):
        group = list(each)
        try:
            _wrapped(build(), LoraConfig(target_modules=_exactly(group)))
        except Exception:  # whatever its reason: which layers they are is the question
            refused += group
    return refused


def _layers_in(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(layer for key in keys for layer in _LAYER.findall(key)))


def _named(layers: Iterable[str], names: Mapping[str, str], experts: list[str]) -> str:
    """The weights of these layers; a layer that has none of them is a fused one, and stands for all experts."""
    found = [each for layer in layers for each in ([names[layer]] if layer in names else experts or [layer])]
    return some(dict.fromkeys(found or names.values()))


def _short(layer: str) -> str:
    return layer.rsplit(".", 1)[-1]


def _exactly(layers: Iterable[str]) -> str:
    """A regular expression of these paths, which PEFT matches with the whole path."""
    return "|".join(map(re.escape, layers))
