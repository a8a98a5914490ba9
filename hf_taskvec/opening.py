"""A task vector from whatever holds one: its own files, a LoRA adapter, or a fine-tune beside its base."""

from pathlib import Path

from hf_taskvec.checkpoint import WEIGHTS, locate
from hf_taskvec.errors import BadValueError, MissingFileError
from hf_taskvec.vector import TaskVector

_ADAPTER = "adapter_config.json"
_VECTOR = "taskvec.json"


def open_vector(
    where: str | Path,
    base: str | Path | None = None,
    *,
    name: str | None = None,
    vocabulary: str | None = None,
    token: str | bool | None = None,
) -> TaskVector:
    """A task vector from a folder or a Hub id (`me/tuned`, `me/tuned@revision`) that holds one in any form.

    Args:
        where: a saved task vector, a LoRA adapter, or a full fine-tune.
        base: the model that was fine-tuned: needed for a full fine-tune, and for an adapter whose base is not the one
            that it names.
        name: what expressions call the vector.
        vocabulary: for full fine-tunes: see `TaskVector.from_finetuned`.
        token: for Hub ids, as in transformers.
    """
    folder, shown, commit = locate(where, None, token, [_VECTOR, _ADAPTER, "config.json"])
    if (folder / _VECTOR).exists():
        vector = TaskVector.load(where, token=token)
        return vector if name is None else vector.named(name)
    # A folder of a whole model may also hold the adapter that was merged into it.
    if (folder / _ADAPTER).exists() and (commit is not None or not _has_weights(folder)):
        if vocabulary is not None:
            raise BadValueError("vocabulary is for full fine-tunes; an adapter has none of its own.")
        return TaskVector.from_adapter(where, base, name=name, token=token)
    if base is None:
        raise MissingFileError(
            f"{shown} is no task vector and no adapter. Of a full fine-tune, give its base first: taskvec extract BASE TUNED"
        )
    return TaskVector.from_finetuned(base, where, name=name, vocabulary=vocabulary, token=token)


def _has_weights(folder: Path) -> bool:
    return any((folder / file).exists() for file in WEIGHTS)
