"""Pushing a folder to the Hub: a merged model, an adapter or a task vector, with its card and report, in one commit.

Whatever is pushed lies in a folder first, so no model is ever in memory; files go from the disk to the Hub. Content
that the Hub has already is not sent again, and a push that changes nothing makes no commit.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from hf_taskvec.errors import BadValueError, some
from hf_taskvec.hub_client import hub_api
from hf_taskvec.models.folder_contents import ContentKind
from hf_taskvec.progress import library_bars
from hf_taskvec.publishing.eval_results import HubScores
from hf_taskvec.publishing.hub_commit import additions, deletions, errors_in_words, open_branch
from hf_taskvec.publishing.pushed_files import files_to_push
from hf_taskvec.publishing.uploaded_shards import uploaded_additions, uploaded_shard
from hf_taskvec.publishing.written_folder import open_artifact

if TYPE_CHECKING:
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

# Weights of an earlier push that the new one does not have would be loaded instead of it, or beside it.
_WEIGHTS: dict[ContentKind, tuple[str, ...]] = {
    "model": ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*"),
    "adapter": ("adapter_model*",),
    "vector": ("taskvec*.safetensors",),
}
_WORDS: dict[ContentKind, str] = {"model": "a merged model", "adapter": "an adapter", "vector": "a task vector"}


class CommitOptions(TypedDict, total=False):
    """What a commit and its card can be told; `push_folder` says what each of them is."""

    report: "UnlearningReport | str | Path | None"
    benchmarks: Sequence[HubScores]
    base_model: str | None
    datasets: Sequence[str]
    purpose: str | None
    private: bool | None
    create_pr: bool
    commit_message: str | None
    commit_description: str | None


class PushOptions(CommitOptions, total=False):
    """What every push can be told; `push_folder` says what each of them is."""

    revision: str | None
    token: str | bool | None
    progress: bool | None


@dataclass(frozen=True)
class Pushed:
    """What came of a push.

    Args:
        repo_id (`str`):
            The repository.
        commit (`str`):
            The commit's full hash: a `revision` that stays what it is.
        url (`str`):
            The commit's page.
        changed (`bool`):
            `False` if the Hub had it all: then `commit` is the one that was there.
        pull_request (`str`, *optional*):
            The page of the pull request, with `create_pr=True`.
        left_out (`tuple[str, ...]`, *optional*):
            Files of the folder that are no part of what was pushed.
    """

    repo_id: str
    commit: str
    url: str
    changed: bool
    pull_request: str | None = None
    left_out: tuple[str, ...] = ()


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
    benchmarks: Sequence[HubScores] = (),
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    purpose: str | None = None,
    include: Sequence[str] = (),
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
    are all other files: no token, no key and no path of this machine is published, and no link is followed.

    Args:
        folder (`str` or `Path`):
            What to push. Hidden files and a sweep's store are left out, and so is what is no part of a model, an
            adapter or a vector, with a warning that names it.
        repo_id (`str`):
            `"me/model"`; made if it does not exist.
        report (`UnlearningReport`, `str` or `Path`, *optional*):
            Of the sweep that chose this edit: a report, its file or its folder; by default what the folder has under
            `report/`. It is pushed without the passages' texts, which may be under copyright.
        benchmarks (`Sequence[BenchmarkReport]`, *optional*):
            Of named benchmarks on this very model. Their metrics, and those of lm-eval's tasks in `report`, go into
            `.eval_results/`, from which the Hub makes leaderboards.
        base_model (`str`, *optional*):
            The base's Hub id, for the card, if a copy in a folder was used.
        datasets (`Sequence[str]`, *optional*):
            Hub ids of the data sets, for the card.
        purpose (`str`, *optional*):
            Why the edit was made, in a sentence, for the card.
        include (`Sequence[str]`, *optional*):
            Names or patterns of other files in the folder to push as well, e.g. `["recipe.yaml"]`.
        private (`bool`, *optional*):
            Make a new repository private. A public one is refused then, not pushed to.
        revision (`str`, *optional*):
            The branch; made if it does not exist.
        create_pr (`bool`, *optional*, defaults to `False`):
            Open a pull request instead of committing to the branch.
        commit_message (`str`, *optional*):
            By default it says what is pushed, with the vector's expression.
        commit_description (`str`, *optional*):
            The body of the commit's message.
        token (`str` or `bool`, *optional*):
            As in transformers: by default that of the login.
        progress (`bool`, *optional*):
            Show progress bars; by default on a terminal only.

    Returns:
        `Pushed`: The commit, and whether it is a new one.

    Raises:
        `MissingFileError`: If the folder holds nothing that this library wrote.
        `MismatchError`: If the report is of another edit.
        `LeakError`: If a token, a path of this machine or the user's name would be published.
        `BadValueError`: If the card's metadata is wrong, or `repo_id` is no name for a repository.
        `HubError`: If the Hub refuses the push or cannot be reached.

    Example:
        >>> from hf_taskvec.publishing import push_folder
        >>> folder = vector.apply("me/books-model", "forgot", scale=-0.6)  # doctest: +SKIP
        >>> push_folder(folder, "me/forgot", report="report").url  # doctest: +SKIP
        'https://huggingface.co/me/forgot/commit/...'
    """
    from huggingface_hub import utils

    check_repository(repo_id)
    artifact = open_artifact(folder)
    sent = files_to_push(
        artifact,
        repo_id,
        report=report,
        benchmarks=benchmarks,
        base_model=base_model,
        datasets=datasets,
        purpose=purpose,
        include=include,
        token=token,
    )
    if sent.left_out:
        warnings.warn(
            f"left out of the push, since they are no part of {_WORDS[artifact.kind]}: {some(sent.left_out, 10)}. "
            "include=[...] pushes them, too.",
            stacklevel=2,
        )
    uploaded = {
        name: shard
        for name, content in sent.files.items()
        if isinstance(content, Path) and (shard := uploaded_shard(content)) is not None
    }
    api = hub_api(token)
    message = commit_message or f"Push {_WORDS[artifact.kind]}: {artifact.provenance.expression}"[:72]
    with errors_in_words(repo_id), library_bars(progress, utils):
        head = open_branch(api, repo_id, private, revision)
        operations: list[Any] = [
            *additions({name: content for name, content in sent.files.items() if name not in uploaded}),
            *uploaded_additions(api, repo_id, revision, uploaded),
            *deletions(_WEIGHTS[artifact.kind], sent.files, head.files),
        ]
        done = api.create_commit(
            repo_id,
            operations,
            commit_message=message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            parent_commit=head.sha,  # what is stale or unchanged was decided by looking at this one
        )
    return Pushed(repo_id, done.oid, str(done.commit_url), done.oid != head.sha, done.pr_url, sent.left_out)
