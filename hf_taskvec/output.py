"""Output folders that appear only when they are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_taskvec.errors import OutputError


@contextmanager
def new_folder(final: str | Path, marker: str, overwrite: bool = False, resume: bool = False) -> Iterator[Path]:
    """A folder to write into, which gets its final name when the block ends without an exception.

    Args:
        final: where the output shall appear.
        marker: a file that tells a folder of ours: only such a folder (or an empty one) is ever replaced.
        overwrite: replace an earlier output.
        resume: keep what an interrupted run left in the unfinished folder, and leave it there on failure.
    """
    final = Path(final)
    check_replaceable(final, marker, overwrite)
    part = final.parent / f".{final.name}.unfinished"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if part.exists() and not resume:
            shutil.rmtree(part)
        part.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write to {final.name}: {error.strerror}. Choose another folder.") from None
    try:
        yield part
        publish(part, final)
    except OSError as error:
        if not resume:
            shutil.rmtree(part, ignore_errors=True)
        raise OutputError(
            f"writing {final.name} failed: {error.strerror}. Nothing was left under its name"
            + (", and a new run resumes where this one stopped." if resume else ".")
        ) from error
    except BaseException:
        if not resume:
            shutil.rmtree(part, ignore_errors=True)
        raise


def check_replaceable(final: Path, marker: str, overwrite: bool) -> None:
    """Refuse to write over anything that is not an earlier output of the same kind."""
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
    old = final.parent / f".{final.name}.replaced"
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        final.rename(old)
    part.rename(final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
