"""Pushing a vector without a folder of the user's: as itself, as a merged model or as an adapter.

Each is written to a temporary folder, pushed from there by `push_folder`, and removed.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.distributed import is_launched
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.publishing.push import Pushed, push_folder

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
    """Push the model `base + scale * vector`. It is streamed through a temporary folder, never held in memory.

    See `TaskVector.push_merged_to_hub`, which has the same options.
    """
    if is_launched():
        raise UnsupportedError(
            "several processes are running: call apply() in all of them, then push_folder() in the main one."
        )
    with tempfile.TemporaryDirectory(prefix="taskvec-", dir=work_folder) as temporary:
        written = vector.apply(
            base,
            Path(temporary) / "model",
            scale=scale,
            dtype=dtype,
            max_shard_size=max_shard_size,
            device=device,
            threads=threads,
            strict_base=strict_base,
            revision=base_revision,
            token=token,
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
