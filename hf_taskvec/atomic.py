"""Files that are replaced whole: readers see the old content or the new one, never a part, whatever is killed when."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_taskvec.errors import OutputError

# How the name of a file ends that is being written. A killed process may leave one behind.
PARTIAL = ".partial"


@contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[Path]:
    """A path to write the new content of a file to. When the block ends, it is on the disk under the file's own name.

    If the block fails, the file stays as it was.

    Args:
        path (`Path`):
            The file to create or to replace, in a folder that exists.
        shared (`bool`):
            Several processes may write the file at the same time, so each needs a temporary file of its own.
    """
    own = f".{os.getpid()}.{secrets.token_hex(4)}" if shared else ""
    partial = path.with_name(f".{path.name}{own}{PARTIAL}")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_bytes(path: Path, data: bytes, shared: bool = False) -> None:
    """Write a file whole; see `replacing`."""
    with replacing(path, shared) as partial:
        partial.write_bytes(data)


def write_text(path: Path, text: str, shared: bool = False) -> None:
    """Write a UTF-8 text file whole, its newlines as they are; see `replacing`."""
    write_bytes(path, text.encode(), shared)


def ensure_writable(folder: Path) -> None:
    """Create the folder and try it, so that long work fails before it begins and not after it.

    Raises:
        `OutputError`: If no file can be written there.
    """
    trial = folder / f".{os.getpid()}.{secrets.token_hex(4)}{PARTIAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        # `from None`: the cause would print the whole path.
        raise OutputError(
            f"the folder {folder.name!r} cannot be written: {error.strerror}. Name another one, or change its rights"
        ) from None


def is_partial(path: Path) -> bool:
    """Whether a file is what a killed process was about to write.

    >>> is_partial(Path("folder/.report.json.partial")), is_partial(Path("folder/report.json"))
    (True, False)
    """
    return path.name.startswith(".") and path.name.endswith(PARTIAL)


def sync(path: Path) -> None:
    """Have the operating system write a file or a folder to the disk."""
    try:
        handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    except OSError:
        if path.is_dir():  # Windows opens no folders, and keeps their entries safe by itself
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
