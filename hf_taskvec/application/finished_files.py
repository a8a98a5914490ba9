"""Which files of an output are complete: what an interrupted run can be resumed from."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hf_taskvec.atomic import write_text
from hf_taskvec.errors import CorruptFileError, MissingFileError
from hf_taskvec.files.own_folder import clear
from hf_taskvec.json_files import read_json
from hf_taskvec.quantised.requantising import Requantised
from hf_taskvec.typed_values import typed

_PROGRESS = ".progress.json"


@dataclass(frozen=True)
class _Note:
    """What an interrupted run was doing, and the digests of the files that it finished."""

    job: str
    files: dict[str, str]
    requantised: dict[str, Requantised]


class FinishedFiles:
    """The complete files of an unfinished output folder, noted in that folder with a digest of each.

    Args:
        folder (`Path`):
            Where the output grows.
        job (`str`):
            What the output is; another job does not take its files over.
        digests (`dict[str, str]`, *optional*):
            The files that are complete already, each with its digest.
        requantised (`dict[str, Requantised]`, *optional*):
            What is known of the weights that are stored in fewer bits there.

    """

    def __init__(
        self,
        folder: Path,
        job: str,
        digests: dict[str, str] | None = None,
        requantised: dict[str, Requantised] | None = None,
    ) -> None:
        self._folder, self._job, self._digests = folder, job, dict(digests or {})
        #: what is known of the weights that are stored in fewer bits in the complete files
        self.requantised = dict(requantised or {})

    @classmethod
    def of_interrupted_run(cls, folder: Path, job: str, files: Collection[str]) -> "FinishedFiles":
        """What an interrupted run of the same job finished of `files`, checked by content; all else is removed."""
        noted = _noted(folder, job)
        digests = {
            file: digest
            for file, digest in noted.files.items()
            if file in files and _is_plain(folder / file) and _digest(folder / file) == digest
        }
        clear(folder, digests)
        finished = cls(folder, job, digests, noted.requantised)
        finished._write()
        return finished

    @classmethod
    def of_main_process(cls, folder: Path, job: str) -> "FinishedFiles":
        """What the main process has found and noted."""
        noted = _noted(folder, job)
        return cls(folder, job, noted.files, noted.requantised)

    def __contains__(self, file: str) -> bool:
        return file in self._digests

    def add(self, file: str, requantised: Mapping[str, Requantised]) -> None:
        """Note a file that is complete, and what is known of the weights that are stored in fewer bits there."""
        self._digests[file] = _digest(self._folder / file)
        self.requantised |= requantised
        self._write()

    def remove_note(self) -> None:
        """Remove the note, when the whole output is complete."""
        (self._folder / _PROGRESS).unlink()

    def _write(self) -> None:
        requantised = {name: each.to_dict() for name, each in self.requantised.items()}
        note = {"job": self._job, "files": self._digests, "requantised": requantised}
        write_text(self._folder / _PROGRESS, json.dumps(note))


def _noted(folder: Path, job: str) -> _Note:
    """The note, if there is one of this job that can be read."""
    try:
        noted = typed(_Note, read_json(folder / _PROGRESS))
    except (MissingFileError, CorruptFileError):
        return _Note(job, {}, {})
    return noted if noted.job == job else _Note(job, {}, {})


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _digest(path: Path) -> str:
    """A fast digest of a file's content. It finds damaged files; it is no protection against falsified ones."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
