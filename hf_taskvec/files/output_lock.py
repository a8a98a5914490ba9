"""The lock of an output: one process at a time writes to a folder."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hf_taskvec.atomic import hidden_beside
from hf_taskvec.errors import OutputError


@contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Hold the lock of an output; the operating system frees it when the process ends, however it ends."""
    file = _lock_file(output)
    # The block may be left in another thread than it was entered in.
    lock = FileLock(file, thread_local=False)
    _check_lock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OutputError(
            f"another run is writing {output.name}. Wait until it is done, or choose another folder."
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file, but filelock does so there when it closes it
            file.unlink()
        lock.release()


def _lock_file(output: Path) -> Path:
    """The lock of an output, beside it, so that every process that can write the output sees the same lock.

    It cannot be in the unfinished folder, which is renamed: Windows renames no folder with an open file in it. A killed
    run leaves the file beside its unfinished folder, but nobody holds it then.
    """
    return hidden_beside(output, ".lock")


def _check_lock(file: Path) -> None:
    """Refuse what is no lock of ours, before it is opened and in the end removed: ours are empty files."""
    if not os.path.lexists(file):
        return
    found = file.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size:
        raise OutputError(
            f"{file.name} beside the output is not the lock of a run. It was not touched. Look at it and remove it, or "
            "choose another output folder."
        )
