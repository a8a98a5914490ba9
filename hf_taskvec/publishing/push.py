"""Pushing to the Hub: a merged model, an adapter or a task vector, with its card and report, in one commit.

Whatever is pushed lies in a folder first, so no model is ever in memory; files go from the disk to the Hub. Content
that the Hub has already is not sent again, and a push that changes nothing makes no commit.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, HubError, LeakError, UnsupportedError
from hf_taskvec.filenames import ADAPTER_CONFIG, CONFIG, VECTOR_RECORD
from hf_taskvec.json_files import read_json
from hf_taskvec.publishing.card_evaluation import find_report, published_report
from hf_taskvec.publishing.model_card import card_for, check_card
from hf_taskvec.publishing.privacy import check_secrets, check_text
from hf_taskvec.publishing.written_folder import COMMAND, REPORT, Artifact, open_artifact

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

# Weights of an earlier push that the new one does not have would be loaded instead of it, or beside it.
_WEIGHTS = {
    "model": ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*"),
    "adapter": ("adapter_model*",),
    "vector": ("taskvec*.safetensors",),
}
# Where transformers and PEFT note the path that something was loaded from.
_ORIGINS = ("_name_or_path", "name_or_path", "base_model_name_or_path")
_NOTED_IN = (CONFIG, "tokenizer_config.json", ADAPTER_CONFIG, "generation_config.json")
_READABLE = {".json", ".md", ".txt", ".yaml", ".yml", ".toml", ".cfg", ".py", ".csv", ".jinja", ".svg", ".html"}
_VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")  # pieces of any text, none of them ours
_LARGEST_READ = 5_000_000


@dataclass(frozen=True)
class Pushed:
    """What came of a push."""

    repo_id: str
    commit: str
    url: str
    #: False if the Hub had it all: then `commit` is the one that was there
    changed: bool
    pull_request: str | None = None


def check_repository(repo_id: str) -> None:
    """Refuse what cannot be the name of a Hub repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise BadValueError(f"{repo_id!r} is not a name for a Hub repository: {str(error).splitlines()[0]}") from None


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    report: "UnlearningReport | str | Path | None" = None,
    base_model: str | None = None,
    datasets: tuple[str, ...] = (),
    purpose: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Pushed:
    """Push a folder that `apply`, `to_adapter` or `save` wrote: all of it in one commit, or nothing.

    The folder's README.md is its card; without one a card is made. It is checked before anything is sent, and so are
    the other files that a person can read: no token and no path of this machine leaves.

    Args:
        folder: what to push. Hidden files, unfinished outputs and a sweep's store stay here.
        repo_id: `"me/model"`; made if it does not exist.
        report: of the sweep that chose this edit: an `UnlearningReport`, its file or folder; by default what the folder
            has under `report/`. It is pushed without the passages' texts, which may be under copyright.
        base_model: the base's Hub id, for the card, if a copy in a folder was used.
        datasets: Hub ids of the data sets, for the card.
        purpose: why the edit was made, in a sentence, for the card.
        private: make a new repository private. A public one is refused then, not pushed to.
        revision: the branch; made if it does not exist.
        create_pr: open a pull request instead of committing to the branch.
        commit_message, commit_description, token: as in transformers.
        progress: show progress bars; by default on a terminal.
    """
    from huggingface_hub import HfApi

    check_repository(repo_id)
    artifact = open_artifact(folder)
    files = what_is_pushed(
        folder, repo_id, report=report, base_model=base_model, datasets=datasets, purpose=purpose, token=token
    )
    api = HfApi(token=token)
    message = commit_message or f"Push {_WORDS[artifact.kind]}: {artifact.provenance.expression}"[:72]
    with _in_words(repo_id), _bars(progress):
        head = _repository(api, repo_id, private, revision)
        operations: list[Any] = [*_additions(files), *_deletions(artifact, files, head.files)]
        done = api.create_commit(
            repo_id,
            operations,
            commit_message=message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            parent_commit=head.sha,  # what is stale or unchanged was decided by looking at this one
        )
    return Pushed(repo_id, done.oid, str(done.commit_url), done.oid != head.sha, done.pr_url)


def push_merged(
    vector: TaskVector,
    base: str | Path,
    repo_id: str,
    *,
    scale: float = 1.0,
    work_folder: str | Path | None = None,
    apply_options: dict[str, Any] | None = None,
    **options: Any,
) -> Pushed:
    """Push the model `base + scale * vector`. It is streamed through a temporary folder, never held in memory.

    Args:
        base: as for `TaskVector.apply`, which also takes the `apply_options`.
        work_folder: where the temporary folder is made; it needs the room of one model.
        options: of `push_folder`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedError(
            "several processes are running: call apply() in all of them, then push_folder() in the main one."
        )
    with tempfile.TemporaryDirectory(prefix="taskvec-", dir=work_folder) as temporary:
        settings = {"token": options.get("token"), "progress": options.get("progress"), **(apply_options or {})}
        out = vector.apply(base, Path(temporary) / "model", scale=scale, **settings)
        return push_folder(out, repo_id, **options)


def push_adapter(
    vector: TaskVector,
    repo_id: str,
    *,
    scale: float = 1.0,
    adapter_options: dict[str, Any] | None = None,
    **options: Any,
) -> Pushed:
    """Push the vector as a PEFT adapter; `adapter_options` are those of `TaskVector.to_adapter`."""
    with tempfile.TemporaryDirectory(prefix="taskvec-") as temporary:
        out = vector.to_adapter(Path(temporary) / "adapter", scale=scale, **(adapter_options or {}))
        return push_folder(out, repo_id, **options)


def push_vector(vector: TaskVector, repo_id: str, **options: Any) -> Pushed:
    """Push the vector itself; `TaskVector.load(repo_id)` brings it back."""
    with tempfile.TemporaryDirectory(prefix="taskvec-") as temporary:
        vector.save(Path(temporary) / "vector")
        return push_folder(Path(temporary) / "vector", repo_id, **options)


_WORDS = {"model": "a merged model", "adapter": "an adapter", "vector": "a task vector"}


# What is sent.


def _check_portable(artifact: Artifact) -> None:
    """Refuse a vector that refers to folders of this machine: nobody else could load it, and it names their paths."""
    if artifact.kind != "vector":
        return
    homes = read_json(artifact.folder / VECTOR_RECORD).get("checkpoints", ())
    if local := [Path(home["where"]).name for home in homes if home["revision"] is None]:
        raise LeakError(
            f"{artifact.folder.name} is saved as a reference to folders of this machine ({', '.join(local)}), which nobody "
            "else has. Save the vector without reference=True, or push its models first and extract it from their Hub ids."
        )


def what_is_pushed(
    folder: str | Path,
    repo_id: str,
    *,
    report: "UnlearningReport | str | Path | None" = None,
    base_model: str | None = None,
    datasets: tuple[str, ...] = (),
    purpose: str | None = None,
    token: str | bool | None = None,
) -> dict[str, Path | bytes]:
    """Path in the repository -> a file or its content: all that `push_folder` would push, checked; nothing is sent."""
    artifact = open_artifact(folder)
    _check_portable(artifact)
    found = find_report(artifact, report)
    files: dict[str, Path | bytes] = {}
    for path in sorted(artifact.folder.rglob("*")):
        below = path.relative_to(artifact.folder)
        if path.is_file() and not any(part.startswith(".") or part == "store" for part in below.parts):
            files[below.as_posix()] = path
    for name in [name for name in files if name.split("/")[0] == REPORT]:
        del files[name]  # published anew, without texts
    if found is not None:
        files.update({f"{REPORT}/{name}": content for name, content in published_report(found).items()})
    if "README.md" in files:
        card = (artifact.folder / "README.md").read_text("utf-8")
        check_card(card, artifact)
    else:
        options: dict[str, Any] = {"base_model": base_model, "datasets": datasets, "purpose": purpose, "token": token}
        card = card_for(artifact, repo_id=repo_id, report=found, **options)
        files["README.md"] = card.encode()
    for name in _NOTED_IN:
        if name in files:
            files[name] = _without_paths(artifact.folder / name)
    if COMMAND in files and not _is_clean(artifact.folder / COMMAND):
        del files[COMMAND]
    _check_readable(files)
    return files


def _without_paths(path: Path) -> Path | bytes:
    """A config, without the note of a folder that it was loaded from."""
    config = read_json(path)
    noted = [key for key in _ORIGINS if isinstance(config.get(key), str) and not _is_hub_id(config[key])]
    if not noted:
        return path
    for key in noted:
        if key == "base_model_name_or_path":
            config[key] = None  # PEFT expects the key
        else:
            del config[key]
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _is_hub_id(name: str) -> bool:
    return (
        name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name and not Path(name).is_dir()
    )


def _is_clean(path: Path) -> bool:
    try:
        check_text(path.read_text("utf-8"), path.name)
    except LeakError:
        return False
    return True


def _check_readable(files: dict[str, Path | bytes]) -> None:
    for name, content in files.items():
        if Path(name).suffix not in _READABLE or name.rsplit("/", 1)[-1] in _VOCABULARIES:
            continue
        if isinstance(content, Path) and content.stat().st_size > _LARGEST_READ:
            continue
        data = content.read_bytes() if isinstance(content, Path) else content
        check_secrets(data.decode("utf-8", "replace"), name)


# How it is sent.


@dataclass(frozen=True)
class _Head:
    sha: str
    files: frozenset[str]


def _repository(api: "HfApi", repo_id: str, private: bool | None, revision: str | None) -> _Head:
    """The repository, made if need be, and where its branch stands."""
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    info = api.model_info(repo_id, revision=revision)
    if private and not info.private:
        raise HubError(f"{repo_id} exists and is public, so nothing was pushed. Make it private on the Hub first.")
    assert info.sha is not None
    return _Head(info.sha, frozenset(sibling.rfilename for sibling in info.siblings or ()))


def _additions(files: dict[str, Path | bytes]) -> Iterator["CommitOperationAdd"]:
    from huggingface_hub import CommitOperationAdd

    for name, content in files.items():
        yield CommitOperationAdd(name, content)


def _deletions(
    artifact: Artifact, files: dict[str, Path | bytes], present: frozenset[str]
) -> Iterator["CommitOperationDelete"]:
    from huggingface_hub import CommitOperationDelete

    for name in sorted(present - files.keys()):
        if any(fnmatch(name, pattern) for pattern in _WEIGHTS[artifact.kind]):
            yield CommitOperationDelete(name)


@contextmanager
def _bars(progress: bool | None) -> Iterator[None]:
    """huggingface_hub's progress bars, shown or not."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = not are_progress_bars_disabled()
    shown = (before and sys.stderr.isatty()) if progress is None else progress
    switch = {True: enable_progress_bars, False: disable_progress_bars}
    switch[shown]()
    try:
        yield
    finally:
        switch[before]()


_ADVICE = {
    401: "log in with `hf auth login`, or pass a token",
    403: "use a token that may write there, or another name",
    404: "check the name and the branch, and that your token may see it",
    409: "another change is under way there; push again",
    412: "somebody committed in the meantime; push again",
}


@contextmanager
def _in_words(repo_id: str) -> Iterator[None]:
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
            f"the Hub could not be reached to push to {repo_id} ({type(error).__name__}). Nothing was published; push again, "
            "and what was uploaded already is not sent again."
        ) from None
    except ValueError as error:
        if "Invalid metadata" not in str(error):
            raise
        raise HubError(f"the Hub does not accept the card ({str(error).splitlines()[-1].strip()}).") from None
