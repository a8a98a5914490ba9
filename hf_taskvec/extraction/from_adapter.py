"""A LoRA adapter -> task vector, its factors kept as factors: the change that each variant of LoRA stands for."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra.deltas import Delta, Dense, Difference, DoRA, LowRank, Rows, row_difference
from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.parameter_names import perhaps_conv1d
from hf_taskvec.algebra.provenance import ModelRecord, Origin, Provenance
from hf_taskvec.algebra.rounding import FLOATS
from hf_taskvec.algebra.sources import Source, Transposed, sampled_fingerprint
from hf_taskvec.algebra.stacked_low_rank import StackedLowRank
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import (
    BadValueError,
    CorruptFileError,
    MismatchError,
    MissingFileError,
    UnsupportedError,
    did_you_mean,
    some,
)
from hf_taskvec.extraction.adapter_files import (
    OTHER_TUNERS,
    Adapter,
    AdapterBase,
    as_plain,
    base_of,
    check_config,
    live_adapter,
    live_base,
    named_base,
    stored_adapter,
)
from hf_taskvec.extraction.fused_experts import TargetParameter, changed_tensors, wrapped_parameters
from hf_taskvec.extraction.other_tuners import changes_of_tuner
from hf_taskvec.filenames import ADAPTER_CONFIG
from hf_taskvec.models.checkpoint import in_stored_form
from hf_taskvec.models.layout import Layout, how_to_untie, is_peft_model

if TYPE_CHECKING:
    from peft import PeftModel

# What VeLoRA needs for its backward pass.
_TRAINING_ONLY = {"lora_velora_embed"}


def from_adapter(
    adapter: "str | Path | PeftModel",
    *,
    base: str | Path | torch.nn.Module | None = None,
    name: str | None = None,
    revision: str | None = None,
    base_revision: str | None = None,
    adapter_name: str | None = None,
    initial: str | Path | None = None,
    token: str | bool | None = None,
) -> TaskVector:
    """See `TaskVector.from_adapter`."""
    begun = None if initial is None else stored_adapter(initial, None, token)
    if isinstance(adapter, str | Path):
        found = stored_adapter(adapter, revision, token)
        check_config(found if begun is None else as_plain(found))
        origin_base = base_of(found, base, base_revision, token)
    elif is_peft_model(adapter):
        found = live_adapter(adapter, adapter_name)
        check_config(found if begun is None else as_plain(found))
        origin_base = live_base(adapter, found) if base is None else base_of(found, base, base_revision, token)
    else:
        raise BadValueError(f"expected a folder, a Hub id or a PeftModel, not {type(adapter).__name__}.")
    terms = _terms(found, origin_base)
    if begun is not None:
        terms = _since(terms, begun, found, origin_base)
    layout = origin_base.layout
    _check_targets(terms, layout, found.name)
    named = named_base(found, layout)
    record = origin_base.record() or named
    if base is None and record is not None and named is not None:  # a live model's weights have no address
        record = replace(record, address=record.address or named.address)
    changes = [term.delta for each in terms.values() for term in each]
    rank = sorted({each.rank for each in changes if each.factors is not None or isinstance(each, StackedLowRank)})
    kind = str(found.config["peft_type"]).upper()
    of = "LoRA adapter" if kind == "LORA" else f"{kind} adapter"
    how = f"{of}, rank {rank[0]}" + (f"–{rank[-1]}" if len(rank) > 1 else "") if rank else of.removeprefix("LoRA ")
    how += ", less its start" if begun is not None else ""
    read = found.tensors if begun is None else {**found.tensors, **{f"start.{k}": s for k, s in begun.tensors.items()}}
    tuned = ModelRecord(found.name, found.revision, fingerprint=sampled_fingerprint(read))
    return TaskVector(terms, Provenance.of(Origin(name or label_for(found.name), how, record, tuned)))


def _since(terms: dict[str, list[Term]], begun: Adapter, trained: Adapter, base: AdapterBase) -> dict[str, list[Term]]:
    """What training added to the factors that it began with, which had been taken out of the base."""
    check_config(as_plain(begun))
    for each in (trained, begun):
        others = [key for key in each.tensors if ".lora_A." not in key and ".lora_B." not in key]
        if each.config.get("use_dora") or str(each.config["peft_type"]).upper() != "LORA" or others:
            raise UnsupportedError(f"initial= is for plain LoRA, and {each.name} holds more than factors.")
    before = _terms(begun, base)
    if before.keys() != terms.keys():
        differing = some(sorted(before.keys() ^ terms.keys()))
        raise MismatchError(f"{begun.name} is not the start of {trained.name}: {differing} is in one of them alone.")
    return {name: [*each, *(Term(-term.weight, term.delta) for term in before[name])] for name, each in terms.items()}


def _terms(adapter: Adapter, base: AdapterBase) -> dict[str, list[Term]]:
    """The change of each parameter that the adapter's tensors stand for."""
    modules: dict[str, dict[str, Source]] = {}
    terms: dict[str, list[Term]] = {}
    if str(adapter.config["peft_type"]).upper() in OTHER_TUNERS:
        terms, own = changes_of_tuner(adapter, base)
        rest = {key: source for key, source in adapter.tensors.items() if key not in own}
        adapter = replace(adapter, tensors=rest)  # what was trained and stored whole
    trained_biases = adapter.config.get("bias", "none") != "none"
    parameters = _target_parameters(adapter, base)
    for path, source in _trained(adapter).items():
        module, mark, part = path.partition(".lora_")
        if mark:
            if module not in parameters and module.endswith((".experts", ".base_layer")):
                raise _fused_experts(adapter, path)
            modules.setdefault(module, {})["lora_" + part.removesuffix(".weight")] = source
        elif path.endswith(".trainable_tokens_delta"):
            module = path.removesuffix(".token_adapter.trainable_tokens_delta")
            name = _canonical(module, "weight", base.layout)
            _check_plain_lookup(adapter, name, base.layout)
            if _canonical(module, "bias", base.layout) in base.layout.shapes:
                raise UnsupportedError(
                    f"{adapter.name} trains tokens of {module}, which has a bias in {base.layout.architecture}: PEFT "
                    "leaves the bias out until it merges, so what was trained is not what is merged. Train the head "
                    "with modules_to_save."
                )
            weight = base.tensor(name, f"{adapter.name} (trained tokens)")
            index = _token_indices(adapter, module, source.shape[:1], weight.shape[0])
            terms.setdefault(name, []).append(Term(1.0, row_difference(weight, source, index)))
        elif path.endswith(".base_layer.weight") or (path.endswith(".base_layer.bias") and not trained_biases):
            continue  # PEFT stores the untouched base beside LoRA on an embedding or head
        else:
            kind = path.rpartition(".")[2]
            what = f"{adapter.name} ({'trained biases' if kind == 'bias' and trained_biases else 'modules_to_save'})"
            for name, tuned in _stored(adapter, path.replace(".base_layer.", "."), source, base.layout).items():
                if name in terms:
                    raise CorruptFileError(f"{adapter.name} stores {name} twice. Save it again with PEFT.")
                terms[name] = [Term(1.0, _saved(name, base.tensor(name, what), tuned, base.layout))]
    for module, parts in modules.items():
        if module in parameters:
            for name, term in _parameter(adapter, base, module, parameters[module], parts):
                terms.setdefault(name, []).append(term)
            continue
        for kind, term in _layer(adapter, base, module, parts):
            name = _canonical(module, kind, base.layout)
            if kind == "weight" and name in terms:
                raise CorruptFileError(f"{adapter.name} stores both LoRA and whole values of {name}. Save it again.")
            terms.setdefault(name, []).append(term)
    if not terms:
        raise CorruptFileError(f"{adapter.name} holds no LoRA weights.")
    return _with_ties(adapter, terms, base.layout)


def _trained(adapter: Adapter) -> dict[str, Source]:
    """The adapter's tensors by their paths in the base model.

    With `bias="all"`, PEFT stores the bias of a module in `modules_to_save` three times: under its own name, as that of
    the copy that was trained, and as that of the original, which the model does not use.
    """
    trained = {}
    for key, source in adapter.tensors.items():
        if source.dtype not in FLOATS:
            raise UnsupportedError(
                f"{adapter.name}: {key} is stored as {source.dtype}; factors must be floating-point."
            )
        plain = key.replace(".modules_to_save.", ".")
        if ".original_module." not in key and (plain == key or plain not in adapter.tensors):
            trained[plain.removeprefix("base_model.model.")] = source
    return trained


def _with_ties(adapter: Adapter, terms: dict[str, list[Term]], layout: Layout) -> dict[str, list[Term]]:
    """The changes on a base that ties weights to one another, which an adapter may change apart.

    What was trained counts, and that is what PEFT computes before merging: the same change of both is one change of the
    weight that is stored (`ensure_weight_tying`; trained tokens, which PEFT ties by itself); a change of the head alone
    stays one. For a change of the embedding alone there is no name.
    """
    for owner in set(layout.tied.values()) & terms.keys():
        aliases = [alias for alias, stored in layout.tied.items() if stored == owner]
        apart = [alias for alias in aliases if alias in terms]
        tokens = [all(isinstance(term.delta, Rows) for term in terms[name]) for name in (owner, *apart)]
        if (tokens[0] and not apart) or all(tokens):
            continue
        if any(tokens):
            raise UnsupportedError(
                f"{adapter.name} trains tokens of {owner} or {some(aliases)}, which {layout.architecture} ties, and "
                "changes the other in another way: PEFT computes one function before merging and another after. Train "
                "it on an untied base."
            )
        if len(apart) < len(aliases):
            raise UnsupportedError(
                f"{adapter.name} changes {owner} alone, and {layout.architecture} ties {some(aliases)} to it: as it "
                "was trained, the model is no longer tied (and PEFT merges a LoRA into both). Pass the base untied as "
                f"base=. {how_to_untie(layout.live(aliases[0]))}"
            )
        if all(_same(terms[owner], terms[alias]) for alias in apart):
            terms = {name: each for name, each in terms.items() if name not in apart}
    return terms


def _same(one: list[Term], other: list[Term]) -> bool:
    """Whether two changes consist of equal numbers."""
    return len(one) == len(other) and all(
        a.weight == b.weight
        and type(a.delta) is type(b.delta)
        and (a.delta.factors and a.delta.factors.scaling) == (b.delta.factors and b.delta.factors.scaling)
        and [source.shape for source in a.delta.sources] == [source.shape for source in b.delta.sources]
        and all(torch.equal(x.read(), y.read()) for x, y in zip(a.delta.sources, b.delta.sources, strict=True))
        for a, b in zip(one, other, strict=True)
    )


def _fused_experts(adapter: Adapter, path: str) -> UnsupportedError:
    return UnsupportedError(
        f"{adapter.name}: {path} changes a parameter that target_parameters in {ADAPTER_CONFIG} does not name. Merge "
        "the adapter into its base and use from_finetuned()."
    )


def _target_parameters(adapter: Adapter, base: AdapterBase) -> dict[str, TargetParameter]:
    """Path of PEFT's wrapper -> the parameter that it changes as it is."""
    if not adapter.config.get("target_parameters"):
        return {}
    if not base.layout.shapes:
        raise MissingFileError(
            f"{adapter.name}: which parameters target_parameters names takes the base's config to tell, and "
            f"{base.why_not}. Pass base=."
        )
    return wrapped_parameters(adapter.config, base.layout)


def _parameter(
    adapter: Adapter, base: AdapterBase, module: str, target: TargetParameter, parts: dict[str, Source]
) -> list[tuple[str, Term]]:
    """The changes of all that is stored of a parameter that PEFT changes as it is."""
    if parts.keys() != {"lora_A", "lora_B"}:
        raise CorruptFileError(
            f"{adapter.name}: {target.name} needs the two factors of a LoRA, and has {some(sorted(parts))}."
        )
    down, up = parts["lora_A"], parts["lora_B"]
    rank = down.shape[0] // (target.shape[0] if len(target.shape) == 3 else 1) if down.shape else 0
    scaling = _scaling(adapter, module, rank, target.name)
    return [(each, Term(1.0, delta)) for each, delta in changed_tensors(target, down, up, scaling, base.layout).items()]


def _restructured(adapter: str, names: list[str]) -> UnsupportedError:
    return UnsupportedError(
        f"{adapter} changes {some(names)}, which transformers stores in another form than the live model has (parts of "
        "projections in one piece, for example). Merge the adapter into its base and use from_finetuned()."
    )


def _check_plain_lookup(adapter: Adapter, name: str, layout: Layout) -> None:
    if name in layout.offset:
        raise UnsupportedError(
            f"{adapter.name} changes {name}, which {layout.architecture} looks up with an offset that PEFT does not "
            "know: it trains other rows than it merges. Train the adapter without that layer."
        )


def _stored(adapter: Adapter, path: str, source: Source, layout: Layout) -> dict[str, Source]:
    """What the adapter stores whole, under canonical names: fused experts as those that the base stores."""
    if path not in layout.restructured:
        return {layout.canonical(path): source}
    found = in_stored_form({path: source}, layout, adapter.name)
    if path in found:
        raise _restructured(adapter.name, [path])
    return found


def _saved(name: str, base: Source, tuned: Source, layout: Layout) -> Delta:
    """The change of a parameter that the adapter stores whole."""
    if base.shape != tuned.shape:
        cause = "the vocabulary was resized" if layout.is_vocabulary(name) else "the adapter belongs to another base"
        raise MismatchError(
            f"{name}: the base has shape {list(base.shape)}, the adapter's copy {list(tuned.shape)}: {cause}. Give the "
            "base with the adapter's shapes."
        )
    return Difference(base, tuned)


def _layer(adapter: Adapter, base: AdapterBase, module: str, parts: dict[str, Source]) -> list[tuple[str, Term]]:
    """The changes of one LoRA layer: its weight's, and its bias's where `lora_bias` trained one."""
    known = {
        "lora_A",
        "lora_B",
        "lora_B.bias",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
    }
    if unknown := set(parts) - known - _TRAINING_ONLY:
        raise UnsupportedError(f"{adapter.name}: {module} has {some(sorted(unknown))}, which no LoRA known here has.")
    is_embedding = "lora_embedding_A" in parts
    a, b = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if a not in parts or b not in parts:
        raise CorruptFileError(f"{adapter.name}: {module} has only one of its two LoRA factors.")
    down, up = parts[a], parts[b]
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
        raise CorruptFileError(
            f"{adapter.name}: the factors of {module} have shapes {list(down.shape)} and "
            f"{list(up.shape)}, which cannot be multiplied."
        )
    name = _canonical(module, "weight", base.layout)
    if is_embedding:
        _check_plain_lookup(adapter, name, base.layout)
        if not base.layout.shapes:
            raise MissingFileError(
                f"{adapter.name}: whether {name} is also the output head takes the base's config to tell, and "
                f"{base.why_not}. Pass base=."
            )
    transposed = is_embedding or _is_conv1d(adapter, base, name)
    scaling = _scaling(adapter, module, down.shape[0])
    left, right = (Transposed(down), Transposed(up)) if transposed else (up, down)
    low_rank = LowRank(left, right, scaling)
    change: Delta = low_rank
    if "lora_magnitude_vector" in parts:
        weight = base.tensor(name, f"{adapter.name} (DoRA)")
        if weight.shape != low_rank.shape:
            raise _wrong_shape(name, weight.shape, low_rank.shape, base.layout)
        change = DoRA(weight, low_rank, parts["lora_magnitude_vector"], axis=int(transposed))
    result = [("weight", Term(1.0, change))]
    if "lora_B.bias" in parts:  # `lora_bias`: the adapter's own bias is scaled like its product
        bias = _canonical(module, "bias", base.layout)
        if base.layout.shapes and name in base.layout.shapes and bias not in base.layout.shapes:
            raise UnsupportedError(
                f"{adapter.name} was trained with lora_bias=True on {module}, which has no bias in "
                f"{base.layout.architecture}: there is nothing to add its bias to, and PEFT cannot merge it either. "
                "Train it with lora_bias=False."
            )
        result.append(("bias", Term(scaling, Dense((parts["lora_B.bias"],)))))
    return result


def _is_conv1d(adapter: Adapter, base: AdapterBase, name: str) -> bool:
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


def _scaling(adapter: Adapter, module: str, rank: int, target: str | None = None) -> float:
    """What the product of a layer's factors is multiplied by: alpha / rank, or alpha / sqrt(rank) (rsLoRA).

    `target` is what patterns are compared with, if that is not the module.
    """
    if adapter.scalings is not None:
        return adapter.scalings[module]

    def stated(patterns: Mapping[str, Any] | None, default: Any) -> Any:
        """The first value whose pattern is the end of the module's path, as in PEFT's `get_pattern_key`."""
        given = patterns or {}
        named = target or module
        fitting = (value for key, value in given.items() if re.match(rf"(.*\.)?({key})$", named))
        return next(fitting, given.get(named, default))

    alpha = stated(adapter.config.get("alpha_pattern"), adapter.config.get("lora_alpha", 8))
    expected = stated(adapter.config.get("rank_pattern"), adapter.config.get("r", 8))
    if expected != rank:
        raise CorruptFileError(
            f"{adapter.name}: the factors of {target or module} have rank {rank}, and {ADAPTER_CONFIG} says "
            f"{expected}. They do not belong together."
        )
    return alpha / (math.sqrt(rank) if adapter.config.get("use_rslora") else rank)


def _token_indices(adapter: Adapter, module: str, count: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Which rows of an embedding were trained."""
    given = adapter.config.get("trainable_token_indices")
    if isinstance(given, dict):
        given = next((rows for key, rows in given.items() if module == key or module.endswith("." + key)), None)
    if (
        not isinstance(given, list)
        or (len(given),) != count
        or not all(isinstance(row, int) and 0 <= row < rows for row in given)
        or len(set(given)) != len(given)
    ):
        raise CorruptFileError(
            f"{adapter.name}: the config's trainable_token_indices do not fit {module}: they must be the "
            f"{some(map(str, count))} tokens that the adapter stores, each once and below {rows}."
        )
    return tuple(given)


def _canonical(module: str, kind: str, layout: Layout) -> str:
    return layout.canonical(f"{module}.{kind}" if module else kind)


def _check_targets(terms: Mapping[str, list[Term]], layout: Layout, adapter: str) -> None:
    """Every changed parameter must exist in the base, with that shape."""
    if not layout.shapes:
        return
    unknown = [name for name in terms if name not in layout.shapes and name not in layout.tied]
    if restructured := [name for name in unknown if name in layout.restructured]:
        raise _restructured(adapter, restructured)
    if unknown:
        raise MismatchError(
            f"{adapter} changes {some(unknown)}, which {layout.architecture} does not have."
            f"{did_you_mean(unknown[0], layout.shapes)} Its target modules belong to another model."
        )
    for name, each in terms.items():
        shape = layout.shapes[layout.tied.get(name, name)]
        for term in each:
            if term.delta.shape != shape:
                raise _wrong_shape(name, shape, term.delta.shape, layout)


def _wrong_shape(name: str, base: tuple[int, ...], change: tuple[int, ...], layout: Layout) -> MismatchError:
    what = "the vocabulary sizes differ" if layout.is_vocabulary(name) else "the adapter belongs to another base"
    return MismatchError(f"{name}: the base has shape {list(base)}, the adapter's change {list(change)}: {what}.")
