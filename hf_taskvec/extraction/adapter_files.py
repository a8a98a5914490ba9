"""What a LoRA adapter's folder, or a live PeftModel, holds: its config and tensors, and the base that it belongs to."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_taskvec.algebra.provenance import ModelRecord
from hf_taskvec.algebra.sources import InMemory, Source
from hf_taskvec.errors import (
    BadValueError,
    CorruptFileError,
    MismatchError,
    MissingFileError,
    TaskVectorError,
    UnsupportedError,
    did_you_mean,
    some,
)
from hf_taskvec.extraction.from_finetuned import open_model
from hf_taskvec.filenames import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from hf_taskvec.hub_names import is_folder, may_be_hub_id
from hf_taskvec.json_files import read_json
from hf_taskvec.models.checkpoint import Checkpoint
from hf_taskvec.models.layout import Layout, layout_of_config, layout_of_model
from hf_taskvec.models.live_model import live_checkpoint
from hf_taskvec.models.locations import Location, locate
from hf_taskvec.models.tensor_files import checkpoints_in, open_files

# What LoraConfig can say without changing which function of the stored tensors the adapter is, or what is handled here.
# A field that is not named here and differs from its default is refused, so an option of a later PEFT cannot slip by.
_UNDERSTOOD = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config"),
    *("megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
    *("revision", "runtime_config", "target_modules", "target_parameters", "task_type", "trainable_token_indices"),
    "use_dora",
    *("use_rslora", "velora_config"),
}
#: PEFT's other tuners whose merge is a fixed change of stored weights, and that are tested here
OTHER_TUNERS = frozenset(
    {
        *("ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "GRALORA", "HIRA", "HRA", "IA3", "LOHA", "LOKR", "MISS"),
        *("OFT", "RANDLORA", "ROAD", "SHIRA", "VBLORA", "VERA", "WAVEFT"),
    }
)
# What PEFT itself cannot merge, or merges into another function; the rest that is refused, it merges.
_NO_CHANGE: Mapping[str, str] = {
    "alora_invocation_tokens": "acts on the tokens after its invocation alone, and is no change of weights",
    "arrow_config": "chooses among several adapters for each token. Make a vector of each of those",
    "layer_replication": "makes a model of other layers than the base has, so nothing in the base changes to it",
    "megatron_config": "was trained on Megatron's layers. Convert it to an adapter of the transformers model",
    "use_qalora": "belongs to a GPTQ-quantised base, into which it cannot be merged",
}
# What is read here, and must be of these types.
_TYPES: Mapping[str, Any] = {
    "alpha_pattern": dict | None,
    "base_model_name_or_path": str | None,
    "bias": str,
    "fan_in_fan_out": bool | None,
    "init_lora_weights": bool | str | None,
    "lora_alpha": int | float,
    "rank_pattern": dict | None,
    "revision": str | None,
    "trainable_token_indices": list | dict | None,
    "use_rslora": bool | None,
}
# These start training from a changed base, so the stored factors are not the change from the base on disk.
_CHANGED_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True)
class Adapter:
    """An adapter's config and tensors, wherever they come from.

    Args:
        name (`str`):
            The folder's name, the Hub id, or the name of a live model's adapter.
        config (`Mapping[str, Any]`):
            What `adapter_config.json` holds.
        tensors (`Mapping[str, Source]`):
            By the names that PEFT gives them.
        revision (`str`, *optional*):
            The commit of a Hub id.
        scalings (`Mapping[str, float]`, *optional*):
            Those of a live model's layers, by module, which may differ from what the config says.

    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Source]
    revision: str | None = None
    scalings: Mapping[str, float] | None = None


class AdapterBase:
    """The adapter's base: its layout if it can be found, its weights only if something needs them.

    Args:
        open_weights (`Callable`, *optional*):
            Opens the weights; None if there are none to open.
        layout (`Layout`):
            Empty if the architecture is not known.
        why_not (`str`):
            Why there are no weights, for messages.
        at_hand (`bool`, *optional*, defaults to `False`):
            The weights are on this machine, so that opening them downloads nothing.

    """

    def __init__(
        self, open_weights: Callable[[], Checkpoint] | None, layout: Layout, why_not: str, at_hand: bool = False
    ) -> None:
        self.layout, self._open, self.why_not, self._at_hand = layout, open_weights, why_not, at_hand

    @cached_property
    def weights(self) -> Checkpoint | None:
        """The weights, opened when they are first asked for."""
        return self._open() if self._open else None

    def record(self) -> ModelRecord | None:
        """What the weights are, if they are here or something needed them: a record alone downloads no model."""
        if not self._at_hand and "weights" not in self.__dict__:
            return None
        try:
            return self.weights.record() if self.weights else None
        except TaskVectorError:  # plain LoRA does without: on quantised weights, or a folder with a config only
            return None

    def tensor(self, name: str, what: str) -> Source:
        """A base weight that `what` needs."""
        if self.weights is None:
            raise MissingFileError(f"{what} needs the base model's {name}, and {self.why_not}. Pass base=.")
        owner = self.layout.tied.get(name, name)  # a head that the adapter unties starts as the embedding
        if owner not in self.weights.tensors:
            raise MismatchError(
                f"{what} changes {name}, which {self.weights.where} does not have."
                f"{did_you_mean(name, self.weights.tensors)} Is it the adapter's base?"
            )
        return self.weights.tensors[owner]


def stored_adapter(where: str | Path, revision: str | None, token: str | bool | None) -> Adapter:
    """The adapter in a folder or on the Hub."""
    folder, name, commit = locate(where, revision, token, ["adapter_*"])
    if not (folder / ADAPTER_CONFIG).exists():
        raise MissingFileError(
            f"{name} has no {ADAPTER_CONFIG}. "
            f"{checkpoints_in(folder) or 'Is it a PEFT adapter? See from_finetuned() for models.'}"
        )
    tensors = open_files(folder, ADAPTER_WEIGHTS, Location(name, commit) if commit else None)
    return Adapter(name, read_json(folder / ADAPTER_CONFIG), tensors, commit)


def live_adapter(model: Any, adapter_name: str | None) -> Adapter:
    """A snapshot of a live model's adapter."""
    from peft import get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    chosen = adapter_name or _active(model)
    if chosen not in model.peft_config:
        known = list(model.peft_config)
        raise BadValueError(f"the model has no adapter {chosen!r} (it has {some(known)}).{did_you_mean(chosen, known)}")
    scalings = {}
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise UnsupportedError(
                f"{some(module.merged_adapters)} is merged into the live model. Call model.unmerge_adapter() first."
            )
        if isinstance(module, LoraLayer) and chosen in module.scaling:
            scalings[path.removeprefix("base_model.model.")] = float(module.scaling[chosen])
    state = get_peft_model_state_dict(model, adapter_name=chosen, save_embedding_layers=False)
    tensors = {key: InMemory(tensor.detach().cpu().clone()) for key, tensor in state.items()}
    config = {f.name: getattr(model.peft_config[chosen], f.name) for f in dataclasses.fields(model.peft_config[chosen])}
    config["peft_type"] = getattr(config["peft_type"], "value", config["peft_type"])
    return Adapter(chosen, config, tensors, scalings=scalings)


def _active(model: Any) -> str:
    """The one adapter of a live model that is active."""
    active = list(model.active_adapters)
    if len(active) != 1:
        raise BadValueError(
            f"the model has {len(active)} active adapters ({some(active) or 'none'}), and a vector is made of one. Say "
            f"which with adapter_name= (it has {some(model.peft_config)}), and add the vectors."
        )
    return str(active[0])


def base_of(
    adapter: Adapter,
    base: str | Path | torch.nn.Module | None,
    revision: str | None,
    token: str | bool | None,
) -> AdapterBase:
    """The base that the caller gives, or else the one that the adapter's config names, if that can be reached."""
    if isinstance(base, torch.nn.Module):
        snapshot = base  # its tensors are copied where a delta takes them
        return AdapterBase(lambda: _snapshot(live_checkpoint(snapshot)), layout_of_model(base), "", at_hand=True)
    where = base or adapter.config.get("base_model_name_or_path")
    if not where:
        return AdapterBase(None, Layout(), "the adapter's config names no base")
    revision = revision if base else adapter.config.get("revision")
    try:
        folder, _, _ = locate(where, revision, token, [CONFIG])
    except TaskVectorError:
        if base is not None:
            raise
        return AdapterBase(None, Layout(), "the base that the adapter's config names cannot be reached")
    unknown = "its architecture is unknown"
    if is_folder(where):
        try:
            opened = open_model(where, revision, token)
            return AdapterBase(lambda: opened, opened.layout, unknown, at_hand=True)
        except TaskVectorError:  # plain LoRA does without weights; what needs them gets this error then
            pass
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else None
    return AdapterBase(lambda: open_model(where, revision, token), layout_of_config(config), unknown)


def live_base(model: Any, adapter: Adapter) -> AdapterBase:
    """The base inside a live PeftModel."""
    if adapter.config.get("bias", "none") != "none":
        # Biases were trained in place: the live model no longer has the base's.
        return base_of(adapter, None, None, None)
    return AdapterBase(lambda: _snapshot(live_checkpoint(model)), layout_of_model(model), "")


def _snapshot(live: Checkpoint) -> Checkpoint:
    """A live checkpoint whose tensors are copied when they are taken, so that no vector shares them."""
    return dataclasses.replace(live, tensors=_CopyOnTake(live.tensors))


class _CopyOnTake(dict[str, Source]):
    """Sources that are copied when they are looked up."""

    def __getitem__(self, name: str) -> Source:
        return InMemory(super().__getitem__(name).read().clone())


def named_base(adapter: Adapter, layout: Layout) -> ModelRecord | None:
    """What the adapter's config, or else the layout, tells of the base."""
    named = adapter.config.get("base_model_name_or_path")
    tied = tuple(sorted(layout.tied.items()))
    if not named:
        architecture = layout.architecture
        return ModelRecord(f"a {architecture}", architecture=architecture, tied=tied) if architecture else None
    is_id = may_be_hub_id(named) and not is_folder(named)
    folder = str(Path(named).resolve()) if is_folder(named) else None
    return ModelRecord(
        named if is_id else Path(named).name,
        architecture=layout.architecture,
        tied=tied,
        address=named if is_id else folder,
    )


def check_config(adapter: Adapter) -> None:
    """Refuse an adapter whose config asks for what is not a fixed change of stored weights."""
    config = adapter.config
    kind = str(config.get("peft_type", "")).upper()
    if kind in OTHER_TUNERS:  # whose config PEFT itself reads
        return
    if kind != "LORA":
        raise UnsupportedError(
            f"{adapter.name} is a {config.get('peft_type')} adapter, which is not known here as a fixed change of "
            f"weights. Known are LORA, {', '.join(sorted(OTHER_TUNERS))}. If PEFT can merge it into its base, do that "
            "and use from_finetuned()."
        )
    for key, kind in _TYPES.items():
        if key in config and not isinstance(config[key], kind):
            raise _senseless(adapter, key, config[key])
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        raise _senseless(adapter, "bias", config["bias"])
    for key, value in config.items():
        if key not in _UNDERSTOOD and value and not _is_default(key, value):
            uses = f"{adapter.name} uses LoRA with {key}={value!r}, which"
            if key in _NO_CHANGE:
                raise UnsupportedError(f"{uses} {_NO_CHANGE[key]}.")
            raise UnsupportedError(
                f"{uses} is not a fixed change of stored weights that can be represented here. Merge it into its base "
                "and use from_finetuned()."
            )
    patterns = {
        f"{kind} of {key}": value
        for kind in ("alpha_pattern", "rank_pattern")
        for key, value in (config.get(kind) or {}).items()
    }
    for key, value in {"lora_alpha": config.get("lora_alpha", 8), "r": config.get("r", 8), **patterns}.items():
        if not _is_number(value):
            raise _senseless(adapter, key, value)
    for pattern in (*(config.get("alpha_pattern") or {}), *(config.get("rank_pattern") or {})):
        try:
            re.compile(pattern)
        except re.error as error:
            raise _senseless(adapter, f"a pattern ({error})", pattern) from None
    _check_start(adapter)


def as_plain(adapter: Adapter) -> Adapter:
    """The adapter, whatever its factors began with."""
    return replace(adapter, config={**adapter.config, "init_lora_weights": True})


def _is_default(key: str, value: Any) -> bool:
    """Whether an option that is not known here is as PEFT sets it where nobody asks for it."""
    from peft import LoraConfig

    return bool(value == vars(LoraConfig()).get(key))


def _check_start(adapter: Adapter) -> None:
    start = adapter.config.get("init_lora_weights")
    if not isinstance(start, str) or not start.lower().startswith(_CHANGED_BASE):
        return
    way_out = "Give the adapter as it was before training: from_adapter(adapter, initial=...), or --initial; "
    way_out += (
        "or merge it into its base with PEFT and use from_finetuned()."
        if start.lower().startswith("loftq")
        else "or save it with PEFT's path_initial_model_for_weight_conversion= to make it a plain LoRA."
    )
    raise UnsupportedError(
        f"{adapter.name} was started with init_lora_weights={start!r}, which changes the base weights, so its factors "
        f"are not a change from the base on disk. {way_out}"
    )


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _senseless(adapter: Adapter, key: str, value: object) -> CorruptFileError:
    return CorruptFileError(f"{adapter.name}: {key}={value!r} in {ADAPTER_CONFIG} makes no sense. Save it again.")
