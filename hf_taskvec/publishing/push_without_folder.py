"""Pushing without a folder of the user's: a vector, an adapter, or a merged model.

A vector and an adapter are written to a temporary folder, pushed from there by `push_folder`, and removed. Of a merged
model no more than a shard is on the disk: it is uploaded when it is complete and makes room for the next one, and a
base on the Hub is read by byte range.
"""

import hashlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hf_taskvec._version import __version__
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.to_checkpoint import MergeOptions, apply
from hf_taskvec.distributed import is_launched
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.filenames import PUSHES
from hf_taskvec.hub_client import hub_api
from hf_taskvec.hub_names import is_folder, split_revision
from hf_taskvec.publishing.hub_commit import errors_in_words
from hf_taskvec.publishing.push import CommitOptions, Pushed, PushOptions, check_repository, push_folder
from hf_taskvec.publishing.uploaded_shards import ShardUploads


class StreamedPushOptions(MergeOptions, CommitOptions, total=False):
    """What `apply` takes with `push_to`."""

    work_folder: str | Path | None


def push_written(write: Callable[[Path], object], repo_id: str, options: PushOptions) -> Pushed:
    """Push what `write` writes to a folder, which is there for that long."""
    check_repository(repo_id)
    _check_options(options)
    with tempfile.TemporaryDirectory(prefix="taskvec-") as temporary:
        folder = Path(temporary) / "pushed"
        write(folder)
        return push_folder(folder, repo_id, **options)


def push_merged(
    vector: TaskVector,
    base: str | Path,
    push_to: str,
    options: MergeOptions,
    commit: CommitOptions,
    work_folder: str | Path | None = None,
) -> Pushed:
    """Push the model `base + scale * vector`, shard by shard: neither memory nor disk holds it.

    See `TaskVector.apply`, whose `push_to` this is.
    """
    if is_launched():
        raise UnsupportedError(
            "several processes are running: call apply() in all of them, then push_folder() in the main one."
        )
    repo_id, branch = split_revision(push_to)
    check_repository(repo_id)
    _check_options(commit)
    token = options.get("token")
    options["revision"] = _commit_of(base, options.get("revision"), token)
    made_of = [repo_id, branch, str(base), vector.fingerprint]
    said = ("revision", "scale", "dtype", "requantise", "tokenizer", "max_shard_size")
    made_of += [str(options.get(each)) for each in said]
    key = hashlib.sha256(json.dumps([__version__, *made_of]).encode()).hexdigest()
    folder = _unfinished_pushes(work_folder) / f"taskvec-push-{key[:16]}"
    if not folder.exists():  # else everything was uploaded already, and the commit is missing
        uploads = ShardUploads(hub_api(token), repo_id, commit.get("private"), branch, commit.get("create_pr", False))
        apply(vector, base, folder, stream=True, take=uploads.take, **options)
    pushed = push_folder(folder, repo_id, revision=branch, token=token, progress=options.get("progress"), **commit)
    shutil.rmtree(folder)
    return pushed


def _check_options(options: CommitOptions) -> None:
    """Let an option that does not exist be an error before anything is written or sent."""
    inspect.signature(push_folder).bind("", "", **options)


def _unfinished_pushes(work_folder: str | Path | None) -> Path:
    """Where a push has its shard, and what tells an interrupted one how far it came."""
    from huggingface_hub.constants import HF_ASSETS_CACHE

    return Path(HF_ASSETS_CACHE, *PUSHES) if work_folder is None else Path(work_folder)


def _commit_of(base: str | Path, revision: str | None, token: str | bool | None) -> str | None:
    """The commit of a base on the Hub, so that a push that is resumed reads the same one."""
    if is_folder(base):
        return revision
    name, revision = split_revision(str(base), revision)
    with errors_in_words(name):
        return hub_api(token).model_info(name.partition(":")[0], revision=revision).sha
