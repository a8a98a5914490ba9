"""A task vector -> PEFT adapter, which at weight 1 is the vector."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hf_taskvec._version import __version__
from hf_taskvec.algebra.rounding import round_once
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Sum
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.application.exportable_changes import (
    check_exportable,
    factors_of,
    held_as_factors,
    without_zeros,
)
from hf_taskvec.application.gguf_adapter import check_gguf, write_gguf_adapter
from hf_taskvec.application.peft_loading import check_loads, target_modules
from hf_taskvec.application.serving import ServeChoice, check_served_rank, check_serving
from hf_taskvec.errors import BadValueError, MissingFileError, UnsupportedError
from hf_taskvec.filenames import ADAPTER_CONFIG, ADAPTER_GGUF, ADAPTER_RECORD, ADAPTER_SAFETENSORS, CONFIG
from hf_taskvec.files.output_folder import new_folder
from hf_taskvec.files.safetensors_writer import SafetensorsWriter, TensorSpec
from hf_taskvec.hub_names import is_folder, split_revision, split_subfolder
from hf_taskvec.json_files import read_json
from hf_taskvec.models.checkpoint import Checkpoint, open_checkpoint
from hf_taskvec.models.companions import TOKENIZER_FILES, tokenizer_files
from hf_taskvec.models.layout import Layout, layout_of_config
from hf_taskvec.models.locations import LocatedFolder, locate
from hf_taskvec.models.meta_models import build_meta_model, most_parameters
from hf_taskvec.progress import progress_bar

#: what to do with changes that are not low-rank
DenseChoice = Literal["refuse", "save", "drop"]
_DENSE: tuple[str, ...] = get_args(DenseChoice)


def to_adapter(
    vector: TaskVector,
    output: str | Path,
    base_model_name_or_path: str | Path | None = None,
    *,
    base: str | Path | None = None,
    dense: DenseChoice = "refuse",
    uniform_rank: bool = False,
    serve: ServeChoice | None = None,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
    scale: float = 1.0,
    progress: bool | None = None,
) -> Path:
    """See `TaskVector.to_adapter`."""
    whole = vector * scale  # refuses NaN and infinities
    if dense not in _DENSE:
        raise BadValueError(f"dense={dense!r} is not one of {', '.join(map(repr, _DENSE))}.")
    check_serving(serve, dense)
    own, own_revision = _own_base(whole)
    named = _named(base_model_name_or_path, base, own, own_revision)
    given = base or base_model_name_or_path
    where, revision = (given, None) if given else (own, own_revision)
    found = _located(where, revision, required=given is not None)
    known = _known(found)
    if serve == "llama.cpp":
        check_gguf(known.config, dtype)
    layout = known.layout
    if layout.shapes:
        check_fits(whole, known, may_grow=dense == "drop")
    scaled, model = without_zeros(whole), _without_weights(known)
    check_exportable(scaled, dense, layout, model)
    low_rank = {name: scaled[name] for name in held_as_factors(scaled)}
    rest = [name for name in scaled if name not in low_rank]
    layers = {_module(name, layout): name for name in low_rank}
    kinds = {_module(name, layout): _kind(name, layout) for name in low_rank}
    with progress_bar(low_rank.items(), "Exporting", progress) as bar:
        factors = {_module(name, layout): factors_of(change) for name, change in bar}
    if uniform_rank or serve is not None:
        factors = _padded(factors)
        check_served_rank(serve, next(iter(factors.values()))[0].shape[1])
    tensors: dict[str, torch.Tensor] = {}
    for module, (left, right) in factors.items():
        tensors.update(_entries(module, kinds[module], left, right, dtype))
    config = _config(factors, kinds, _targets(list(factors), layout, model), named) | _task(model)
    if rest and dense == "save":
        _save_whole(scaled, rest, layout, where, revision, set(factors), tensors, config)
    final = Path(output)
    with new_folder(final, ADAPTER_RECORD, overwrite) as part:
        specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        with SafetensorsWriter(part / ADAPTER_SAFETENSORS, specs, {"format": "pt"}) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        (part / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
        if serve == "llama.cpp":
            named_factors = {layers[module]: _up_down(kinds[module], *pair) for module, pair in factors.items()}
            write_gguf_adapter(part / ADAPTER_GGUF, named_factors, known.config, dtype, str(whole.expression))
        if model is not None:
            check_loads(lambda: _without_weights(known), part, layers)
        origin = {
            "library": f"hf_taskvec {__version__}",
            "expression": whole.expression,
            "vector": whole.provenance.to_json(),
            "scale": float(scale),
            "fingerprint": vector.fingerprint,
            "changed_parameters": len(factors) if dense == "drop" else len(scaled),
            "options": ({"dense": dense} if rest else {}) | ({"serve": serve} if serve else {}),
        }
        (part / ADAPTER_RECORD).write_text(json.dumps(origin, indent=2, ensure_ascii=False) + "\n", "utf-8")
        if found is not None:
            _copy_tokenizer(found.path, part)
    return final


def _copy_tokenizer(base: Path, adapter: Path) -> None:
    """The base's tokenizer beside the adapter, as PEFT's own training leaves it: a pipeline looks for it there."""
    for path in tokenizer_files(base):
        copy = adapter / path.relative_to(base)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _own_base(vector: TaskVector) -> tuple[str | None, str | None]:
    """Hub id and revision, or the folder, of the one base that the vector comes from.

    Sources may know it in several ways: an adapter by its id alone, a fine-tune with the commit, a third by a copy.
    """
    records = [origin.base for origin in vector.provenance.origins if origin.base]
    places = {record.address or record.hub_id for record in records}
    prints = {record.fingerprint for record in records}
    if len(places) > 1 and (len(prints) > 1 or None in prints):
        return None, None
    known = {record.hub_id for record in records if record.hub_id} or places  # an id is good on every machine
    revisions = {record.revision for record in records if record.revision}
    if len(known) != 1 or len(revisions) > 1:
        return None, None
    return known.pop(), next(iter(revisions), None)


def _named(
    named: str | Path | None, given: str | Path | None, own: str | None, own_revision: str | None
) -> tuple[str | None, str | None]:
    """The base that the adapter names, and its revision: a Hub id if there is one, else a folder of this machine."""
    if not named and own and not Path(own).is_absolute():
        return _without_folder(own, own_revision)
    where = named or given or own
    if where is None or is_folder(where):
        return (str(where) if named else str(Path(where).resolve())) if where else None, None
    return _without_folder(*split_revision(str(where)))


def _without_folder(where: str, revision: str | None) -> tuple[str | None, str | None]:
    """The same, but no base at all for a folder in a repository: an adapter's config cannot name one."""
    return (where, revision) if split_subfolder(where)[1] is None else (None, None)


def _located(where: str | Path | None, revision: str | None, required: bool) -> LocatedFolder | None:
    """The base's config and tokenizer; none if no base is given and the vector's own is not found."""
    if where is None:
        return None
    try:
        found = locate(where, revision, None, [CONFIG, *TOKENIZER_FILES])
        if not (found.path / CONFIG).is_file():
            raise MissingFileError(f"{CONFIG} is missing in {found.name}.")
    except MissingFileError:
        if required:
            raise
        return None
    return found


def _known(found: LocatedFolder | None) -> Checkpoint:
    """The base's names and shapes, without its weights."""
    if found is None:
        return Checkpoint("the base", {})
    config = read_json(found.path / CONFIG)
    layout = layout_of_config(config)
    heads = {alias: layout.shapes[owner] for alias, owner in layout.tied.items() if owner in layout.shapes}
    shapes = {**layout.shapes, **heads}  # PEFT can change a tied head alone
    tensors = {each: InMemory(torch.empty(shape, device="meta")) for each, shape in shapes.items()}
    return Checkpoint(found.name, tensors, layout, config, revision=found.commit)


def _without_weights(known: Checkpoint) -> Any:
    """The base on the meta device; None if its architecture is not known."""
    if not known.layout.shapes:
        return None
    settings = {key: value for key, value in known.config.items() if key != "quantization_config"}
    return build_meta_model(settings, most_parameters(settings, None))


def _module(name: str, layout: Layout) -> str:
    """The path of the live layer that a weight belongs to."""
    return layout.live(name).removesuffix(".weight")


def _kind(name: str, layout: Layout) -> str:
    if name in layout.conv1d:
        return "conv1d"
    return "embedding" if name in layout.embeddings else "linear"


_Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _padded(factors: _Factors) -> _Factors:
    rank = max(left.shape[1] for left, _ in factors.values())
    pad = torch.nn.functional.pad
    return {
        module: (pad(left, (0, rank - left.shape[1])), pad(right, (0, 0, 0, rank - right.shape[0])))
        for module, (left, right) in factors.items()
    }


def _up_down(kind: str, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """PEFT's `B` and `A` of a stored weight that is `left @ right`."""
    return (left, right) if kind == "linear" else (right.T, left.T)


def _entries(
    module: str, kind: str, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A layer's factors under PEFT's names: `B @ A` for a linear layer, transposed for Conv1D and embeddings."""
    up, down = _up_down(kind, left, right)
    a, b = ("lora_embedding_A", "lora_embedding_B") if kind == "embedding" else ("lora_A.weight", "lora_B.weight")
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.{a}": round_once(down.contiguous(), dtype, module).contiguous(),
        f"{prefix}.{b}": round_once(up.contiguous(), dtype, module).contiguous(),
    }


def _config(
    factors: _Factors, kinds: Mapping[str, str], targets: list[str] | str, base: tuple[str | None, str | None]
) -> dict[str, Any]:
    ranks = {module: left.shape[1] for module, (left, _) in factors.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    # alpha = rank for every layer, so that every scaling is 1.
    patterns = {module: r for module, r in ranks.items() if r != rank}
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base[0],
        "revision": base[1],
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "target_modules": targets,
        "fan_in_fan_out": "conv1d" in kinds.values(),
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _task(model: Any) -> dict[str, Any]:
    """What the config says of the base's class: PEFT's task of a language model, else the class itself.

    PEFT's tasks of classifiers would copy the head and leave a LoRA of it out. Without a task, all of PEFT's classes
    take the adapter as it is.
    """
    if model is None or (model.can_generate() and model.main_input_name == "input_ids"):
        seq2seq = model is not None and model.config.is_encoder_decoder
        return {"task_type": "SEQ_2_SEQ_LM" if seq2seq else "CAUSAL_LM"}
    cls = type(model)
    mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    return {"task_type": None, "auto_mapping": mapping}


def _targets(layers: list[str], layout: Layout, model: Any) -> list[str] | str:
    """What the config calls the target modules: short names where they mean exactly the changed layers.

    Experts are called as they are stored, which PEFT turns into the names of fused ones.
    """
    if model is not None and {path for path, _ in model.named_modules()}.issuperset(layers):
        return target_modules(model, layers)
    short = sorted({layer.rsplit(".", 1)[-1] for layer in layers})
    every = {layout.live(name).removesuffix(".weight") for name in layout.shapes if name.endswith(".weight")}
    meant = {layer for layer in every if layer.rsplit(".", 1)[-1] in short}
    return short if meant == set(layers) else sorted(layers)


def _save_whole(
    vector: TaskVector,
    names: list[str],
    layout: Layout,
    where: str | Path | None,
    revision: str | None,
    targets: set[str],
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
) -> None:
    """Store base + change for what is not low-rank: whole modules as `modules_to_save`, biases as trained biases."""
    if where is None:
        raise MissingFileError("dense='save' stores whole values, so it needs the base model. Pass base=.")
    model = open_checkpoint(where, revision)
    check_fits(vector, model)
    modules = set()
    for name in names:
        module, _, kind = layout.live(name).rpartition(".")
        if module in targets:
            if kind != "bias":
                raise UnsupportedError(f"{name} is partly low-rank and partly dense; compress the vector first.")
            config["bias"] = "lora_only"
            tensors[f"base_model.model.{module}.base_layer.bias"] = _whole(vector, model, name)
        else:
            modules.add(module)
    for name in model.tensors:
        module, _, kind = layout.live(name).rpartition(".")
        if module in modules:
            tensors[f"base_model.model.{module}.{kind}"] = _whole(vector, model, name)
    config["modules_to_save"] = sorted(modules) or None


def _whole(vector: TaskVector, model: Checkpoint, name: str) -> torch.Tensor:
    source = model.tensors[name]
    out = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    Sum(source.shape, vector.terms_of(name), source).into(out, name)
    return out
