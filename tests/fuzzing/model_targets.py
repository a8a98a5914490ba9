"""Models that others made: configs, indices, weights, tokenizers and cards."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from fuzzing.formats import Bytes, FrontMatter, Json, SafetensorsHeader, TorchFile, plain_yaml
from fuzzing.runner import AnyOf, MeaninglessError, Target
from fuzzing.vector_targets import _loaded, _reread
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from support.tiny_books import make_tokenizer
from support.tiny_models import make, save_pair, tuned_copy

from hf_taskvec import TaskVector
from hf_taskvec.errors import CorruptFileError
from hf_taskvec.filenames import CARD_DIGEST, MODEL_RECORD, TRAINING_RECORD
from hf_taskvec.files.foreign_files import check_nothing_foreign, write_card_file
from hf_taskvec.json_files import json_digest
from hf_taskvec.models.card_metadata import stated
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.companions import companions
from hf_taskvec.models.layout import Layout, layout_of_model
from hf_taskvec.models.layout_cache import read_entry, write_entry
from hf_taskvec.models.lineage import stated_origin
from hf_taskvec.models.tokenizer_digest import vocabulary_digest
from hf_taskvec.training.trained_model import open_base
from hf_taskvec.typed_values import typed


def _small(kind: str = "llama") -> Any:
    return make(kind, num_hidden_layers=1, vocab_size=8, intermediate_size=8)


def make_pair(folder: Path) -> None:
    base = _small()
    save_pair(folder, base, tuned_copy(base))


def read_pair(folder: Path) -> Any:
    vector = TaskVector.from_finetuned(folder / "base", folder / "tuned")
    return {name: vector.dense(name, dtype=torch.float64) for name in vector}


def make_sharded(folder: Path) -> None:
    _small().save_pretrained(folder, max_shard_size="1KB")


def make_model(folder: Path) -> None:
    _small().save_pretrained(folder)


def make_bin(folder: Path) -> None:
    model = _small()
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def read_model(folder: Path) -> Any:
    return {name: source.read().clone() for name, source in open_checkpoint(folder).tensors.items()}


def expected_model(document: Any, folder: Path) -> Any:
    """What safetensors itself reads: a file without checksums is what its header says, if that can be."""
    try:
        return load_safetensors((folder / "model.safetensors").read_bytes())
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


def expected_bin(document: Any, folder: Path) -> Any:
    """What torch itself loads, if it is tensors that the file really holds."""
    path = folder / "pytorch_model.bin"
    try:
        try:
            found = torch.load(path, weights_only=True, mmap=True)
        except RuntimeError:
            found = torch.load(path, weights_only=True)
        if not all(tensor.is_floating_point() and tensor.layout == torch.strided for tensor in found.values()):
            raise MeaninglessError("no weights")
        if any(tensor.nbytes > path.stat().st_size for tensor in found.values()):
            raise MeaninglessError("more than the file holds")
        return {name: tensor.detach().clone() for name, tensor in found.items()}
    except Exception as error:
        raise MeaninglessError(f"{type(error).__name__}: {error}"[:100]) from None


# The code that a config names, and what of an output is ours.


def make_code(folder: Path) -> None:
    names = {
        "AutoConfig": "configuration_x.XConfig",
        "AutoModel": "modeling_x.X",
        "AutoTokenizer": [None, "other--y.Z"],
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": names, "hidden_size": 3}))
    for module in ("configuration_x", "modeling_x", "secret"):
        (folder / f"{module}.py").write_text("from .configuration_x import XConfig\n")


def read_code(folder: Path) -> Any:
    return sorted(path.relative_to(folder).as_posix() for path in companions(folder))


def expected_code(document: Any, folder: Path) -> Any:
    """The files of the modules that stand before a point in some text of the `auto_map`, and what they import."""
    config = _reread(_loaded(document) if isinstance(document, bytes) else document)
    if not isinstance(config, dict):
        raise MeaninglessError("no object")
    left, texts = [config.get("auto_map")], []
    while left:
        each = left.pop()
        left += each.values() if isinstance(each, dict) else each if isinstance(each, list) else []
        texts += [each] if isinstance(each, str) else []
    modules = {text.rpartition(".")[0] for text in texts if "--" not in text.rpartition(".")[0]}
    files = {f"{module}.py" for module in modules if module}
    if any("/" in file or file.startswith(".") for file in files):
        raise MeaninglessError("a module outside the folder")
    files = {file for file in files if len(file) < 200 and "\0" not in file and (folder / file).is_file()}
    return sorted({"config.json", *files, *(["configuration_x.py"] if files else [])})


def make_output(folder: Path) -> None:
    base = _small()
    pair = save_pair(folder / "models", base, tuned_copy(base))
    pair.vector().apply(pair.base, folder / "out", max_shard_size="1KB")
    write_card_file(folder / "out", "# A card")


def read_output(folder: Path) -> Any:
    check_nothing_foreign(folder / "out", MODEL_RECORD)
    return {"foreign": None}


def read_training_base(folder: Path) -> Any:
    base = open_base(folder)
    return {name: source.read().clone() for name, source in base.weights.tensors.items()}


# Whether a model says that it was made from another.


def make_lineage(folder: Path) -> None:
    make_pair(folder)
    (folder / "tuned" / TRAINING_RECORD).write_text(json.dumps({"base": {"name": "base", "fingerprint": "0" * 64}}))
    (folder / "tuned" / "README.md").write_text("---\nbase_model: me/other\ntags: [x]\n---\n# A model\n")


def read_lineage(folder: Path) -> Any:
    return {"said by": str(stated_origin(open_checkpoint(folder / "tuned"), open_checkpoint(folder / "base")))}


# Tokenizers: which token is which number.


def make_tokenizer_folder(folder: Path) -> None:
    make_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = dict(list(content["model"]["vocab"].items())[:20])
    content["model"]["merges"] = content["model"]["merges"][:5]
    path.write_text(json.dumps(content))


def make_vocabulary(folder: Path) -> None:
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "é": 2}))


def make_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(bytes(range(100)))


def expected_sentencepiece(document: Any, folder: Path) -> Any:
    return {"digest": f"sentencepiece:{hashlib.sha256(document).hexdigest()[:16]}"}


def read_digest(folder: Path) -> Any:
    return {"digest": vocabulary_digest(folder)}


def expected_digest(document: Any, folder: Path) -> Any:
    """Nothing is known of a vocabulary that is not one; else its digest is that of its content alone."""
    try:
        document = _reread(_loaded(document) if isinstance(document, bytes) else document)
        vocabulary = document if (folder / "vocab.json").exists() else document["model"]["vocab"]
        numbered = isinstance(vocabulary, dict) and all(type(number) is int for number in vocabulary.values())
        if not numbered and (vocabulary is document or not _is_unigram(vocabulary)):  # a file holds one object
            return {"digest": None}
        text = json.dumps(vocabulary, sort_keys=True, ensure_ascii=False).encode()
    except (MeaninglessError, LookupError, TypeError, ValueError, AttributeError):
        return {"digest": None}
    return {"digest": hashlib.sha256(text).hexdigest()[:16]}


def _is_unigram(vocabulary: Any) -> bool:
    return isinstance(vocabulary, list) and all(
        isinstance(each, list) and len(each) == 2 and type(each[0]) is str and type(each[1]) in (int, float)
        for each in vocabulary
    )


# Cards.

_CARD = {
    "license": "other",
    "license_name": "ours",
    "license_link": "LICENSE",
    "datasets": ["me/a", "b"],
    "tags": ["x"],
}


def make_card(folder: Path) -> None:
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(_CARD)}---\n# A model\n")


def read_card(folder: Path) -> Any:
    license, datasets = stated(folder)
    return {"license": license.to_json() if license else None, "datasets": list(datasets)}


def expected_card(document: Any, folder: Path) -> Any:
    """Only texts are believed; a card that cannot be read states nothing."""
    nothing = {"license": None, "datasets": []}
    try:
        text = (folder / "README.md").read_bytes().decode()
        lines = text.removeprefix("\ufeff").splitlines()
        if not lines or lines[0].rstrip(" \t") != "---":
            return nothing
        end = next(n for n, line in enumerate(lines[1:], 1) if line.rstrip(" \t") == "---")
        found = plain_yaml("\n".join(lines[1:end]))
    except (StopIteration, ValueError, yaml.YAMLError, RecursionError):
        return nothing
    if not isinstance(found, dict):
        return nothing
    license = {"ids": _texts(found, "license")}
    for key in ("name", "link"):
        if texts := _texts(found, f"license_{key}"):
            license[key] = texts[0]
    datasets = [each for each in _texts(found, "datasets") if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", each)]
    return AnyOf((nothing, {"license": license if license["ids"] else None, "datasets": datasets}))


def _texts(found: dict[str, Any], key: str) -> list[Any]:
    value = found.get(key)
    texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    return [each for each in texts if 0 < len(each) <= 300 and each.isprintable()]


_LINEAGE = "hf_taskvec.models.lineage"
_FOREIGN = "hf_taskvec.files.foreign_files"
_COMPANIONS = "hf_taskvec.models.companions"
_DIGEST = "hf_taskvec.models.tokenizer_digest"
_CHECKPOINT = "hf_taskvec.models.checkpoint:open_checkpoint"
_FILE = "hf_taskvec.models.tensor_files:TensorFile.__init__"


@dataclass(frozen=True)
class _KeptLayout:
    """The types of a layout that is kept."""

    architecture: str
    body: str | None
    shapes: dict[str, tuple[int, ...]]
    constants: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    optional: tuple[str, ...]
    head: tuple[str, ...]
    conv1d: tuple[str, ...]
    embeddings: tuple[str, ...]
    offset: tuple[str, ...]
    vocabulary: tuple[str, ...]
    renamed: dict[str, str]
    restructured: dict[str, tuple[int, ...]]
    restructured_stored: tuple[str, ...]
    parts: dict[str, tuple[tuple[str, tuple[int, ...], tuple[int, ...], int, int, int], ...]]
    bare: dict[str, tuple[int, ...]]
    bare_transposed: tuple[str, ...]
    ignored: tuple[str, ...]
    prefix: str


def make_kept(folder: Path) -> None:
    write_entry(folder / "entry.json", layout_of_model(_small("gpt2")).to_json())


def read_kept(folder: Path) -> Any:
    (folder / "entry.json").chmod(0o600)  # as it is written
    found = read_entry(folder / "entry.json")
    if found is None:
        raise CorruptFileError("it is found out anew")
    return Layout.from_json(found).to_json()


def seal_kept(document: Any) -> Any:
    """The checksum of what the entry says now."""
    if isinstance(document, dict) and "layout" in document:
        with suppress(ValueError, TypeError, RecursionError):
            return {**document, "key": "entry", "digest": json_digest(document["layout"])}
    return document


def expected_kept(document: Any, folder: Path) -> Any:
    """What it says, of the types of a layout, if its checksum is right."""
    entry = _reread(_loaded(document) if isinstance(document, bytes) else document)
    layout = entry.get("layout") if isinstance(entry, dict) else None
    if layout is None or (entry.get("key"), entry.get("digest")) != ("entry", json_digest(layout)):
        raise MeaninglessError("another entry")
    try:
        said = vars(typed(_KeptLayout, layout))
    except CorruptFileError as error:
        raise MeaninglessError(str(error)) from None
    sets = ("optional", "head", "conv1d", "embeddings", "offset", "vocabulary")
    sets += ("restructured_stored", "bare_transposed")
    return {**said, **{name: sorted(set(said[name])) for name in sets}}


TARGETS = [
    Target(
        "kept layout",
        ("hf_taskvec.models.layout_cache:read_entry", "hf_taskvec.models.layout_cache:_own_text"),
        "entry.json",
        Json(),
        make_kept,
        read_kept,
        expected_kept,
        seal_kept,
    ),
    Target(
        "model config",
        (_CHECKPOINT,),
        "tuned/config.json",
        Json(),
        make_pair,
        read_pair,
        share=0.3,
    ),
    Target(
        "config of a model to train",
        ("hf_taskvec.training.trained_model:open_base",),
        "config.json",
        Json(),
        make_model,
        read_training_base,
        share=0.2,
    ),
    Target(
        "index of shards",
        ("hf_taskvec.models.tensor_files:open_shards",),
        "model.safetensors.index.json",
        Json(),
        make_sharded,
        read_model,
    ),
    Target(
        "model weights",
        (_FILE,),
        "model.safetensors",
        SafetensorsHeader(),
        make_model,
        read_model,
        expected_model,
        by_bytes=0.5,
    ),
    Target(
        "model weights of torch",
        ("hf_taskvec.models.tensor_files:_load_bin", "hf_taskvec.models.tensor_files:_check_uncompressed"),
        "pytorch_model.bin",
        TorchFile(),
        make_bin,
        read_model,
        expected_bin,
        by_bytes=0.5,
    ),
    Target(
        "code that a config names",
        (f"{_COMPANIONS}:_modules_named",),
        "config.json",
        Json(),
        make_code,
        read_code,
        expected_code,
    ),
    Target(
        "index of an output",
        (f"{_FOREIGN}:_indexed",),
        "out/model.safetensors.index.json",
        Json(),
        make_output,
        read_output,
        share=0.5,
    ),
    Target(
        "card of an output",
        (f"{_FOREIGN}:_is_own_card", f"{_FOREIGN}:_digest"),
        "out/README.md",
        Bytes(),
        make_output,
        read_output,
        share=0.1,
    ),
    Target(
        "digest of a card",
        (f"{_FOREIGN}:_is_own_card",),
        f"out/{CARD_DIGEST}",
        Bytes(),
        make_output,
        read_output,
        share=0.1,
    ),
    Target(
        "record of where a model comes from",
        (f"{_LINEAGE}:_record",),
        f"tuned/{TRAINING_RECORD}",
        Json(),
        make_lineage,
        read_lineage,
        share=0.2,
    ),
    Target(
        "card that tells where a model comes from",
        (f"{_LINEAGE}:_named_on_card",),
        "tuned/README.md",
        FrontMatter(),
        make_lineage,
        read_lineage,
        share=0.2,
    ),
    Target(
        "tokenizer",
        (f"{_DIGEST}:_of_fast",),
        "tokenizer.json",
        Json(),
        make_tokenizer_folder,
        read_digest,
        expected_digest,
    ),
    Target("vocabulary", (f"{_DIGEST}:_of_slow",), "vocab.json", Json(), make_vocabulary, read_digest, expected_digest),
    Target(
        "SentencePiece model",
        (f"{_DIGEST}:_of_sentencepiece",),
        "tokenizer.model",
        Bytes(),
        make_sentencepiece,
        read_digest,
        expected_sentencepiece,
        share=0.1,
    ),
    Target(
        "model card",
        (
            "hf_taskvec.models.card_metadata:stated",
            "hf_taskvec.models.card_metadata:front_matter",
            "hf_taskvec.yaml_files:parse_yaml",
        ),
        "README.md",
        FrontMatter(),
        make_card,
        read_card,
        expected_card,
    ),
]
