"""One commit on the Hub: where the branch stands, what is added and removed, and errors in words."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from hf_taskvec.errors import HubError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi


@dataclass(frozen=True)
class BranchHead:
    """The newest commit of a branch, and the files that it has."""

    sha: str
    files: frozenset[str]


def open_branch(api: "HfApi", repo_id: str, private: bool | None, revision: str | None) -> BranchHead:
    """Where a branch stands; the repository and the branch are made if need be."""
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    info = api.model_info(repo_id, revision=revision)
    if private and not info.private:
        raise HubError(f"{repo_id} exists and is public, so nothing was pushed. Make it private on the Hub first.")
    assert info.sha is not None
    return BranchHead(info.sha, frozenset(sibling.rfilename for sibling in info.siblings or ()))


def additions(files: Mapping[str, Path | bytes]) -> Iterator["CommitOperationAdd"]:
    """The operations that add or replace files."""
    from huggingface_hub import CommitOperationAdd

    for name, content in files.items():
        yield CommitOperationAdd(name, content)


def deletions(
    patterns: tuple[str, ...], files: Mapping[str, Path | bytes], present: frozenset[str]
) -> Iterator["CommitOperationDelete"]:
    """The operations that remove what the branch has under one of the patterns, and the files have not."""
    from huggingface_hub import CommitOperationDelete

    for name in sorted(present - files.keys()):
        if any(fnmatch(name, pattern) for pattern in patterns):
            yield CommitOperationDelete(name)


_ADVICE = {
    401: "log in with `hf auth login`, or pass a token",
    403: "use a token that may write there, or another name",
    404: "check the name and the branch, and that your token may see it",
    409: "another change is under way there; push again",
    412: "somebody committed in the meantime; push again",
}


@contextmanager
def errors_in_words(repo_id: str) -> Iterator[None]:
    """Turn what the client raises into one sentence; nothing of the request, and so no token, is shown."""
    # `HTTPError` is the base class of the HTTP client that huggingface_hub uses, which changes with its version.
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = _ADVICE.get(status, "try again: what was uploaded is kept")
        said = (error.server_message or "").strip().rstrip(".")
        raise HubError(
            f"the Hub refused the push to {repo_id} ({status}{': ' if said else ''}{said}): {advice}."
        ) from None
    except (HTTPError, ConnectionError, TimeoutError) as error:
        raise HubError(
            f"the Hub could not be reached to push to {repo_id} ({type(error).__name__}). Nothing was published; push "
            "again, and what was uploaded already is not sent again."
        ) from None
    except ValueError as error:
        if "Invalid metadata" not in str(error):
            raise
        raise HubError(f"the Hub does not accept the card ({str(error).splitlines()[-1].strip()}).") from None
