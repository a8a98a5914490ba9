"""Files in an output folder that this library did not write: replacing the output must not remove them.

What it writes is known by name: the weights, what lies beside them, records, the report and the command. The card is
made to be changed by hand, so it counts as ours only as long as nobody has changed it.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hf_taskvec.atomic import is_partial, write_text
from hf_taskvec.errors import CorruptFileError, OutputError, some
from hf_taskvec.filenames import (
    ADAPTER_CONFIG,
    ADAPTER_RECORD,
    ADAPTER_SAFETENSORS,
    CARD_DIGEST,
    COMMAND_RECORD,
    CONFIG,
    EPOCH_VECTORS,
    MODEL_CARD,
    MODEL_RECORD,
    REPAIR_RECORD,
    REPAIR_STARTED,
    REPAIR_VECTOR,
    REPAIRED_MODEL,
    REPAIRED_VECTOR,
    REPORT_FOLDER,
    REPORT_JSON,
    REPORT_MARKDOWN,
    REPORT_PAGE,
    REPORT_PLOTS,
    TRAINING_RECORD,
    TRAINING_STATE,
    VECTOR_RECORD,
    WEIGHTS,
    WEIGHTS_INDEX,
)
from hf_taskvec.json_files import read_json
from hf_taskvec.models.companions import companion_files

_VECTOR_TENSORS = re.compile(r"taskvec(-\d+-of-\d+)?\.safetensors")
_EPOCH = re.compile(r"epoch-[\d.]+")
_PLOTS = tuple(f"{plot}.{kind}" for plot in REPORT_PLOTS for kind in ("png", "svg"))
_REPAIRED = {REPAIRED_MODEL: MODEL_RECORD, REPAIRED_VECTOR: VECTOR_RECORD, REPAIR_VECTOR: VECTOR_RECORD}
_SYSTEM = (".DS_Store",)  # what macOS leaves wherever somebody has looked


def check_nothing_foreign(output: Path, record: str) -> None:
    """Refuse to replace an output that holds files which this library did not write.

    Args:
        output (`Path`):
            The folder of an earlier output.
        record (`str`):
            The name of the record that tells what kind of output it is.

    Raises:
        `OutputError`: It names some of the files.
    """
    if foreign := sorted(_foreign(output, record)):
        raise OutputError(
            f"the folder {output.name} holds files that hf_taskvec did not write, or that were changed since: "
            f"{some(foreign)}. Replacing the output would remove them. Move them away, or choose another folder."
        )


def write_card_file(folder: Path, text: str) -> Path:
    """Write the card of a folder, and note what was written."""
    path = folder / MODEL_CARD
    write_text(path, text)
    write_text(folder / CARD_DIGEST, _digest(path) + "\n")
    return path


def _foreign(folder: Path, record: str) -> Iterator[str]:
    ours = _ours(folder, record)
    for path in folder.iterdir():
        if path.name == MODEL_CARD and not _is_own_card(folder):
            yield path.name
        elif path.name in ours or is_partial(path):
            continue
        elif path.is_symlink() or not path.is_dir():
            yield path.name
        elif path.name == REPORT_FOLDER:
            known = {REPORT_JSON, REPORT_MARKDOWN, REPORT_PAGE, *_PLOTS, *_SYSTEM}
            yield from (f"{path.name}/{each.name}" for each in path.iterdir() if each.name not in known)
        elif path.name in _REPAIRED and record == REPAIR_RECORD:
            yield from (f"{path.name}/{name}" for name in _foreign(path, _REPAIRED[path.name]))
        elif path.name == EPOCH_VECTORS and record == TRAINING_RECORD:
            for each in path.iterdir():
                if _EPOCH.fullmatch(each.name) and each.is_dir() and not each.is_symlink():
                    yield from (f"{path.name}/{each.name}/{name}" for name in _foreign(each, VECTOR_RECORD))
                elif each.name not in _SYSTEM:
                    yield f"{path.name}/{each.name}"
        else:
            yield from _files_below(path, folder, ours)


def _files_below(path: Path, folder: Path, ours: set[str]) -> Iterator[str]:
    below = [each.relative_to(folder).as_posix() for each in path.rglob("*") if not each.is_dir()]
    yield from (name for name in below if name not in ours)
    if not below:  # somebody made it, though nothing is in it
        yield path.name


def _ours(folder: Path, record: str) -> set[str]:
    """The names of the files that this library writes to such an output, below its folder."""
    own = {record, COMMAND_RECORD, MODEL_CARD, CARD_DIGEST, *_SYSTEM}
    if record == VECTOR_RECORD:
        return own | {path.name for path in folder.iterdir() if _VECTOR_TENSORS.fullmatch(path.name)}
    if record == REPAIR_RECORD:
        return own | {REPAIR_STARTED}
    if record == TRAINING_RECORD:
        own.add(TRAINING_STATE)
    with suppress(CorruptFileError):  # then none of them is taken for ours
        own |= {path.relative_to(folder).as_posix() for path in companion_files(folder)}
    if record == ADAPTER_RECORD or (record == TRAINING_RECORD and not (folder / CONFIG).exists()):
        return own | {ADAPTER_CONFIG, ADAPTER_SAFETENSORS}
    return own | {WEIGHTS, WEIGHTS_INDEX, *_indexed(folder)}


def _indexed(folder: Path) -> Iterator[str]:
    """The files of weights that an index names; of a damaged one none, so that none is removed."""
    if not (folder / WEIGHTS_INDEX).exists():
        return
    with suppress(CorruptFileError):
        files = read_json(folder / WEIGHTS_INDEX).get("weight_map")
        if isinstance(files, dict):
            yield from (each for each in files.values() if isinstance(each, str))


def _is_own_card(folder: Path) -> bool:
    noted = folder / CARD_DIGEST
    return noted.is_file() and noted.read_text("utf-8", "replace").strip() == _digest(folder / MODEL_CARD)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
