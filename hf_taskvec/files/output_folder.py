"""Output folders that appear only when they are complete."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hf_taskvec.atomic import LONGEST_NAME, hidden_beside, sync
from hf_taskvec.errors import OutputError, TaskVectorError
from hf_taskvec.files.foreign_files import check_nothing_foreign
from hf_taskvec.files.output_lock import only_writer
from hf_taskvec.files.own_folder import check_ours, clear, is_marked, remove_folder, remove_mark, take_folder


@contextmanager
def new_folder(output: str | Path, marker: str, overwrite: bool = False, resume: bool = False) -> Iterator[Path]:
    """A folder to write into, which gets its final name when the block ends without an exception.

    Only one process at a time writes to a folder; a second one is told so.

    Args:
        output (`str` or `Path`):
            Where the output shall appear.
        marker (`str`):
            A file that tells a folder of ours: only such a folder (or an empty one) is ever replaced, and only if all
            that it holds was written by this library.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an earlier output.
        resume (`bool`, *optional*, defaults to `False`):
            Keep what an interrupted run left in the unfinished folder, and leave it there on failure.

    Returns:
        `Path`: The unfinished folder, inside the block.

    Raises:
        `OutputError`: If the folder holds something else, is being written by another run, or cannot be written.
    """
    check_replaceable(output, marker, overwrite)
    final = Path(output).resolve()
    part = unfinished(final)
    with ExitStack() as stack:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_writer(final))
            _bring_back(final, marker)
            check_replaceable(output, marker, overwrite)
            take_folder(part, marker)
            if not resume:
                clear(part)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(
                f"cannot write to {final.name}: {error.strerror or error}. Choose another folder."
            ) from None
        try:
            yield part
            publish(part, final)
        except OSError as error:
            if not resume:
                _discard(part)
            if isinstance(error, TaskVectorError):
                raise
            raise OutputError(
                f"writing {final.name} failed: {error.strerror or error}. Nothing new was left under its name"
                + (", and a new run resumes where this one stopped." if resume else ".")
            ) from error
        except BaseException:
            if not resume:
                _discard(part)
            raise


def unfinished(output: Path) -> Path:
    """Where an output grows until it is complete."""
    return hidden_beside(output, ".unfinished")


def check_replaceable(output: str | Path, marker: str, overwrite: bool) -> None:
    """Refuse to write over anything that is not an earlier output of the same kind, with nothing of others in it.

    A link is followed to where a new output shall be, but not in order to replace one: what it leads to may be more
    than its name tells.
    """
    final = Path(output).resolve()
    if len(os.fsencode(final.name)) > LONGEST_NAME:
        raise OutputError(
            f"the name {final.name[:20]}… is too long: it has {len(os.fsencode(final.name))} bytes, and file systems "
            f"take {LONGEST_NAME}. Choose a shorter one."
        )
    if final == Path.cwd():
        raise OutputError("the output would replace the current folder. Choose a folder inside it.")
    if final.exists() and not final.is_dir():
        raise OutputError(f"{final.name} is a file; the output needs a folder.")
    if not final.exists() or not any(final.iterdir()):
        return
    if not (final / marker).exists():
        raise OutputError(f"the folder {final.name} holds other files (no {marker}). Choose a new or empty folder.")
    if not overwrite:
        raise OutputError(f"the folder {final.name} already holds an output. Pass overwrite=True to replace it.")
    if Path(output).is_symlink():
        raise OutputError(
            f"{Path(output).name} is a link to a folder that already holds an output. Name that folder itself to "
            "replace it."
        )
    check_nothing_foreign(final, marker)


def remove_output(output: Path, marker: str) -> None:
    """Remove an earlier output, if there is one. What is refused is what `new_folder` would refuse to replace."""
    check_replaceable(output, marker, overwrite=True)
    if output.exists():
        remove_folder(output)


def publish(part: Path, output: Path) -> None:
    """Give a finished folder its final name, in place of an earlier output."""
    old = _replaced(output)
    remove_mark(part)
    try:
        if output.exists() and any(output.iterdir()):
            output.rename(old)
        elif output.exists():  # Windows renames nothing to a name that is taken, not even by an empty folder
            output.rmdir()
        part.rename(output)
    except BaseException:
        if old.exists() and not output.exists():
            old.rename(output)
        raise
    sync(output.parent)
    _discard(old)


def _discard(folder: Path) -> None:
    """Remove a folder of ours if it is there and can be; else the next run does."""
    with suppress(OSError):
        remove_folder(folder)


def _replaced(output: Path) -> Path:
    """Where an earlier output is for the moment between two renames."""
    return hidden_beside(output, ".replaced")


def _bring_back(output: Path, marker: str) -> None:
    """End an interrupted replacement: an earlier output gets its name again, or goes if there is a new one."""
    old = _replaced(output)
    if not os.path.lexists(old):
        return
    check_ours(old, marker)
    if output.exists() or is_marked(old):
        remove_folder(old)
    else:
        old.rename(output)


def bytes_on_disk(folder: Path) -> int:
    """How much of the disk the files of a folder take: less than their sizes, if parts were never written."""
    stats = [path.lstat() for path in folder.iterdir()]
    # Windows counts no blocks, and gives a file all of its size at once.
    return sum(stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size for stat in stats)
