"""What a model's own files say about the model that it was made from: evidence, never a guess."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_taskvec.errors import TaskVectorError
from hf_taskvec.filenames import CONFIG, MODEL_CARD, MODEL_RECORD, TRAINING_RECORD
from hf_taskvec.json_files import read_json
from hf_taskvec.models.card_metadata import front_matter
from hf_taskvec.models.checkpoint import Checkpoint


def stated_origin(model: Checkpoint, other: Checkpoint) -> str | None:
    """The file of a model's folder that says it was made from another model; None if none does.

    Args:
        model (`Checkpoint`):
            What may be a fine-tune. Of a live model nothing is known.
        other (`Checkpoint`):
            What may be its base.
    """
    if model.folder is None:
        return None
    for name in (TRAINING_RECORD, MODEL_RECORD):
        base = _record(model.folder / name).get("base")
        if isinstance(base, dict) and base.get("fingerprint") == other.sampled_fingerprint:
            return name
    if _is_name_of(other, model.config.get("_name_or_path")):
        return CONFIG
    if any(_is_name_of(other, each) for each in _named_on_card(model.folder)):
        return MODEL_CARD
    return None


def _record(path: Path) -> dict[str, Any]:
    """A record of ours; empty if there is none that can be read, which is then no evidence."""
    try:
        return read_json(path) if path.exists() else {}
    except TaskVectorError:
        return {}


def _is_name_of(model: Checkpoint, name: Any) -> bool:
    """Whether a name in somebody's files is a model's Hub id or whole path. A folder's own name is too little."""
    if not isinstance(name, str) or not name:
        return False
    if model.revision is not None:
        return name == model.name
    path = Path(name)
    return model.folder is not None and path.is_absolute() and path == model.folder.resolve()


def _named_on_card(folder: Path) -> Iterator[Any]:
    try:
        named = front_matter((folder / MODEL_CARD).read_text("utf-8")).get("base_model")
    except (OSError, UnicodeDecodeError):
        return
    yield from named if isinstance(named, list) else [named]
