"""What PEFT makes of an adapter, asked of PEFT itself: on a model without weights, before anything gets its name."""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hf_taskvec.application.layer_changes import has_plain_forward
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


def refused_layers(model: Any, names: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    """The layers that PEFT takes for what they are not: it would run them otherwise than it merges them.

    Args:
        model (`torch.nn.Module`):
            The base.
        names (`Mapping[str, str]`):
            The path of each layer that is to get a LoRA -> the name of its weight.

    Yields:
        `tuple[list[str], str]`: The weights of layers that are no plain linear or embedding layers, and of those whose
            weight the model uses without calling them; and why, as the end of a sentence that begins with them.

    """
    modules = dict(model.named_modules())
    other = [layer for layer in names if layer in modules and _is_disguised(modules[layer])]
    if other:
        kinds = sorted({type(modules[layer]).__name__ for layer in other})
        yield (
            [names[layer] for layer in other],
            f"of {type(model).__name__}'s {some(kinds)}, on which PEFT cannot run LoRA: it is neither a plain linear "
            "layer nor a plain embedding",
        )
    if past := _used_past_forward(model, [layer for layer in names if layer not in other]):
        yield (
            [names[layer] for layer in past],
            f"used by {type(model).__name__} without calling its layer, and PEFT adds a LoRA that is not merged in the "
            "layer alone",
        )


def _is_disguised(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer or an embedding by its class, and computes something else."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, torch.nn.Embedding) and hasattr(module, "embed_scale"):  # PEFT multiplies by it as well
        return False
    return isinstance(module, torch.nn.Linear | torch.nn.Embedding | Conv1D) and not has_plain_forward(module)


def _used_past_forward(model: Any, layers: Iterable[str]) -> list[str]:
    """Those layers whose weight the model also uses while the layer itself does not run.

    A pass on the meta device tells. Where values decide what is computed (experts) it ends early, so a layer stands for
    those of the other blocks, which it may not have come to.
    """
    modules = dict(model.named_modules())
    watch = _Uses({id(modules[layer].weight): layer for layer in layers if layer in modules})
    handles = []
    for layer in watch.layers.values():
        handles.append(modules[layer].register_forward_pre_hook(lambda *_, layer=layer: watch.running.add(layer)))
        handles.append(modules[layer].register_forward_hook(lambda *_, layer=layer: watch.running.discard(layer)))
    try:
        with suppress(Exception), watch:  # whatever a model without weights leads to
            _run(model)
    finally:
        for handle in handles:
            handle.remove()
    past = {_in_any_block(layer) for layer in watch.past}
    return [layer for layer in watch.layers.values() if _in_any_block(layer) in past]


def _run(model: Any) -> None:
    """A pass on the meta device, of tokens, a picture or a sound: what the model's class asks for first."""
    config, name = model.config, model.main_input_name
    tokens = torch.zeros(1, 4, dtype=torch.long, device="meta")
    given = {"input_ids": tokens}
    if name == "pixel_values":
        side = config.image_size if isinstance(config.image_size, int) else max(config.image_size)
        given = {name: torch.zeros(1, config.num_channels, side, side, device="meta")}
    elif name == "input_features":
        given = {name: torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions, device="meta")}
    elif name == "input_values":
        given = {name: torch.zeros(1, 4000, device="meta")}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens
    with torch.no_grad():
        model.eval()(**given)


class _Uses(TorchFunctionMode):
    """A block that finds out which weights are used while their layers do not run."""

    def __init__(self, layers: Mapping[int, str]) -> None:
        super().__init__()
        self.layers = layers
        self.running: set[str] = set()
        self.past: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        made = {id(each) for each in tree_leaves(output) if isinstance(each, torch.Tensor)}
        for given in map(id, tree_leaves((args, kwargs))):
            layer = self.layers.get(given)
            if layer is not None and layer not in self.running and made - {given}:
                self.past.add(layer)
        return output


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
    if (reason := _why_not_run(wrapped.get_base_model())) and not _why_not_run(build()):
        wrong = _not_taken(build, names, runs=True)
        raise UnsupportedError(
            f"PEFT cannot run an adapter of {architecture} with {_named(wrong, names, experts)} ({reason}). {_WAY_OUT}"
        )


def _why_not_run(model: Any) -> str:
    """What a pass of a model without weights ends with; empty if it comes to its end."""
    try:
        _run(model)
    except Exception as error:  # whatever a model without weights leads to
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return ""


def _wrapped(model: Any, config: Any) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel(model, config)


def _not_taken(build: Callable[[], Any], layers: Iterable[str], runs: bool = False) -> list[str]:
    """Those layers, told by their short names, that PEFT refuses (or cannot run) if they are all that is asked for."""
    from peft import LoraConfig

    paths = {path for path, _ in build().named_modules()}
    refused = []
    for _, each in groupby(sorted(paths.intersection(layers), key=_short), _short):
        group = list(each)
        try:
            wrapped = _wrapped(build(), LoraConfig(target_modules=_exactly(group)))
            if runs:
                _run(wrapped.get_base_model())
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


def _in_any_block(layer: str) -> str:
    return re.sub(r"\b\d+\b", "*", layer)


def _exactly(layers: Iterable[str]) -> str:
    """A regular expression of these paths, which PEFT matches with the whole path."""
    return "|".join(map(re.escape, layers))
