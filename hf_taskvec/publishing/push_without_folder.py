"""Pushing a vector without a folder of the user's: as itself, as a merged model or as an adapter.

A vector and an adapter are written to a temporary folder, pushed from there by `push_folder`, and removed. Of a merged
model no more than a shard is on the disk: it is uploaded when it is complete and makes room for the next one, and a
base on the Hub is read by byte range.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from huggingface_hub import HfApi

from hf_taskvec._version import __version__
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.to_checkpoint import apply
from hf_taskvec.distributed import is_launched
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.filenames import PUSHES
from hf_taskvec.hub_names import is_folder, split_revision
from hf_taskvec.publishing.hub_commit import errors_in_words
from hf_taskvec.publishing.push import Pushed, check_repository, push_folder
from hf_taskvec.publishing.uploaded_shards import ShardUploads

if TYPE_CHECKING:
    import torch

    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport


def push_merged(
    vector: TaskVector,
    repo_id: str,
    base: str | Path,
    *,
    scale: float = 1.0,
    dtype: "torch.dtype | str | None" = None,
    max_shard_size: int | str | None = None,
    device: "str | torch.device" = "cpu",
    threads: int | None = None,
    strict_base: bool = False,
    base_revision: str | None = None,
    work_folder: str | Path | None = None,
    report: "UnlearningReport | str | Path | None" = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    purpose: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Pushed:
    """Push the model `base + scale * vector`, shard by shard: neither memory nor disk holds it.

    See `TaskVector.push_merged_to_hub`, which has the same options.
    """
    if is_launched():
        raise UnsupportedError(
            "several processes are running: call apply() in all of them, then push_folder() in the main one."
        )
    check_repository(repo_id)
    base_revision = _commit_of(base, base_revision, token)
    made_of = [
        repo_id,
        str(base),
        base_revision,
        vector.fingerprint,
        float(scale),
        str(dtype),
        max_shard_size,
        revision,
    ]
    key = hashlib.sha256(json.dumps([__version__, *made_of]).encode()).hexdigest()
    folder = _unfinished_pushes(work_folder) / f"taskvec-push-{key[:16]}"
    if not folder.exists():  # else everything was uploaded already, and the commit is missing
        apply(
            vector,
            base,
            folder,
            scale=scale,
            dtype=dtype,
            max_shard_size=max_shard_size,
            device=device,
            threads=threads,
            strict_base=strict_base,
            revision=base_revision,
            token=token,
            progress=progress,
            stream=True,
            take=ShardUploads(HfApi(token=token), repo_id, private, revision, create_pr).take,
        )
    pushed = push_folder(
        folder,
        repo_id,
        report=report,
        base_model=base_model,
        datasets=datasets,
        purpose=purpose,
        private=private,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message,
        commit_description=commit_description,
        token=token,
        progress=progress,
    )
    shutil.rmtree(folder)
    return pushed


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
        return HfApi(token=token).model_info(name.partition(":")[0], revision=revision).sha


def push_adapter(
    vector: TaskVector,
    repo_id: str,
    *,
    scale: float = 1.0,
    base_model_name_or_path: str | Path | None = None,
    base: str | Path | None = None,
    dense: Literal["refuse", "save", "drop"] = "refuse",
    uniform_rank: bool = False,
    dtype: "torch.dtype | str" = "float32",
    report: "UnlearningReport | str | Path | None" = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    purpose: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Pushed:
    """Push `scale * vector` as a PEFT adapter.

    See `TaskVector.push_adapter_to_hub`, which has the same options.
    """
    with tempfile.TemporaryDirectory(prefix="taskvec-") as temporary:
        written = vector.to_adapter(
            Path(temporary) / "adapter",
            base_model_name_or_path,
            base=base,
            dense=dense,
            uniform_rank=uniform_rank,
            dtype=dtype,
            scale=scale,
            progress=progress,
        )
        return push_folder(
            written,
            repo_id,
            report=report,
            base_model=base_model,
            datasets=datasets,
            purpose=purpose,
            private=private,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            commit_description=commit_description,
            token=token,
            progress=progress,
        )


def push_vector(
    vector: TaskVector,
    repo_id: str,
    *,
    report: "UnlearningReport | str | Path | None" = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    purpose: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Pushed:
    """Push the vector itself; `TaskVector.load(repo_id)` brings it back.

    See `TaskVector.push_to_hub`, which has the same options.
    """
    with tempfile.TemporaryDirectory(prefix="taskvec-") as temporary:
        folder = Path(temporary) / "vector"
        vector.save(folder, progress=progress)
        return push_folder(
            folder,
            repo_id,
            report=report,
            base_model=base_model,
            datasets=datasets,
            purpose=purpose,
            private=private,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            commit_description=commit_description,
            token=token,
            progress=progress,
        )
