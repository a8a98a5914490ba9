"""A LoRA adapter -> task vector, its factors kept as factors."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra.deltas import Delta, Dense, Difference, DoRA, LowRank, row_difference
from hf_taskvec.algebra.parameter_names import is_vocabulary, perhaps_conv1d
from hf_taskvec.algebra.provenance import ModelRecord, Origin, Provenance, label_for
from hf_taskvec.algebra.rounding import FLOATS
from hf_taskvec.algebra.sources import InMemory, Source, Transposed, fingerprint
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
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
from hf_taskvec.json_files import read_json
from hf_taskvec.models.checkpoint import Checkpoint
from hf_taskvec.models.layout import Layout, is_peft_model, layout_of_config, layout_of_model
from hf_taskvec.models.live_model import live_checkpoint
from hf_taskvec.models.locations import Location, locate
from hf_taskvec.models.tensor_files import open_files

if TYPE_CHECKING:
    from peft import PeftModel

# What LoraConfig can say without changing which function of the stored tensors the adapter is, or what is handled here.
# A field that is not named here and differs from its default is refused, so an option of a later PEFT cannot slip by.
_UNDERSTOOD = {
    *(
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "eva_config",
    ),
    *(
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "loftq_config",
    ),
    *("layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout", "megatron_core", "modules_to_save"),
    *("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
    *("target_modules", "task_type", "trainable_token_indices", "use_dora", "use_rslora"),
}
# What is read here, and must be of these types.
_TYPES: Mapping[str, Any] = {
    "alpha_pattern": dict | None,
    "base_model_name_or_path": str | None,
    "bias": str,
    "lora_alpha": int | float,
    "revision": str | None,
    "trainable_token_indices": list | dict | None,
}
# These start training from a changed base, so the stored factors are not the change from the base on disk.
_CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True)
class _Adapter:
    """An adapter's config and tensors, wherever they come from."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Source]
    revision: str | None = None
    #: scalings of a live model's layers, by module
    scalings: Mapping[str, float] | None = None


class _Base:
    """The adapter's base: its layout if it can be had, its weights only if something needs them."""

    def __init__(
        self, open_weights: Callable[[], Checkpoint] | None, layout: Layout, why_not: str, at_hand: bool = False
    ) -> None:
        self.layout, self._open, self.why_not, self._at_hand = layout, open_weights, why_not, at_hand

    @cached_property
    def weights(self) -> Checkpoint | None:
        return self._open() if self._open else None

    def record(self) -> ModelRecord | None:
        """What the weights are, if they are here or something needed them: a record alone must download no model."""
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


def from_adapter(
    adapter: "str | Path | PeftModel",
    base: str | Path | torch.nn.Module | None = None,
    *,
    name: str | None = None,
    revision: str | None = None,
    base_revision: str | None = None,
    adapter_name: str | None = None,
    token: str | bool | None = None,
) -> TaskVector:
    """See `TaskVector.from_adapter`."""
    if isinstance(adapter, str | Path):
        found = _stored_adapter(adapter, revision, token)
        _check_config(found)
        origin_base = _base_of(found, base, base_revision, token)
    elif is_peft_model(adapter):
        found = _live_adapter(adapter, adapter_name)
        _check_config(found)
        origin_base = _live_base(adapter, found) if base is None else _base_of(found, base, base_revision, token)
    else:
        raise BadValueError(f"expected a folder, a Hub id or a PeftModel, not {type(adapter).__name__}.")
    terms = _terms(found, origin_base)
    layout = origin_base.layout
    _check_targets(terms, layout, found.name)
    record = origin_base.record() or _named_base(found, layout)
    rank = sorted({t.delta.rank for each in terms.values() for t in each if isinstance(t.delta, LowRank)})
    how = f"LoRA adapter, rank {rank[0]}" + (f"–{rank[-1]}" if len(rank) > 1 else "") if rank else "adapter"
    tuned = ModelRecord(found.name, found.revision, fingerprint=fingerprint(found.tensors))
    return TaskVector(terms, Provenance.of(Origin(name or label_for(found.name), how, record, tuned)))


def _named_base(adapter: _Adapter, layout: Layout) -> ModelRecord | None:
    named = adapter.config.get("base_model_name_or_path")
    if not named:
        return (
            ModelRecord(f"a {layout.architecture}", architecture=layout.architecture) if layout.architecture else None
        )
    is_id = named.count("/") <= 1 and not named.startswith(("/", ".", "~")) and not Path(named).exists()
    return ModelRecord(named if is_id else Path(named).name, architecture=layout.architecture)


# Where the adapter is.


def _stored_adapter(where: str | Path, revision: str | None, token: str | bool | None) -> _Adapter:
    folder, name, commit = locate(where, revision, token, ["adapter_*"])
    if not (folder / ADAPTER_CONFIG).exists():
        raise MissingFileError(
            f"{name} has no {ADAPTER_CONFIG}. Is it a PEFT adapter? See from_finetuned() for models."
        )
    tensors = open_files(folder, ADAPTER_WEIGHTS, Location(name, commit) if commit else None)
    return _Adapter(name, read_json(folder / ADAPTER_CONFIG), tensors, commit)


def _live_adapter(model: Any, adapter_name: str | None) -> _Adapter:
    """A snapshot of a live model's adapter."""
    from peft import get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer

    chosen = adapter_name or model.active_adapter
    if chosen not in model.peft_config:
        known = list(model.peft_config)
        raise BadValueError(f"the model has no adapter {chosen!r} (it has {some(known)}).{did_you_mean(chosen, known)}")
    scalings = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer) and chosen in module.scaling:
            scalings[path.removeprefix("base_model.model.")] = float(module.scaling[chosen])
            if module.merged:
                raise UnsupportedError("the adapter is merged into the live model. Call model.unmerge_adapter() first.")
    state = get_peft_model_state_dict(model, adapter_name=chosen, save_embedding_layers=False)
    tensors = {key: InMemory(tensor.detach().cpu().clone()) for key, tensor in state.items()}
    config = {f.name: getattr(model.peft_config[chosen], f.name) for f in dataclasses.fields(model.peft_config[chosen])}
    config["peft_type"] = getattr(config["peft_type"], "value", config["peft_type"])
    return _Adapter(chosen, config, tensors, scalings=scalings)


# Where its base is.


def _base_of(
    adapter: _Adapter,
    base: str | Path | torch.nn.Module | None,
    revision: str | None,
    token: str | bool | None,
) -> _Base:
    if isinstance(base, torch.nn.Module):
        snapshot = base  # its tensors are copied where a delta takes them
        return _Base(lambda: _snapshot(live_checkpoint(snapshot)), layout_of_model(base), "", at_hand=True)
    where = base or adapter.config.get("base_model_name_or_path")
    if not where:
        return _Base(None, Layout(), "the adapter's config names no base")
    revision = revision if base else adapter.config.get("revision")
    try:
        folder, _, _ = locate(where, revision, token, [CONFIG])
        config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else None
    except TaskVectorError:
        if base is not None:
            raise
        return _Base(None, Layout(), "the base that the adapter's config names cannot be reached")
    layout = layout_of_config(config)
    return _Base(
        lambda: open_model(where, revision, token), layout, "its architecture is unknown", at_hand=Path(where).is_dir()
    )


def _live_base(model: Any, adapter: _Adapter) -> _Base:
    if adapter.config.get("bias", "none") != "none":
        # Biases were trained in place: the live model no longer has the base's.
        return _base_of(adapter, None, None, None)
    return _Base(lambda: _snapshot(live_checkpoint(model)), layout_of_model(model), "")


def _snapshot(live: Checkpoint) -> Checkpoint:
    """A live checkpoint whose tensors are copied when they are taken, so that no vector shares them."""
    return dataclasses.replace(live, tensors=_CopyOnTake(live.tensors))


class _CopyOnTake(dict[str, Source]):
    def __getitem__(self, name: str) -> Source:
        return InMemory(super().__getitem__(name).read().clone())


# What it holds.


def _check_config(adapter: _Adapter) -> None:
    config = adapter.config
    if str(config.get("peft_type", "")).upper() != "LORA":
        raise UnsupportedError(
            f"{adapter.name} is a {config.get('peft_type')} adapter. Only LoRA adapters are weight changes that can be "
            "negated and added; merge it into its base and use from_finetuned()."
        )
    for key, kind in _TYPES.items():
        if key in config and not isinstance(config[key], kind):
            raise _senseless(adapter, key, config[key])
    from peft import LoraConfig

    defaults = vars(LoraConfig())
    for key, value in config.items():
        if key not in _UNDERSTOOD and value and value != defaults.get(key):
            raise UnsupportedError(
                f"{adapter.name} uses LoRA with {key}={value!r}, which is not a fixed change of stored weights that "
                "can be represented here. Merge it into its base and use from_finetuned()."
            )
    patterns = {f"alpha_pattern of {key}": alpha for key, alpha in (config.get("alpha_pattern") or {}).items()}
    for key, alpha in patterns.items():
        if not isinstance(alpha, int | float):
            raise _senseless(adapter, key, alpha)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise UnsupportedError(
            f"{adapter.name} was started with init_lora_weights={start!r}, which changes the base weights, so its "
            "factors are not a change from the base on disk. Save it with PEFT's "
            "path_initial_model_for_weight_conversion= to make it a plain LoRA."
        )


def _senseless(adapter: _Adapter, key: str, value: object) -> CorruptFileError:
    return CorruptFileError(f"{adapter.name}: {key}={value!r} in {ADAPTER_CONFIG} makes no sense. Save it again.")


def _terms(adapter: _Adapter, base: _Base) -> dict[str, list[Term]]:
    modules: dict[str, dict[str, Source]] = {}
    terms: dict[str, list[Term]] = {}
    trained_biases = adapter.config.get("bias", "none") != "none"
    for key, source in adapter.tensors.items():
        if source.dtype not in FLOATS:
            raise UnsupportedError(
                f"{adapter.name}: {key} is stored as {source.dtype}; factors must be floating-point."
            )
        path = key.removeprefix("base_model.model.")
        module, mark, part = path.partition(".lora_")
        if mark:
            if module.removesuffix(".base_layer").endswith(".experts"):
                raise UnsupportedError(
                    f"{adapter.name}: {path} is LoRA on fused experts, which are stored one tensor per expert. Merge "
                    "the adapter into its base and use from_finetuned()."
                )
            modules.setdefault(module, {})["lora_" + part.removesuffix(".weight")] = source
        elif path.endswith(".trainable_tokens_delta"):
            name = _canonical(path.removesuffix(".token_adapter.trainable_tokens_delta"), "weight", base.layout)
            index = _token_indices(adapter, name, source.shape[0])
            weight = base.tensor(name, f"{adapter.name} (trained tokens)")
            terms.setdefault(name, []).append(Term(1.0, row_difference(weight, source, index)))
        elif path.endswith(".base_layer.weight") or (path.endswith(".base_layer.bias") and not trained_biases):
            continue  # PEFT stores the untouched base beside LoRA on an embedding or head
        else:
            plain = path.replace(".base_layer.", ".")
            module, _, kind = plain.rpartition(".")
            name = _canonical(module, kind, base.layout)
            what = f"{adapter.name} ({'trained biases' if kind == 'bias' and trained_biases else 'modules_to_save'})"
            terms.setdefault(name, []).append(Term(1.0, _saved(name, base.tensor(name, what), source)))
    for module, parts in modules.items():
        for kind, term in _layer(adapter, base, module, parts):
            terms.setdefault(_canonical(module, kind, base.layout), []).append(term)
    if not terms:
        raise CorruptFileError(f"{adapter.name} holds no LoRA weights.")
    return terms


def _saved(name: str, base: Source, tuned: Source) -> Delta:
    if base.shape != tuned.shape:
        cause = "the vocabulary was resized" if is_vocabulary(name) else "the adapter belongs to another base"
        raise MismatchError(
            f"{name}: the base has shape {list(base.shape)}, the adapter's copy {list(tuned.shape)}: {cause}. Give the "
            "base with the adapter's shapes."
        )
    return Difference(base, tuned)


def _layer(adapter: _Adapter, base: _Base, module: str, parts: dict[str, Source]) -> list[tuple[str, Term]]:
    """The changes of one LoRA layer: its weight's, and its bias's where `lora_bias` trained one."""
    known = {
        "lora_A",
        "lora_B",
        "lora_B.bias",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
    }
    if unknown := set(parts) - known:
        raise UnsupportedError(f"{adapter.name}: {module} has {some(sorted(unknown))}, which no LoRA known here has.")
    is_embedding = "lora_embedding_A" in parts
    a, b = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if a not in parts or b not in parts:
        raise CorruptFileError(f"{adapter.name}: {module} has only one of its two LoRA factors.")
    down, up = parts[a], parts[b]
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
        raise CorruptFileError(
            f"{adapter.name}: the factors of {module} have shapes {list(down.shape)} and {list(up.shape)}, which "
            "cannot be multiplied."
        )
    name = _canonical(module, "weight", base.layout)
    transposed = is_embedding or _is_conv1d(adapter, base, name)
    scaling = _scaling(adapter, module, down.shape[0])
    left, right = (Transposed(down), Transposed(up)) if transposed else (up, down)
    low_rank = LowRank(left, right, scaling)
    change: Delta = low_rank
    if "lora_magnitude_vector" in parts:
        weight = base.tensor(name, f"{adapter.name} (DoRA)")
        if weight.shape != low_rank.shape:
            raise _wrong_shape(name, weight.shape, low_rank.shape)
        change = DoRA(weight, low_rank, parts["lora_magnitude_vector"], axis=int(transposed))
    result = [("weight", Term(1.0, change))]
    if "lora_B.bias" in parts:  # `lora_bias`: the adapter's own bias is scaled like its product
        result.append(("bias", Term(scaling, Dense((parts["lora_B.bias"],)))))
    return result


def _is_conv1d(adapter: _Adapter, base: _Base, name: str) -> bool:
    if base.layout.shapes:
        return name in base.layout.conv1d
    # Without the base's layout, PEFT's flag tells, if it is set: with a Linear layer beside a Conv1D, PEFT clears it.
    stated = bool(adapter.config.get("fan_in_fan_out"))
    if not stated and perhaps_conv1d(name):
        raise MissingFileError(
            f"{adapter.name}: whether {name} is stored transposed, as in GPT-2, takes the base's config to tell (a "
            f"fan_in_fan_out that is not set does not), and {base.why_not}. Pass base=."
        )
    return stated


def _scaling(adapter: _Adapter, module: str, rank: int) -> float:
    if adapter.scalings is not None:
        return adapter.scalings[module]
    from peft.utils.other import get_pattern_key

    patterns = adapter.config.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(list(patterns), module), adapter.config.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if adapter.config.get("use_rslora") else rank)


def _token_indices(adapter: _Adapter, name: str, count: int) -> tuple[int, ...]:
    given = adapter.config.get("trainable_token_indices")
    if isinstance(given, dict):
        module = name.removesuffix(".weight")
        given = next((rows for key, rows in given.items() if module == key or module.endswith("." + key)), None)
    if not isinstance(given, list) or len(given) != count or not all(isinstance(row, int) for row in given):
        raise CorruptFileError(
            f"{adapter.name}: the config's trainable_token_indices do not fit the {count} rows of {name}."
        )
    return tuple(given)


def _canonical(module: str, kind: str, layout: Layout) -> str:
    return layout.canonical(f"{module}.{kind}" if module else kind)


def _check_targets(terms: Mapping[str, list[Term]], layout: Layout, adapter: str) -> None:
    """Every changed parameter must exist in the base, with that shape."""
    if not layout.shapes:
        return
    unknown = [name for name in terms if name not in layout.shapes and name not in layout.tied]
    if unknown:
        raise MismatchError(
            f"{adapter} changes {some(unknown)}, which {layout.architecture} does not have."
            f"{did_you_mean(unknown[0], layout.shapes)} Its target modules belong to another model."
        )
    for name, each in terms.items():
        shape = layout.shapes[layout.tied.get(name, name)]
        for term in each:
            if term.delta.shape != shape:
                raise _wrong_shape(name, shape, term.delta.shape)


def _wrong_shape(name: str, base: tuple[int, ...], change: tuple[int, ...]) -> MismatchError:
    what = "the vocabulary sizes differ" if is_vocabulary(name) else "the adapter belongs to another base"
    return MismatchError(f"{name}: the base has shape {list(base)}, the adapter's change {list(change)}: {what}.")
