"""Loading a model and its tokenizer with transformers, to evaluate it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, MissingFileError
from hf_taskvec.filenames import CONFIG
from hf_taskvec.hub_names import split_revision, split_subfolder
from hf_taskvec.models.locations import locate

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load_for_evaluation(
    where: str | Path,
    *,
    dtype: "torch.dtype | str | None" = None,
    device: "torch.device | str | None" = None,
    token: str | bool | None = None,
) -> "PreTrainedModel":
    """A model that is ready to be evaluated: on its device, with dropout off.

    Args:
        where (`str` or `Path`):
            A folder, or a Hub id (`me/model`, `me/model@revision`).
        dtype (`torch.dtype` or `str`, *optional*):
            By default float32 on a CPU, where 16 bits are slow, and elsewhere the dtype that the model is stored in.
        device (`torch.device` or `str`, *optional*):
            By default the device of this process, as accelerate chooses it.
        token (`str` or `bool`, *optional*):
            For private repositories, as in transformers.

    Returns:
        [`~transformers.PreTrainedModel`]: The model.

    Raises:
        `MissingFileError`: If there is neither such a folder nor such a repository.
    """
    import torch
    from transformers import AutoModelForCausalLM

    place, options = _place(where, token)
    on = processes().device if device is None else torch.device(device)
    if dtype is None:
        dtype = torch.float32 if on.type == "cpu" else "auto"
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, token=token, **options)
    return model.to(on).eval()


def load_tokenizer(where: str | Path, *, token: str | bool | None = None) -> Any:
    """The tokenizer beside a model; see `load_for_evaluation`.

    Raises:
        `MissingFileError`: If there is none, or none that can be read.
    """
    from transformers import AutoTokenizer

    place, options = _place(where, token)
    name = place.name if isinstance(place, Path) else place
    remedy = "Save the model's tokenizer beside it: tokenizer.save_pretrained(folder)."
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, token=token, **options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
        raise MissingFileError(f"{name} has no tokenizer that can be read ({reason}). {remedy}") from None
    # Of some architectures transformers makes an empty tokenizer where there are no files.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise MissingFileError(f"{name} has no tokenizer of its own. {remedy}")
    return tokenizer


def tokenizer_of(model: Any) -> Any:
    """The tokenizer beside the files that a live model was loaded from.

    Raises:
        `BadValueError`: If the model does not say where it came from.
        `MissingFileError`: If there is none, or none that can be read.
    """
    source = model.config._name_or_path
    if not source:
        raise BadValueError("the model does not say where it came from; pass its tokenizer=")
    return load_tokenizer(source)


def _place(where: str | Path, token: str | bool | None) -> tuple[str | Path, dict[str, str]]:
    """A folder, or a Hub id with its revision and the folder in it, which transformers takes apart."""
    found = locate(where, None, token, [CONFIG])  # its errors are clearer than those of transformers
    if found.commit is None:
        return found.path, {}
    name, revision = split_revision(str(where))
    repository, inside = split_subfolder(name)
    given = {"revision": revision, "subfolder": inside}
    return repository, {key: value for key, value in given.items() if value is not None}
