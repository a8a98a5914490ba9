"""Files that are replaced whole: readers see the old content or the new one, never a part, whatever is killed when."""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_taskvec.errors import OutputError

# How the name of a file ends that is being written. A killed process may leave one behind.
PARTIAL = ".partial"
#: the bytes that a file system takes for a name, on nearly all of them
LONGEST_NAME = 255
# What a hidden name keeps of the name that it belongs to, which leaves room for every ending.
_LONGEST_KEPT = 208


@contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[Path]:
    """A path to write the new content of a file to. When the block ends, it is on the disk under the file's own name.

    If the block fails, the file stays as it was.

    Args:
        path (`Path`):
            The file to create or to replace, in a folder that exists.
        shared (`bool`):
            Several processes may write the file at the same time. Otherwise what a killed process was about to write
            is removed first.
    """
    if not shared:
        for left in _left_behind(path):
            left.unlink()
    # Nobody can guess the name, so nobody can put a link there that would be followed.
    partial = hidden_beside(path, f".{os.getpid()}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_bytes(path: Path, data: bytes, shared: bool = False) -> None:
    """Write a file whole; see `replacing`. A link of that name is replaced, what it leads to stays as it is."""
    with replacing(path, shared) as partial, partial.open("xb") as file:
        file.write(data)


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
        trial.touch(exist_ok=False)
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


def _left_behind(path: Path) -> list[Path]:
    """What killed processes were about to write to a file."""
    start = re.escape(hidden_beside(path, "").name)
    name = re.compile(rf"{start}(\.\d+\.[0-9a-f]{{8}})?{re.escape(PARTIAL)}")
    return [each for each in path.parent.iterdir() if name.fullmatch(each.name)]


def hidden_beside(path: Path, ending: str) -> Path:
    """A hidden name beside a file or a folder, which tells whose it is. That of a very long name is shortened.

    >>> hidden_beside(Path("folder/report.json"), ".partial").name
    '.report.json.partial'
    >>> len(hidden_beside(Path("n" * 250), ".partial").name)
    217
    """
    # What is kept does not depend on the ending, so that all hidden names of one file begin alike.
    name = os.fsencode(path.name)
    if len(name) > _LONGEST_KEPT:
        digest = hashlib.sha256(name).hexdigest()[:16]
        kept = name[: _LONGEST_KEPT - len(digest) - 1].decode(errors="ignore")
        return path.with_name(f".{kept}-{digest}{ending}")
    return path.with_name(f".{path.name}{ending}")


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link; never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # which looks again, and does not follow what was exchanged meanwhile
    else:
        path.unlink(missing_ok=True)


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
