"""A task vector from whatever holds one: its own files, a LoRA adapter, or a fine-tune beside its base."""

from pathlib import Path

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.files.contents import kind_of


def open_vector(
    where: str | Path,
    base: str | Path | None = None,
    *,
    name: str | None = None,
    vocabulary: str | None = None,
    token: str | bool | None = None,
) -> TaskVector:
    """A task vector from a folder or a Hub id (`me/tuned`, `me/tuned@revision`) that holds one in any form.

    A folder that holds both a whole model and an adapter is taken for the model if a base is given, else for the
    adapter.

    Args:
        where: a saved task vector, a LoRA adapter, or a full fine-tune.
        base: the model that was fine-tuned: needed for a full fine-tune, and for an adapter whose base is not the one
            that it names. A saved vector has no use for it.
        name: what expressions call the vector.
        vocabulary: for full fine-tunes alone: see `TaskVector.from_finetuned`.
        token: for Hub ids, as in transformers.
    """
    kind, shown = kind_of(where, base, token)
    if vocabulary is not None and kind != "model":
        raise BadValueError(f"vocabulary is for full fine-tunes, and {shown} is none.")
    if kind == "vector":
        vector = TaskVector.load(where, token=token)
        return vector if name is None else vector.named(name)
    if kind == "adapter":
        return TaskVector.from_adapter(where, base, name=name, token=token)
    if base is None:
        raise BadValueError(
            f"{shown} is no task vector and no adapter. If it is a full fine-tune, its vector needs the base as well: "
            "taskvec extract BASE TUNED"
        )
    return TaskVector.from_finetuned(base, where, name=name, vocabulary=vocabulary, token=token)
