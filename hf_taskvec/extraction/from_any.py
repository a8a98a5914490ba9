"""A task vector from whatever holds one: its own files, a LoRA adapter, or a fine-tune beside its base."""

from pathlib import Path

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.extraction.from_finetuned import HeadsChoice, VocabularyChoice
from hf_taskvec.models.folder_contents import kind_of


def open_vector(
    where: str | Path,
    base: str | Path | None = None,
    *,
    name: str | None = None,
    vocabulary: VocabularyChoice | None = None,
    heads: HeadsChoice | None = None,
    initial: str | Path | None = None,
    token: str | bool | None = None,
) -> TaskVector:
    """A task vector from a folder or a Hub id (`me/tuned`, `me/tuned@revision`) that holds one in any form.

    A folder that holds both a whole model and an adapter is taken for the model if a base is given, else for the
    adapter.

    Args:
        where (`str` or `Path`):
            A saved task vector, a LoRA adapter, or a full fine-tune.
        base (`str` or `Path`, *optional*):
            The model that was fine-tuned: needed for a full fine-tune, and for an adapter whose base is not the one
            that it names. A saved vector has no use for it.
        name (`str`, *optional*):
            What expressions call the vector.
        vocabulary (`str`, *optional*):
            For full fine-tunes alone: `"truncate"`, `"extend"` or `"union"`, see `TaskVector.from_finetuned`.
        heads (`str`, *optional*):
            For full fine-tunes alone as well: `"exclude"` or `"match"`.
        initial (`str` or `Path`, *optional*):
            For adapters alone: as it was before training, see `TaskVector.from_adapter`.
        token (`str` or `bool`, *optional*):
            For Hub ids, as in transformers.

    Returns:
        `TaskVector`: The vector, of which nothing has been read yet.

    Raises:
        `BadValueError`: If it is a full fine-tune and there is no base, or `vocabulary` or `heads` is given for
            anything else.
        `MissingFileError`: If there is no such folder or repository.

    Example:
        ```python
        vectors = [open_vector("me/model-lora"), open_vector("out/tuned", "me/model"), open_vector("out/vector")]
        ```

    """
    kind, shown = kind_of(where, base, token)
    for what, choice in (("vocabulary", vocabulary), ("heads", heads)):
        if choice is not None and kind != "model":
            raise BadValueError(f"{what} is for full fine-tunes, and {shown} is none.")
    if initial is not None and kind != "adapter":
        raise BadValueError(f"initial is for adapters, and {shown} is none.")
    if kind == "vector":
        vector = TaskVector.load(where, token=token)
        return vector if name is None else vector.named(name)
    if kind == "adapter":
        return TaskVector.from_adapter(where, base=base, name=name, initial=initial, token=token)
    if base is None:
        raise BadValueError(
            f"{shown} is no task vector and no adapter. If it is a full fine-tune, its vector needs the base as well: "
            "taskvec extract BASE TUNED"
        )
    return TaskVector.from_finetuned(base, where, name=name, vocabulary=vocabulary, heads=heads, token=token)
