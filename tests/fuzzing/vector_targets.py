"""Saved task vectors, adapters, and the records that this library leaves in what it writes."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzzing.formats import Json, SafetensorsHeader
from fuzzing.runner import AnyOf, MeaninglessError, Target
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file
from support.kinds_of_change import KINDS
from support.tiny_adapters import adapter
from support.tiny_models import make, save_pair, tuned_copy

from hf_taskvec import TaskVector
from hf_taskvec.algebra.provenance import License, ModelRecord, Origin, Provenance
from hf_taskvec.algebra.sums import Term
from hf_taskvec.filenames import VECTOR_RECORD
from hf_taskvec.files.vector_schema import checksum
from hf_taskvec.publishing.model_card import card_for
from hf_taskvec.publishing.written_folder import open_artifact

_MODEL = ModelRecord(
    "me/base", "0123abcd" * 5, "LlamaForCausalLM", "f" * 64, (("model.safetensors", "a" * 64),),
    License(("other",), "a licence", "LICENSE"), ("me/stories",), "0123456789abcdef",
)  # fmt: skip
_PROVENANCE = Provenance(
    (("v", 0.5), ("combine([v, w], 'ties')", -1.0)),
    (Origin("v", "full fine-tune", _MODEL, ModelRecord("tuned")), Origin("w", "given")),
    (("ties", "https://arxiv.org/abs/2306.01708"),),
)


_LARGE = 1_000_000


def values(vector: TaskVector) -> dict[str, Any]:
    """All that a vector tells, its numbers in fp64."""
    # Of what is large by its own account, the shape alone: as a tensor it takes as much memory as it says.
    tensors = {
        name: list(shape) if math.prod(shape := vector.shape(name)) > _LARGE else vector.dense(name, torch.float64)
        for name in vector
    }
    return {"tensors": tensors, "provenance": vector.provenance.to_json(), "discarded": dict(vector.discarded)}


# A saved vector.


def make_saved(folder: Path) -> None:
    kinds = (
        "difference",
        "high and sparse low",
        "low rank",
        "transposed low rank",
        "DoRA of Conv1D",
        "scattered rows",
        "a range of rows",
    )
    terms = {kind: [Term(0.5, KINDS[kind](torch.Generator().manual_seed(0))[0])] for kind in kinds}
    TaskVector(terms, _PROVENANCE, {"low rank": 0.25}).save(folder)


def read_saved(folder: Path) -> Any:
    return values(TaskVector.load(folder))


def sealed(document: Any) -> Any:
    """With its checksum made right, as one who means harm would."""
    if not isinstance(document, dict) or "checksum" not in document:
        return document
    try:
        return {**document, "checksum": checksum(json.loads(_plain(document)))}
    except (ValueError, RecursionError, UnicodeEncodeError, TypeError, AttributeError):
        return document


def _plain(document: Any) -> str:
    from fuzzing.mutations import to_json

    return to_json(document)


def expected_saved(document: Any, folder: Path) -> Any:
    if isinstance(document, bytes):
        raise MeaninglessError("the checksum is that of other bytes")
    stored = load_file(folder / "taskvec.safetensors")
    return _interpreted(_reread(document), stored)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise MeaninglessError("a key stands twice")
    return dict(pairs)


def _reread(document: Any) -> Any:
    """The document as a reader of its text sees it; no key may stand twice in an object."""

    try:
        found = json.loads(_plain(document), object_pairs_hook=_unique)
        text = json.dumps(found, ensure_ascii=False)
        text.encode()  # no halves of characters
        if "[" * 101 in text or '{"a": ' * 101 in text:
            raise MeaninglessError("nested too deeply")
        return found
    except (ValueError, RecursionError) as error:
        raise MeaninglessError(f"no JSON: {error}") from None


def _interpreted(document: Any, stored: dict[str, torch.Tensor]) -> Any:
    try:
        tensors = {
            name: sum((_number(term["weight"]) * _dense(term, stored) for term in terms), torch.tensor(0.0).double())
            for name, terms in _typed(document["parameters"], dict).items()
            if any(_number(term["weight"]) for term in terms)  # what is not changed is no part of a vector
        }
        discarded = dict(document.get("discarded") or {})
        assert all(_number(share) == float(share) for share in discarded.values())
        tensors = {name: list(each.shape) if each.numel() > _LARGE else each for name, each in tensors.items()}
        return {"tensors": tensors, "provenance": _provenance(document["provenance"]), "discarded": discarded}
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise MeaninglessError(f"{type(error).__name__}: {error}"[:200]) from None


def _provenance(given: Any) -> Any:
    """What is said of origins, where each thing is of its type and nothing is there that nobody knows."""
    weights = [[_typed(atom, str), _number(weight)] for atom, weight in _typed(_typed(given, dict)["weights"], list)]
    origins = [
        {
            **{key: _typed(origin[key], str) for key in ("label", "how")},
            **{side: _model(origin[side]) for side in ("base", "tuned") if side in origin},
        }
        for origin in _typed(given["origins"], list)
    ]
    rules = {rule: _typed(paper, str) for rule, paper in _typed(given.get("rules", {}), dict).items()}
    expression = Provenance(tuple((atom, weight) for atom, weight in weights)).expression
    return {"expression": expression, "weights": weights, "origins": origins, **({"rules": rules} if rules else {})}


def _model(given: Any) -> Any:
    found: dict[str, Any] = {"name": _typed(given["name"], str)}
    for key in ("revision", "architecture", "fingerprint", "tokenizer", "sha256"):
        if given.get(key) is not None:
            found[key] = _typed(given[key], str)
    if "files" in given:
        found["files"] = {name: _typed(digest, str) for name, digest in _typed(given["files"], dict).items()}
    if "license" in given:
        found["license"] = {"ids": [_typed(each, str) for each in _typed(given["license"]["ids"], list)]}
        found["license"] |= {k: _typed(given["license"][k], str) for k in ("name", "link") if given["license"].get(k)}
    if "datasets" in given:
        found["datasets"] = [_typed(each, str) for each in _typed(given["datasets"], list)]
    return {key: value for key, value in found.items() if value}


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise MeaninglessError(f"{str(value)[:50]!r} is no {kind.__name__}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise MeaninglessError(f"{str(value)[:50]!r} is no finite number")
    return float(value)


def _integral(value: Any) -> int:
    """A whole number as JSON has it, where 1.0 is 1."""
    if _number(value) != int(value):
        raise MeaninglessError(f"{value} is not whole")
    return int(value)


def _optional(value: Any) -> str | None:
    return None if value is None else _typed(value, str)


def _whole(value: Any) -> int:
    return _typed(value, int)


def _tensor(entry: Any, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(entry, str):
        if not stored[entry].is_floating_point():
            raise MeaninglessError("positions are no weights")
        return stored[entry].double()
    if "sparse" in entry:
        return _sparse(entry, stored)
    if "transposed" in entry:
        return _tensor(entry["transposed"], stored).T
    rows = entry["rows"]
    index = list(range(*map(_whole, rows))) if entry["range"] else list(map(_whole, rows))
    return _tensor(entry["of"], stored)[index]


def _sparse(entry: Any, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    counts, offsets, values = (stored[_typed(entry[key], str)] for key in ("counts", "offsets", "values"))
    shape = [_whole(size) for size in _typed(entry["sparse"], list)]
    size, blocks = math.prod(shape), -(-math.prod(shape) // 65536)
    if not shape or min(shape) < 0 or counts.shape != (blocks,) or offsets.shape != values.shape or values.ndim != 1:
        raise MeaninglessError("no such tensor")
    if [counts.dtype, offsets.dtype] != [torch.int32, torch.uint16] or not values.is_floating_point():
        raise MeaninglessError("no counts, offsets and values")
    first = [65536 * block for block, count in enumerate(counts.tolist()) for _ in range(count)]
    if len(first) != len(values) or (counts < 0).any():
        raise MeaninglessError("counts of something else")
    places = [start + offset for start, offset in zip(first, offsets.tolist(), strict=True)]
    if places != sorted(set(places)) or (places and places[-1] >= size):
        raise MeaninglessError("positions that are not there")
    whole = torch.zeros(size, dtype=torch.float64)
    whole[places] = values.double()
    return whole.view(shape)


def _dense(term: Any, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    kind = term["kind"]
    if kind == "dense":
        return torch.stack([_tensor(part, stored) for part in _typed(term["parts"], list)]).sum(0)
    if kind == "difference":
        return _tensor(term["tuned"], stored) - _tensor(term["base"], stored)
    if kind == "low-rank":
        return _number(term["scaling"]) * _tensor(term["left"], stored) @ _tensor(term["right"], stored)
    if kind == "rows":
        inner, rows = _dense(term["change"], stored), term["rows"]
        index = list(range(_whole(rows["start"]), _whole(rows["stop"]))) if isinstance(rows, dict) else rows
        whole = torch.zeros(_whole(term["of"]), *inner.shape[1:], dtype=torch.float64)
        if len(index) != len(inner) or not all(type(row) is int and 0 <= row < len(whole) for row in index):
            raise MeaninglessError("rows that are not there")
        return whole.index_add(0, torch.tensor(index, dtype=torch.int64), inner)
    if kind == "dora":
        base, axis = _tensor(term["base"], stored), _whole(term["axis"])
        if axis not in (0, 1):
            raise MeaninglessError("no axis of a matrix")
        direction = base + _dense(term["low_rank"], stored)
        gain = _tensor(term["magnitude"], stored).flatten() / direction.norm(dim=1 - axis)
        return direction * (gain[:, None] if axis == 0 else gain) - base
    raise MeaninglessError(f"kind {kind!r}")


# A vector saved as a reference.


def make_reference(folder: Path) -> None:
    base = make("llama", num_hidden_layers=1, vocab_size=8, intermediate_size=8)
    pair = save_pair(folder / "models", base, tuned_copy(base))
    vector = TaskVector.from_finetuned(pair.base, pair.tuned)
    vector.save(folder / "vector", reference=True)


def read_reference(folder: Path) -> Any:
    return values(TaskVector.load(folder / "vector"))


def expected_reference(document: Any, folder: Path) -> Any:
    if isinstance(document, bytes):
        raise MeaninglessError("the checksum is that of other bytes")
    document = _reread(document)
    try:
        files = [
            load_file(Path(home["where"]) / "model.safetensors")
            for home in document["checkpoints"]
            if home["revision"] is None or _typed(home["revision"], str)
        ]
        stored = {key: files[_whole(entry["checkpoint"])][entry["name"]] for key, entry in document["tensors"].items()}
    except (LookupError, TypeError, AttributeError, OSError, ValueError) as error:
        raise MeaninglessError(str(error)[:100]) from None
    return _interpreted(document, stored)


# What the record of a written folder tells.


def make_model_record(folder: Path) -> None:
    base = make("llama", num_hidden_layers=1, vocab_size=8, intermediate_size=8)
    pair = save_pair(folder / "models", base, tuned_copy(base))
    pair.vector().apply(pair.base, folder / "out", scale=-0.5)


def make_adapter_record(folder: Path) -> None:
    pair_of = make("llama", num_hidden_layers=1, vocab_size=8, intermediate_size=8)
    pair_of.save_pretrained(folder / "base")
    made = adapter(folder / "base", folder / "adapter", target_modules=["q_proj"])
    made.vector().to_adapter(folder / "out", base=folder / "base", scale=-0.5)


def artifact(folder: Path) -> Any:
    """All that is known of a written folder; its card can be written as well."""
    found = open_artifact(folder)
    assert card_for(found, repo_id="me/model")
    fields = {key: value for key, value in vars(found).items() if key not in ("folder", "provenance", "base")}
    base = found.base.to_json() if found.base else None
    return {**fields, "options": dict(found.options), "provenance": found.provenance.to_json(), "base": base}


def expected_artifact(document: Any, folder: Path) -> Any:
    if isinstance(document, bytes):
        document = _loaded(document)
    document = _reread(document)
    try:
        is_vector = "parameters" in document
        told = _provenance(document["provenance" if is_vector else "vector"])
        bases = {json.dumps(origin["base"], sort_keys=True) for origin in told["origins"] if "base" in origin}
        own = json.loads(bases.pop()) if len(bases) == 1 else None
        base = _model(document["base"]) if "base" in document else own
        if not is_vector and base is None:
            named = json.loads((folder / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
            base = {"name": Path(named).name} if named else None
        return {
            "kind": "vector" if is_vector else "model" if "base" in document else "adapter",
            "provenance": told,
            "base": base,
            "scale": 1.0 if is_vector else _number(document["scale"]),
            "fingerprint": None if is_vector else _optional(document["fingerprint"]),
            "changed": len(document["parameters"]) if is_vector else _integral(document["changed_parameters"]),
            "library": _typed(document["library"], str).removeprefix("hf_taskvec "),
            "options": {} if is_vector else {key: _typed(each, str) for key, each in document["options"].items()},
            "local_references": (),
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


def _loaded(content: bytes) -> Any:
    try:
        return json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise MeaninglessError(str(error)[:100]) from None


def expected_named_base(document: Any, folder: Path) -> Any:
    """As the record tells, but for the base, which is the one that the config names."""
    config = _reread(_loaded(document) if isinstance(document, bytes) else document)
    found = expected_artifact(json.loads((folder / "out" / "taskvec_adapter.json").read_text()), folder)
    named = _typed(config, dict).get("base_model_name_or_path")
    if named is None or named == "" or named == (found["base"] or {}).get("name"):
        return found
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", _typed(named, str)) and not Path(named).is_dir()
    # What cannot be seen is shown by an escape, as Python's own.
    shown = (
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in (named if is_id else Path(named).name)
    )
    name = "".join(shown)
    return {**found, "base": {"name": name}} if name else AnyOf(({**found, "base": None}, {**found, "base": {}}))


# An adapter.


def make_adapter(folder: Path) -> None:
    model = make("llama", num_hidden_layers=1, vocab_size=8, intermediate_size=8)
    model.save_pretrained(folder / "base")
    adapter(folder / "base", folder, target_modules=["q_proj", "up_proj"], alpha_pattern={"up_proj": 3}, lora_alpha=6)


def make_adapter_alone(folder: Path) -> None:
    """The base has a config but no weights, as one on the Hub of which only the config was asked for."""
    make_adapter(folder)
    (folder / "base" / "model.safetensors").unlink()


def read_adapter_alone(folder: Path) -> Any:
    vector = TaskVector.from_adapter(folder, base=folder / "base")
    return {name: vector.dense(name, dtype=torch.float64) for name in vector}


def read_adapter(folder: Path) -> Any:
    vector = TaskVector.from_adapter(folder)
    return {name: vector.dense(name, dtype=torch.float64) for name in vector}


def expected_adapter(document: Any, folder: Path) -> Any:
    """LoRA by its definition: (alpha / r) B A, where the config and the tensors are such as PEFT writes."""
    config = _reread(_loaded(document) if isinstance(document, bytes) else document)
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
        return _lora(config, tensors)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


def expected_adapter_tensors(document: Any, folder: Path) -> Any:
    try:
        tensors = load_safetensors((folder / "adapter_model.safetensors").read_bytes())
        return _lora(json.loads((folder / "adapter_config.json").read_text()), tensors)
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


@cache
def _pattern_key() -> Any:
    from peft.utils.other import get_pattern_key

    return get_pattern_key


def _lora(config: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if config["peft_type"] != "LORA":
        raise MeaninglessError("no LoRA")
    rslora = _typed(config.get("use_rslora", False), bool)
    patterns = config.get("alpha_pattern") or {}
    found = {}
    for key, down in tensors.items():
        module, mark, _ = key.removeprefix("base_model.model.").partition(".lora_A")
        if not mark:
            continue
        up = tensors[key.replace("lora_A", "lora_B")]
        alpha = _number(patterns.get(_pattern_key()(list(patterns), module), config.get("lora_alpha", 8)))
        rank = down.shape[0]
        found[f"{module}.weight"] = alpha / (math.sqrt(rank) if rslora else rank) * up.double() @ down.double()
    return found


_LOAD = ("hf_taskvec.json_files:parse_json", "hf_taskvec.json_files:read_json", "hf_taskvec.files.load_vector:load")
_FILE = "hf_taskvec.models.tensor_files:TensorFile.__init__"
_SHOW = "hf_taskvec.publishing.written_folder:open_artifact"

TARGETS = [
    Target("saved vector", _LOAD, VECTOR_RECORD, Json(), make_saved, read_saved, expected_saved, sealed, share=3),
    Target(
        "saved vector's tensors",
        (_FILE,),
        "taskvec.safetensors",
        SafetensorsHeader(),
        make_saved,
        read_saved,
        by_bytes=0.5,
    ),
    Target(
        "vector saved as a reference",
        _LOAD,
        f"vector/{VECTOR_RECORD}",
        Json(),
        make_reference,
        read_reference,
        expected_reference,
        sealed,
    ),
    Target("record of a vector", (_SHOW,), VECTOR_RECORD, Json(), make_saved, artifact, expected_artifact, sealed),
    Target(
        "record of a model",
        (_SHOW,),
        "out/taskvec_apply.json",
        Json(),
        make_model_record,
        lambda folder: artifact(folder / "out"),
        expected_artifact,
        share=0.4,
    ),
    Target(
        "record of an adapter",
        (_SHOW,),
        "out/taskvec_adapter.json",
        Json(),
        make_adapter_record,
        lambda folder: artifact(folder / "out"),
        expected_artifact,
        share=0.4,
    ),
    Target(
        "adapter config",
        ("hf_taskvec.extraction.adapter_files:stored_adapter",),
        "adapter_config.json",
        Json(),
        make_adapter,
        read_adapter,
        expected_adapter,
    ),
    Target(
        "config of an adapter's own base",
        ("hf_taskvec.extraction.adapter_files:base_of",),
        "base/config.json",
        Json(),
        make_adapter_alone,
        read_adapter_alone,
        share=0.2,
    ),
    Target(
        "adapter config of a written adapter",
        ("hf_taskvec.publishing.written_folder:_read",),
        "out/adapter_config.json",
        Json(),
        make_adapter_record,
        lambda folder: artifact(folder / "out"),
        expected_named_base,
        share=0.4,
    ),
    Target(
        "adapter's tensors",
        (_FILE,),
        "adapter_model.safetensors",
        SafetensorsHeader(),
        make_adapter,
        read_adapter,
        expected_adapter_tensors,
        by_bytes=0.5,
    ),
]
