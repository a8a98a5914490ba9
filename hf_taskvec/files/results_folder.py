"""The output folder of a longer work: it belongs to one config, which lies in it."""

import json
import re
from pathlib import Path
from typing import Any

from hf_taskvec import atomic
from hf_taskvec.atomic import ensure_writable
from hf_taskvec.distributed import processes
from hf_taskvec.errors import OutputError
from hf_taskvec.filenames import (
    ADAPTER_RECORD,
    AUDIT_JSON,
    AUDIT_MARKDOWN,
    AUDIT_PLOTS,
    FORGOTTEN_RECORD,
    MODEL_RECORD,
    REPORT_JSON,
    REPORT_MARKDOWN,
    REPORT_PAGE,
    REPORT_PLOTS,
    VECTOR_RECORD,
)
from hf_taskvec.files.output_folder import check_replaceable, remove_output
from hf_taskvec.json_files import read_json

SETTINGS_FILE = "config.json"  # the experiment's own; a model's is another file of that name
# What is written beside it. Trained stages are none of it: they are known by what made them.
_RESULTS = (
    *(REPORT_JSON, REPORT_MARKDOWN, REPORT_PAGE, AUDIT_JSON, AUDIT_MARKDOWN, FORGOTTEN_RECORD),
    *(f"{plot}.{kind}" for plot in (*REPORT_PLOTS, *AUDIT_PLOTS) for kind in ("png", "svg")),
)
_STORED = re.compile(r"[0-9a-f]{32}\.json")  # an evaluation store's files, in the folder `store`
#: the folder of what an experiment found beyond its sweep, with results of its own
EDIT_FOLDER = "edit"
#: the outputs among them, and the record of each
OUTPUTS = {"model": MODEL_RECORD, "adapter": ADAPTER_RECORD, "vector": VECTOR_RECORD}


def open_results_folder(
    output: str | Path, settings: dict[str, Any], force: bool = False, forced_by: str = "--force"
) -> Path:
    """The output folder, with the resolved settings in it. A folder with results of other settings is refused.

    Args:
        output (`str` or `Path`):
            Made if it does not exist.
        settings (`dict`):
            All that decides the results.
        force (`bool`, *optional*, defaults to `False`):
            Take over a folder of other settings; results that lie in it are removed, so that what is there afterwards
            belongs together.
        forced_by (`str`, *optional*, defaults to `"--force"`):
            How the caller's user says `force`.

    Returns:
        `Path`: The folder.

    Raises:
        `OutputError`: If the folder holds other files, or results of other settings.
    """
    folder = Path(output)
    if folder.is_file():
        raise OutputError(f"{folder.name} is a file; the output needs a folder.")
    settings = json.loads(json.dumps(settings))  # as it will be read back
    others = _others(folder)
    if (folder / SETTINGS_FILE).exists() and others:
        before = read_json(folder / SETTINGS_FILE)
        if "model_type" in before:
            raise OutputError(f"the folder {folder.name} holds a model. Choose a new or empty folder as --output.")
        other = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
        if force and folder.is_symlink():
            raise OutputError(
                f"{folder.name} is a link to a folder with results. Name that folder itself to replace them."
            )
        if other and not force:
            changes = ", ".join(f"{k}: {_short(before.get(k))} → {_short(settings.get(k))}" for k in other[:3])
            raise OutputError(
                f"the output folder {folder.name} holds the results of another config ({changes}). Choose another "
                f"--output, or pass {forced_by} to replace them."
            )
    elif others and not (folder / SETTINGS_FILE).exists():
        raise OutputError(f"the folder {folder.name} holds other files. Choose a new or empty folder as --output.")
    ensure_writable(folder)
    state = processes()
    state.wait_for_everyone()  # all have looked before one writes
    if state.is_main_process:
        if force:
            _clear(folder)
        atomic.write_text(folder / SETTINGS_FILE, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
    state.wait_for_everyone()
    return folder


def _others(folder: Path) -> list[Path]:
    """What a folder holds beside its config, but for files that a killed process was about to write."""
    found = folder.iterdir() if folder.is_dir() else ()
    return [path for path in found if path.name != SETTINGS_FILE and not atomic.is_partial(path)]


def _clear(folder: Path) -> None:
    """Remove the results. If one of the outputs holds something of others, nothing is removed."""
    for name, record in OUTPUTS.items():
        check_replaceable(folder / name, record, overwrite=True)
    for name, record in OUTPUTS.items():
        remove_output(folder / name, record)
    for name in _RESULTS:
        (folder / name).unlink(missing_ok=True)
    inner = folder / EDIT_FOLDER
    if inner.is_dir() and not inner.is_symlink():
        _clear(inner)
        if not any(inner.iterdir()):
            inner.rmdir()
    store = folder / "store"
    if store.is_dir() and not store.is_symlink():
        for path in store.iterdir():
            if _STORED.fullmatch(path.name) or atomic.is_partial(path):
                path.unlink()
        if not any(store.iterdir()):
            store.rmdir()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}…"
