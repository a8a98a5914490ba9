"""What is in a folder or a Hub repository: a saved task vector, an adapter or a whole model."""

import re
from pathlib import Path
from typing import Literal, NamedTuple

from hf_taskvec.errors import MismatchError
from hf_taskvec.filenames import (
    ADAPTER_CONFIG,
    ADAPTER_RECORD,
    CONFIG,
    MODEL_RECORD,
    MODEL_WEIGHTS,
    VECTOR_RECORD,
)
from hf_taskvec.models.locations import locate

ContentKind = Literal["vector", "adapter", "model"]
#: the records that this library leaves in what it writes
RECORDS: dict[str, ContentKind] = {VECTOR_RECORD: "vector", ADAPTER_RECORD: "adapter", MODEL_RECORD: "model"}


class Contents(NamedTuple):
    """What a folder or a Hub id holds."""

    kind: ContentKind
    #: how to call it in a message
    name: str


def kind_of(where: str | Path, base: str | Path | None = None, token: str | bool | None = None) -> Contents:
    """What a folder or a Hub id holds, and how to call it in a message.

    A folder that holds both a whole model and an adapter counts as the model if a base is given, else as the adapter.

    Args:
        where (`str` or `Path`):
            A folder, or a Hub id (`me/tuned`, `me/tuned@revision`).
        base (`str` or `Path`, *optional*):
            The model that was fine-tuned.
        token (`str` or `bool`, *optional*):
            For private repositories, as in transformers.
    """
    # Every model has a config: the Hub's client warns where no file is found at all.
    folder, name, commit = locate(where, None, token, [VECTOR_RECORD, ADAPTER_CONFIG, CONFIG])
    kinds = kinds_in(folder)
    if "vector" in kinds:
        return Contents("vector", name)
    # Of a Hub repository no weights were fetched: whatever older ones the cache has say nothing.
    is_whole = "model" in kinds and commit is None
    is_adapter = "adapter" in kinds and not (is_whole and base is not None)
    return Contents("adapter" if is_adapter else "model", name)


def kinds_in(folder: Path) -> set[ContentKind]:
    """Everything of the three that a local folder holds, by its files."""
    files: dict[ContentKind, tuple[str, ...]] = {
        "vector": (VECTOR_RECORD,),
        "adapter": (ADAPTER_CONFIG,),
        "model": model_weights(folder),
    }
    return {kind for kind, names in files.items() if any((folder / name).exists() for name in names)}


_MODEL = r"(?:pytorch_)?model\."
_VARIANTS = (
    re.compile(_MODEL + r"([\w-]+)\.(?:safetensors|bin)"),
    re.compile(_MODEL + r"(?:safetensors|bin)\.index\.([\w-]+)\.json"),
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def model_weights(folder: Path) -> tuple[str, ...]:
    """The names under which a folder may hold a model's weights, the preferred one first.

    Where it holds a variant alone, such as `model.fp16.safetensors`, that is the model.

    Raises:
        `MismatchError`: If there are several variants, and nothing beside them.
    """
    if any((folder / name).exists() for name in MODEL_WEIGHTS):
        return MODEL_WEIGHTS
    found: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir(), key=lambda each: (each.suffix == ".bin", each.name)):
        match = next((match for each in _VARIANTS if (match := each.fullmatch(path.name))), None)
        if match and not _SHARD.search(match[1]):
            found.setdefault(match[1], []).append(path.name)
    if len(found) > 1:
        raise MismatchError(
            f"{folder.resolve().name} holds several variants of a model ({', '.join(found)}), and none without a name. "
            "Keep the one that is meant in a folder with the config.json."
        )
    return (*MODEL_WEIGHTS, *(name for names in found.values() for name in names))


def record_in(folder: Path) -> str | None:
    """The name of the record that tells what this library wrote to a folder; None if it did not write it."""
    return next((name for name in RECORDS if (folder / name).exists()), None)
