"""DeepSpeed ZeRO checkpoints -> model folders, through DeepSpeed's own converter.

Their files are pickles, which are programs, and the converter runs them. So nothing converts them by the way: whoever
trusts them says so, once, and gives the folder that comes of it like any other.
"""

import contextlib
import shutil
import sys
from pathlib import Path

from hf_taskvec.errors import CorruptFileError, MismatchError, UnsupportedError
from hf_taskvec.filenames import CONFIG
from hf_taskvec.files.output_folder import new_folder
from hf_taskvec.models.checkpoint import folder_of_config, is_deepspeed


def convert_deepspeed(
    checkpoint: str | Path, output: str | Path, *, tag: str | None = None, trust_pickles: bool = False
) -> Path:
    """Write the model in a checkpoint of DeepSpeed ZeRO (stages 1 to 3) as an ordinary folder.

    The weights are those that the optimizer holds, in fp32, in safetensors. DeepSpeed must be installed.

    Args:
        checkpoint (`str` or `Path`):
            The folder that has `latest` and `global_step…`; the model's config lies in it, or in the one above.
        output (`str` or `Path`):
            The folder to write.
        tag (`str`, *optional*):
            Which of several, such as `"global_step100"`; by default the latest.
        trust_pickles (`bool`, *optional*, defaults to `False`):
            That its files may run what they hold, as DeepSpeed's converter lets them. Say so of your own checkpoints.

    Returns:
        `Path`: The folder, for `TaskVector.from_finetuned` and whatever else takes a model.

    Raises:
        `UnsupportedError`: If that is not said, or DeepSpeed is not installed.
        `MismatchError`: If it is no such checkpoint.
        `CorruptFileError`: If the converter cannot read it.

    Example:
        >>> from hf_taskvec.extraction.from_deepspeed import convert_deepspeed
        >>> tuned = convert_deepspeed("run/checkpoint-100", "tuned", trust_pickles=True)  # doctest: +SKIP
        >>> vector = TaskVector.from_finetuned("base", tuned)  # doctest: +SKIP
    """
    folder = Path(checkpoint)
    if not is_deepspeed(folder):
        raise MismatchError(f"{folder.name} is no checkpoint of DeepSpeed ZeRO: it has no `latest` and no parts.")
    if not trust_pickles:
        raise UnsupportedError(
            f"the files of {folder.name} are pickles, and DeepSpeed's converter runs what they hold. If they are your "
            "own, pass trust_pickles=True."
        )
    try:
        with contextlib.redirect_stdout(sys.stderr):
            from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
    except ImportError:
        raise UnsupportedError("DeepSpeed is not installed here, and only it can read its checkpoints.") from None
    config = folder_of_config(folder) / CONFIG
    with new_folder(output, CONFIG) as part:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(part), safe_serialization=True, tag=tag)
        except Exception as error:  # whatever pickles and the converter raise
            raise CorruptFileError(
                f"DeepSpeed could not convert {folder.name} ({type(error).__name__}: {str(error)[:200]})."
            ) from error
        shutil.copyfile(config, part / CONFIG)
    return Path(output).resolve()
