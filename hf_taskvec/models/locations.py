"""Finding a model, an adapter or a vector: in a folder of this machine, or on the Hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hf_taskvec.errors import MissingFileError
from hf_taskvec.hub_names import is_folder, may_be_hub_id, split_revision


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
            A folder, or a Hub id (`me/model`, `me/model@revision`). A folder that exists is never taken for an id.
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
        return LocatedFolder(folder, folder.resolve().name, None)
    if isinstance(where, Path) or not may_be_hub_id(where):
        raise MissingFileError(f"there is no folder {folder.name[:255]!r} at the given path.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    where, revision = split_revision(where, revision)
    try:
        found = snapshot_download(where, revision=revision, token=token, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise MissingFileError(
            f"{where!r} is neither a folder here nor a repository that the Hub gave ({type(error).__name__}: {reason})."
        ) from None
    return LocatedFolder(Path(found), where, Path(found).name)
