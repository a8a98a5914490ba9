"""Finding a model, an adapter or a vector: in a folder of this machine, or on the Hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hf_taskvec.errors import MissingFileError
from hf_taskvec.hub_client import hub_api
from hf_taskvec.hub_names import is_folder, may_be_hub_id, split_revision, split_subfolder


@dataclass(frozen=True)
class Location:
    """Where a file can be found again: a Hub id with its commit, or a folder."""

    where: str
    revision: str | None = None


class LocatedFolder(NamedTuple):
    """A folder of this machine with the files that were asked for."""

    path: Path
    #: the Hub id, or the folder's own name
    name: str
    #: on the Hub
    commit: str | None


def locate(where: str | Path, revision: str | None, token: str | bool | None, patterns: list[str]) -> LocatedFolder:
    """The local folder of a folder or a Hub id, whose files are downloaded if need be.

    Args:
        where (`str` or `Path`):
            A folder, or a Hub id (`me/model`, `me/model@revision`), which may name a folder in the repository
            (`me/model:checkpoint-100`). A folder that exists is never taken for an id. That of a repository in the
            Hub's cache stands for the snapshot of its main branch.
        revision (`str`, *optional*):
            A branch, tag or commit on the Hub.
        token (`str` or `bool`, *optional*):
            For private repositories, as in transformers.
        patterns (`list[str]`):
            The files to download.

    Raises:
        `MissingFileError`: If there is neither such a folder nor such a repository.
    """
    folder = Path(where)
    if is_folder(folder):
        return _cached(folder) or LocatedFolder(folder, folder.resolve().name, None)
    if isinstance(where, Path) or not may_be_hub_id(where):
        raise MissingFileError(f"there is no folder {folder.name[:255]!r} at the given path.")
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    where, revision = split_revision(where, revision)
    repository, inside = split_subfolder(where)
    wanted = patterns if inside is None else [f"{inside}/{pattern}" for pattern in patterns]
    try:
        found = hub_api(token).snapshot_download(repository, revision=revision, allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise MissingFileError(
            f"{where!r} is neither a folder here nor a repository that the Hub gave ({type(error).__name__}: {reason})."
        ) from None
    path, commit = Path(found, inside or ""), Path(found).name
    if inside is not None and not path.is_dir():
        raise MissingFileError(f"{repository!r} has no folder {inside!r} on the Hub, or none of a model's files in it.")
    return LocatedFolder(path, where, commit)


def _cached(folder: Path) -> LocatedFolder | None:
    """The snapshot of the main branch, if a folder is that of a repository in the Hub's cache."""
    kind, _, name = folder.resolve().name.partition("--")
    main = folder / "refs" / "main"
    if kind != "models" or not main.is_file():
        return None
    commit = main.read_text("utf-8", "replace").strip()
    snapshot = folder / "snapshots" / (commit if commit.isalnum() else "")
    if snapshot.resolve().parent != (folder / "snapshots").resolve() or not snapshot.is_dir():
        raise MissingFileError(f"{folder.name} in the Hub's cache has no snapshot of its main branch. Give another.")
    return LocatedFolder(snapshot, name.replace("--", "/"), None)
