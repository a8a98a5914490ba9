"""Output folders that appear only when they are complete."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_taskvec.errors import OutputError


@contextmanager
def new_folder(final: str | Path, marker: str, overwrite: bool = False, resume: bool = False) -> Iterator[Path]:
    """A folder to write into, which gets its final name when the block ends without an exception.

    Only one process at a time writes to a folder; a second one is told so.

    Args:
        final: where the output shall appear.
        marker: a file that tells a folder of ours: only such a folder (or an empty one) is ever replaced.
        overwrite: replace an earlier output.
        resume: keep what an interrupted run left in the unfinished folder, and leave it there on failure.
    """
    final = Path(final).resolve()
    check_replaceable(final, marker, overwrite)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(unfinished(final))
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to {final.name}: {error.strerror or error}. Choose another folder.") from None
    part = unfinished(final)
    try:
        _bring_back(final)
        check_replaceable(final, marker, overwrite)
        if not resume:
            _empty(part)
        yield part
        publish(part, final)
    except OSError as error:
        if not resume:
            shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"writing {final.name} failed: {error.strerror or error}. Nothing new was left under its name"
            + (", and a new run resumes where this one stopped." if resume else ".")
        ) from error
    except BaseException:
        if not resume:
            shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def unfinished(final: Path) -> Path:
    """Where an output grows until it is complete."""
    return final.parent / f".{final.name}.unfinished"


def _lock(folder: Path) -> int:
    """The folder, created if need be and held by this process until the handle is closed."""
    while True:
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise OutputError(
                f"another run is writing {folder.name.removeprefix('.').removesuffix('.unfinished')}. Wait until it is done, "
                "or choose another folder."
            ) from None
        # Between opening and locking, the run that held it may have given it its final name.
        if folder.exists() and folder.stat().st_ino == os.fstat(handle).st_ino:
            return handle
        os.close(handle)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_replaceable(final: Path, marker: str, overwrite: bool) -> None:
    """Refuse to write over anything that is not an earlier output of the same kind."""
    if final == Path.cwd():
        raise OutputError("the output would replace the current folder. Choose a folder inside it.")
    if final.is_file():
        raise OutputError(f"{final.name} is a file; the output needs a folder.")
    if not final.exists() or not any(final.iterdir()):
        return
    if not (final / marker).exists():
        raise OutputError(f"the folder {final.name} holds other files (no {marker}). Choose a new or empty folder.")
    if not overwrite:
        raise OutputError(f"the folder {final.name} already holds an output. Pass overwrite=True to replace it.")


def publish(part: Path, final: Path) -> None:
    """Give a finished folder its final name, in place of an earlier output."""
    old = _replaced(final)
    if old.exists():
        shutil.rmtree(old)
    try:
        if final.exists() and any(final.iterdir()):  # an empty folder is replaced by the rename itself
            final.rename(old)
        part.rename(final)
    except BaseException:
        _bring_back(final)
        raise
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _replaced(final: Path) -> Path:
    """Where an earlier output is for the moment between two renames."""
    return final.parent / f".{final.name}.replaced"


def _bring_back(final: Path) -> None:
    """Give an earlier output its name again, if replacing it was interrupted."""
    if _replaced(final).exists() and not final.exists():
        _replaced(final).rename(final)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
