"""The hidden folders that an output grows in, and how they are known again.

Their names can be guessed, so anything may be there already: a link, a file, a folder of somebody else. A folder is
emptied, taken over or removed only if it is ours: a real folder and no link, of the owner that our own files have
there, which holds our mark. The mark is made before anything else and removed after everything else, so a run that is
killed at any moment leaves a folder that the next one knows.
"""

import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_taskvec.atomic import remove
from hf_taskvec.errors import OutputError

MARK = ".taskvec-unfinished"


def take_folder(folder: Path, record: str = MARK) -> None:
    """Make a folder of ours, or take over what an interrupted run left of one.

    Args:
        folder (`Path`):
            The folder; its parents are made too.
        record (`str`, *optional*):
            A file that tells a finished output, which a killed run may have left here without the mark.

    Raises:
        `OutputError`: If something else has that name. It is not touched.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        check_ours(folder, record)
    _mark(folder)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """An empty folder of ours, which is removed when the block ends."""
    take_folder(folder)
    clear(folder)
    try:
        yield folder
    finally:
        remove_folder(folder)


def check_ours(folder: Path, record: str = MARK) -> None:
    """Refuse what no run of ours has left there; the arguments are those of `take_folder`."""
    if folder.is_symlink() or (sys.version_info >= (3, 12) and folder.is_junction()):
        what = "is a link"
    elif not folder.is_dir():
        what = "is no folder"
    elif folder.lstat().st_uid != _owner_of_new_files(folder.parent):
        what = "belongs to another user"
    elif (held := {path.name for path in folder.iterdir()}) and not held & {MARK, record}:
        what = "holds files that no run of this version has left"
    else:
        return
    raise OutputError(
        f"{folder.name} beside the output {what}. It was not touched. Look at it and remove it, or choose another "
        "output folder."
    )


def clear(folder: Path, keep: Collection[str] = ()) -> None:
    """Remove what is in a folder of ours, but for its mark and some files."""
    for path in folder.iterdir():
        if path.name != MARK and path.name not in keep:
            remove(path)


def remove_folder(folder: Path) -> None:
    """Remove a folder of ours. What stays of it if that is interrupted is known the next time."""
    _mark(folder)
    clear(folder)
    remove_mark(folder)
    folder.rmdir()


def is_marked(folder: Path) -> bool:
    """Whether a folder is unfinished, or half removed."""
    return (folder / MARK).exists()


def remove_mark(folder: Path) -> None:
    """Call a folder finished."""
    (folder / MARK).unlink()


def _mark(folder: Path) -> None:
    with suppress(FileExistsError), (folder / MARK).open("x"):
        pass


def _owner_of_new_files(folder: Path) -> int:
    """Who owns what we make here. On network disks that need not be the user who runs this; Windows has no such number.

    Everything has the owner 0 there.
    """
    with tempfile.TemporaryFile(dir=folder) as trial:
        return os.fstat(trial.fileno()).st_uid
