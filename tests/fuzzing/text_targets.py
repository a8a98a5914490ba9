"""What people write, and what is read on the way out: settings, books, records of commands, configs that are pushed."""

from __future__ import annotations

import json
import typing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from fuzzing.formats import Bytes, FrontMatter, Json, Yaml, plain_yaml
from fuzzing.run_targets import conforming
from fuzzing.runner import AnyOf, MeaninglessError, Target
from fuzzing.vector_targets import _loaded, _reread, _typed, make_adapter, make_saved
from support.tiny_books import STORY

from hf_taskvec.analysis.report_sections import read_rows
from hf_taskvec.application.to_adapter import _known, _located
from hf_taskvec.cli import command_record
from hf_taskvec.evaluation import load_book
from hf_taskvec.experiments.config_options import read_config
from hf_taskvec.experiments.multitask.multitask_config import MultitaskConfig
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig
from hf_taskvec.experiments.unlearning.unlearn_inputs import _adapter_content
from hf_taskvec.filenames import COMMAND_RECORD
from hf_taskvec.hub_names import is_folder, may_be_hub_id
from hf_taskvec.integrations import read_mergekit_config
from hf_taskvec.publishing.model_card import _command, card_for
from hf_taskvec.publishing.pushed_files import _without_paths, files_to_push
from hf_taskvec.publishing.written_folder import open_artifact

# Settings of recipes.

_UNLEARN = {
    "base_model": "me/model", "books": ["forget=one.txt", "retain=two.txt"], "method": "lora", "lora_rank": 8,
    "lora_targets": ["q_proj"], "learning_rate": 1e-4, "scales": [0, -0.5, -1], "epochs": 2, "retrain": True,
    "block_stride": 64, "margin": 0.03, "seed": 3, "protocol": "taskvec-v1", "samples": 20,
}  # fmt: skip
_MULTITASK = {"tasks": 3, "final": ["ties"], "rule_options": ["ties.density=0.3"], "seed": 1, "words": 4000}


def make_unlearn(folder: Path) -> None:
    (folder / "ours.yaml").write_text(yaml.safe_dump(_UNLEARN))


def make_multitask(folder: Path) -> None:
    (folder / "ours.yaml").write_text(yaml.safe_dump(_MULTITASK))


def read_settings(kind: type) -> Any:
    def read(folder: Path) -> Any:
        found = kind(**read_config(kind, str(folder / "ours.yaml"), folder))
        return json.loads(json.dumps(asdict(found), allow_nan=False))

    return read


def expected_settings(kind: type) -> Any:
    """Each setting as it stands in the file, where it is of its type (YAML takes 1e-4 for a text)."""

    def expected(document: Any, folder: Path) -> Any:
        try:
            found = plain_yaml((folder / "ours.yaml").read_bytes().decode()) or {}
            hints = typing.get_type_hints(kind)
            given = {str(key).replace("-", "_"): value for key, value in _typed(found, dict).items()}
            if len(given) != len(found):
                raise MeaninglessError("a key stands twice")
            checked = {key: _setting(hints[key], value, key) for key, value in given.items()}
            return json.loads(json.dumps(asdict(kind(**checked))))
        except (yaml.YAMLError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise MeaninglessError(str(error)[:100]) from None

    return expected


def _setting(kind: Any, value: Any, where: str) -> Any:
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return [_setting(inner[0], each, where) for each in _typed(value, list)]
    if inner and type(None) in inner:
        return None if value is None else _setting(inner[0], value, where)
    if kind in (int, float) and isinstance(value, str):
        value = kind(value)
    return conforming(kind, value, where)


# A YAML of mergekit.

_MERGE = {
    "slices": [
        {
            "sources": [
                {"model": "me/a+me/lora", "layer_range": [0, 8], "parameters": {"weight": [0, 0.5, 1]}},
                {"model": "me/base", "layer_range": [0, 8]},
            ],
            "parameters": {"density": [{"filter": "mlp", "value": [0.5, 1]}, {"value": 0.3}]},
        }
    ],
    "merge_method": "ties", "base_model": "me/base", "parameters": {"normalize": True, "lambda": 0.9},
    "dtype": "bfloat16", "tokenizer_source": "base",
}  # fmt: skip


def make_merge(folder: Path) -> None:
    (folder / "merge.yaml").write_text(yaml.safe_dump(_MERGE))


def read_merge(folder: Path) -> Any:
    found = read_mergekit_config(folder / "merge.yaml")
    found.kind  # noqa: B018 (looked up)
    return json.loads(json.dumps({**asdict(found), "models": found.models}, allow_nan=False))


def expected_merge(document: Any, folder: Path) -> Any:
    """What stands there, with what may be left out."""

    def source(given: Any) -> Any:
        layers = given.get("layer_range")
        return {"model": given["model"].strip(), "layers": layers, "parameters": given.get("parameters") or {}}

    try:
        found = plain_yaml((folder / "merge.yaml").read_bytes().decode())
        given = found["slices"] if found.get("slices") else [{"sources": found["models"]}]
        slices = [
            {"sources": [source(one) for one in each["sources"]], "parameters": each.get("parameters") or {}}
            for each in given
        ]
        texts = {key: found[key].strip() for key in ("base_model", "tokenizer_source") if found.get(key) is not None}
        dtype = found.get("dtype") if found.get("out_dtype") is None else found["out_dtype"]
        base = texts.get("base_model")
        models = [*([base] if base else []), *(one["model"] for each in slices for one in each["sources"])]
        expected = {
            "method": found["merge_method"].strip(),
            "slices": slices,
            "base_model": base,
            "parameters": found.get("parameters") or {},
            "dtype": None if dtype is None else dtype.strip(),
            "tokenizer_source": texts.get("tokenizer_source"),
            "models": list(dict.fromkeys(models)),
        }
        return json.loads(json.dumps(expected, allow_nan=False))
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise MeaninglessError(str(error)[:100]) from None


# The commands that wrote a folder.


def make_commands(folder: Path) -> None:
    commands = [["taskvec", "extract", "me/base", "me/tuned", "-o", "out"], ["taskvec", "card", "out"]]
    (folder / COMMAND_RECORD).write_text(json.dumps({"hf_taskvec": "0.1.0", "commands": commands}))


def read_commands(folder: Path) -> Any:
    before, command_record.running.arguments = command_record.running.arguments, ["show", "out"]
    try:
        shown = _command(folder)
        command_record.record_command(folder)
    finally:
        command_record.running.arguments = before
    return {"shown": shown, "stored": json.loads((folder / COMMAND_RECORD).read_text("utf-8"))["commands"]}


def expected_commands(document: Any, folder: Path) -> Any:
    """Commands that are lists of texts are kept and shown; of any other record nothing is."""
    import shlex

    new = ["taskvec", "show", "out"]
    try:
        document = _reread(_loaded(document) if isinstance(document, bytes) else document)
        commands = [[_typed(word, str) for word in _typed(each, list)] for each in _typed(document["commands"], list)]
        "".join(word for each in commands for word in each).encode()
    except (MeaninglessError, LookupError, TypeError, UnicodeEncodeError):
        return {"shown": None, "stored": [new]}
    shown = "\n".join(map(shlex.join, commands))
    is_private = any(root in shown for root in ("/etc", "~/", "/work", "/root", "/home", "/tmp"))
    kept = [each for each in commands if each != new]
    hidden = {"shown": None, "stored": [*kept, new]}  # also where a command is not one of ours
    return hidden if is_private else AnyOf(({**hidden, "shown": shown}, hidden))


# Configs that are pushed: without the folders that they were loaded from.


def make_pushed(folder: Path) -> None:
    content = {"_name_or_path": "/home/somebody/model", "model_type": "llama", "hidden_size": 16, "x": [1, {"a": None}]}
    (folder / "config.json").write_text(json.dumps(content))


def read_pushed(folder: Path) -> Any:
    found = _without_paths(folder / "config.json", None)
    return json.loads(found if isinstance(found, bytes) else found.read_bytes())


def expected_pushed(document: Any, folder: Path) -> Any:
    document = _reread(_loaded(document) if isinstance(document, bytes) else document)
    found = dict(_typed(document, dict))
    for key in ("_name_or_path", "name_or_path", "base_model_name_or_path"):
        value = found.get(key)
        if isinstance(value, str) and (not may_be_hub_id(value) or is_folder(value)):
            found[key] = None
            if key != "base_model_name_or_path":
                del found[key]
    return found


# A folder that is pushed, with its card and the commands that wrote it.


def make_push(folder: Path) -> None:
    make_saved(folder)
    make_commands(folder)
    (folder / "README.md").write_text(card_for(open_artifact(folder), repo_id="me/model"))


def read_push(folder: Path) -> Any:
    files = files_to_push(open_artifact(folder), "me/model").files
    return {name: found if isinstance(found, bytes) else found.read_bytes() for name, found in files.items()}


def expected_push(document: Any, folder: Path) -> Any:
    """Every file as it stands in the folder; a record of commands that tells of this machine may stay behind."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return AnyOf((files, {name: content for name, content in files.items() if name != COMMAND_RECORD}))


# The base that an adapter is written for.


def read_known(folder: Path) -> Any:
    known = _known(_located(folder / "base", None, required=True))
    return {name: list(source.shape) for name, source in known.tensors.items()}


def make_base(folder: Path) -> None:
    from support.tiny_models import make

    make("llama", num_hidden_layers=1, vocab_size=8, intermediate_size=8).save_pretrained(folder / "base")


def expected_known(document: Any, folder: Path) -> Any:
    """The shapes are those that transformers gives the config's model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    document = _reread(_loaded(document) if isinstance(document, bytes) else document)
    try:
        config = AutoConfig.for_model(**document)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    except Exception as error:
        return _unknown(document, error)


def _unknown(document: Any, error: Exception) -> Any:
    from transformers import CONFIG_MAPPING

    kind = document.get("model_type") if isinstance(document, dict) else None
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        raise MeaninglessError(str(error)[:100]) from None
    return {}


# An adapter's content as an experiment identifies it.


def read_content(folder: Path) -> Any:
    return {"digest": _adapter_content(str(folder))}


def expected_content(document: Any, folder: Path) -> Any:
    """Another content has another digest; where the base lies is no part of it."""
    found = _adapter_content(str(folder))
    document = _reread(_loaded(document) if isinstance(document, bytes) else document)
    if not isinstance(document, dict):
        raise MeaninglessError("no object")
    return {"digest": found}


# Books.


def make_book(folder: Path) -> None:
    text = "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\nChapter 1\n\n" + STORY[:3000] + "\n\nChapter 2\n\n“é” "
    (folder / "book.txt").write_text(text + STORY[3000:6000])


def read_book(folder: Path) -> Any:
    book = load_book(folder / "book.txt", block_words=100)
    return {"text": book.text}


def expected_book(document: Any, folder: Path) -> Any:
    """The words of the file, in their order, whatever was damaged; no others."""
    content = (folder / "book.txt").read_bytes()
    found = load_book(folder / "book.txt", block_words=100).text
    for codec in ("utf-8", "cp1252", "utf-16"):
        try:
            words = content.decode(codec).split()
        except UnicodeDecodeError:
            continue
        if set(found.split()) <= set(words):
            return {"text": found}
    raise MeaninglessError("words that are not in the file")


def make_dataset(folder: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": [STORY[:1500], STORY[1500:3000]]}).save_to_disk(str(folder / "set"))


def read_dataset(folder: Path) -> Any:
    return {"text": load_book(folder / "set", block_words=100, progress=False).text}


def expected_table(document: Any, folder: Path) -> Any:
    """The text as Arrow reads and checks it."""
    import datasets
    import pyarrow

    try:
        with pyarrow.memory_map(str(folder / "set" / "data-00000-of-00001.arrow")) as file:
            table = pyarrow.ipc.open_stream(file).read_all()
            table.validate(full=True)
            texts = table["text"].to_pylist()
        return {"text": load_book(datasets.Dataset.from_dict({"text": texts}), block_words=100).text}
    except (pyarrow.ArrowException, ValueError, KeyError, TypeError, OSError) as error:
        raise MeaninglessError(str(error)[:100]) from None


def expected_dataset(document: Any, folder: Path) -> Any:
    """What datasets itself makes of it."""
    import datasets

    try:
        return {"text": load_book(datasets.load_from_disk(str(folder / "set")), block_words=100).text}
    except Exception as error:
        raise MeaninglessError(str(error)[:100]) from None


class _Letters:
    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def read_text_rows(folder: Path) -> Any:
    return read_rows(folder / "book.txt", _Letters(), 10, 1000)


def expected_text_rows(document: Any, folder: Path) -> Any:
    text = (folder / "book.txt").read_bytes().decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    rows = [[ord(letter) for letter in text[start : start + 10]] for start in range(0, min(len(text), 10_000), 10)]
    return [row for row in rows if len(row) == 10] or rows


_CONFIG = "hf_taskvec.experiments.config_options:read_config"
_BOOKS = "hf_taskvec.evaluation.texts.books"

TARGETS = [
    Target(
        "settings of unlearning",
        (_CONFIG,),
        "ours.yaml",
        Yaml(),
        make_unlearn,
        read_settings(UnlearnConfig),
        expected_settings(UnlearnConfig),
        share=0.5,
    ),
    Target(
        "settings of multi-task",
        (_CONFIG,),
        "ours.yaml",
        Yaml(),
        make_multitask,
        read_settings(MultitaskConfig),
        expected_settings(MultitaskConfig),
        share=0.3,
    ),
    Target(
        "mergekit's YAML",
        ("hf_taskvec.integrations.mergekit_config:read_mergekit_config",),
        "merge.yaml",
        Yaml(),
        make_merge,
        read_merge,
        expected_merge,
    ),
    Target(
        "record of commands",
        ("hf_taskvec.cli.command_record:record_command", "hf_taskvec.publishing.model_card:_command"),
        COMMAND_RECORD,
        Json(),
        make_commands,
        read_commands,
        expected_commands,
        writes=True,
    ),
    Target(
        "config that is pushed",
        ("hf_taskvec.publishing.pushed_files:_without_paths",),
        "config.json",
        Json(),
        make_pushed,
        read_pushed,
        expected_pushed,
    ),
    Target(
        "card that is pushed",
        ("hf_taskvec.publishing.pushed_files:files_to_push", "hf_taskvec.publishing.privacy:check_file"),
        "README.md",
        FrontMatter(),
        make_push,
        read_push,
        expected_push,
        share=0.2,
    ),
    Target(
        "commands that are pushed",
        ("hf_taskvec.publishing.pushed_files:_is_clean",),
        COMMAND_RECORD,
        Json(),
        make_push,
        read_push,
        expected_push,
        share=0.2,
    ),
    Target(
        "config of an adapter's base",
        ("hf_taskvec.application.to_adapter:_known",),
        "base/config.json",
        Json(),
        make_base,
        read_known,
        expected_known,
        share=0.2,
    ),
    Target(
        "adapter of an experiment",
        ("hf_taskvec.experiments.unlearning.unlearn_inputs:_adapter_content",),
        "adapter_config.json",
        Json(),
        make_adapter,
        read_content,
        expected_content,
        share=0.5,
    ),
    Target("book", (f"{_BOOKS}:_read",), "book.txt", Bytes(), make_book, read_book, expected_book),
    Target(
        "data set",
        (f"{_BOOKS}:_dataset_on_disk",),
        "set/dataset_info.json",
        Json(),
        make_dataset,
        read_dataset,
        expected_dataset,
        share=0.2,
    ),
    Target(
        "state of a data set",
        (f"{_BOOKS}:_dataset_on_disk",),
        "set/state.json",
        Json(),
        make_dataset,
        read_dataset,
        expected_dataset,
        share=0.2,
    ),
    Target(
        "table of a data set",
        (f"{_BOOKS}:_dataset_on_disk",),
        "set/data-00000-of-00001.arrow",
        Bytes(),
        make_dataset,
        read_dataset,
        expected_table,
        share=0.2,
    ),
    Target(
        "text to measure on",
        ("hf_taskvec.analysis.report_sections:read_rows",),
        "book.txt",
        Bytes(),
        make_book,
        read_text_rows,
        expected_text_rows,
    ),
]
