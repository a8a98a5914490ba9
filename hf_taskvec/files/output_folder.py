"""Output folders that appear only when they are complete."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hf_taskvec.atomic import sync
from hf_taskvec.errors import OutputError
from hf_taskvec.files.output_lock import only_writer


@contextmanager
def new_folder(output: str | Path, marker: str, overwrite: bool = False, resume: bool = False) -> Iterator[Path]:
    """A folder to write into, which gets its final name when the block ends without an exception.

    Only one process at a time writes to a folder; a second one is told so.

    Args:
        output (`str` or `Path`):
            Where the output shall appear.
        marker (`str`):
            A file that tells a folder of ours: only such a folder (or an empty one) is ever replaced.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an earlier output.
        resume (`bool`, *optional*, defaults to `False`):
            Keep what an interrupted run left in the unfinished folder, and leave it there on failure.

    Returns:
        `Path`: The unfinished folder, inside the block.

    Raises:
        `OutputError`: If the folder holds something else, is being written by another run, or cannot be written.
    """
    output = Path(output).resolve()
    check_replaceable(output, marker, overwrite)
    part = unfinished(output)
    with ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_writer(output))
            part.mkdir(exist_ok=True)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(
                f"cannot write to {output.name}: {error.strerror or error}. Choose another folder."
            ) from None
        try:
            _bring_back(output)
            check_replaceable(output, marker, overwrite)
            if not resume:
                _empty(part)
            yield part
            publish(part, output)
        except OSError as error:
            if not resume:
                shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, OutputError):
                raise
            raise OutputError(
                f"writing {output.name} failed: {error.strerror or error}. Nothing new was left under its name"
                + (", and a new run resumes where this one stopped." if resume else ".")
            ) from error
        except BaseException:
            if not resume:
                shutil.rmtree(part, ignore_errors=True)
            raise


def unfinished(output: Path) -> Path:
    """Where an output grows until it is complete."""
    return output.parent / f".{output.name}.unfinished"


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_replaceable(output: Path, marker: str, overwrite: bool) -> None:
    """Refuse to write over anything that is not an earlier output of the same kind."""
    if output == Path.cwd():
        raise OutputError("the output would replace the current folder. Choose a folder inside it.")
    if output.is_file():
        raise OutputError(f"{output.name} is a file; the output needs a folder.")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / marker).exists():
        raise OutputError(f"the folder {output.name} holds other files (no {marker}). Choose a new or empty folder.")
    if not overwrite:
        raise OutputError(f"the folder {output.name} already holds an output. Pass overwrite=True to replace it.")


def publish(part: Path, output: Path) -> None:
    """Give a finished folder its final name, in place of an earlier output."""
    old = _replaced(output)
    if old.exists():
        shutil.rmtree(old)
    try:
        if output.exists() and any(output.iterdir()):
            output.rename(old)
        elif output.exists():  # Windows renames nothing to a name that is taken, not even by an empty folder
            output.rmdir()
        part.rename(output)
    except BaseException:
        _bring_back(output)
        raise
    sync(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def _replaced(output: Path) -> Path:
    """Where an earlier output is for the moment between two renames."""
    return output.parent / f".{output.name}.replaced"


def _bring_back(output: Path) -> None:
    """Give an earlier output its name again, if replacing it was interrupted."""
    if _replaced(output).exists() and not output.exists():
        _replaced(output).rename(output)


def bytes_on_disk(folder: Path) -> int:
    """How much of the disk the files of a folder take: less than their sizes, if parts were never written."""
    stats = [path.stat() for path in folder.iterdir()]
    # Windows counts no blocks, and gives a file all of its size at once.
    return sum(stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size for stat in stats)
