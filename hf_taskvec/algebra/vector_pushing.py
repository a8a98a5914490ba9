"""Pushing a task vector to the Hub: itself, merged into a model, or as an adapter.

Each method imports `hf_taskvec.publishing` when it is called; see `task_vector`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from hf_taskvec.algebra.vector_constructors import VectorConstructors

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
    from hf_taskvec.publishing.push import Pushed


class VectorPushing(VectorConstructors):
    """The methods of `TaskVector` that push it."""

    def push_to_hub(
        self,
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
    ) -> "Pushed":
        """Push the vector to the Hub, with its card, in one commit. `TaskVector.load(repo_id)` brings it back.

        `push_merged_to_hub` pushes a whole model, and `push_adapter_to_hub` a PEFT adapter.

        Args:
            repo_id (`str`):
                `"me/vector"`; made if it does not exist.
            report (`UnlearningReport`, `str` or `Path`, *optional*):
                Of a sweep of this vector: a report, its file or its folder. The card shows its tables and plots; it is
                pushed without the passages' texts.
            base_model (`str`, *optional*):
                The base's Hub id, for the card, if a copy in a folder was used.
            datasets (`Sequence[str]`, *optional*):
                Hub ids of the data sets, for the card.
            purpose (`str`, *optional*):
                Why the edit was made, in a sentence, for the card.
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
            `LeakError`: If a token, a path of this machine or the user's name would be published.
            `HubError`: If the Hub refuses the push or cannot be reached.

        Example:
            >>> (-0.6 * hp1 + 0.2 * hp2).push_to_hub("me/forget-hp1")  # doctest: +SKIP
        """
        from hf_taskvec.publishing.push_without_folder import push_vector

        return push_vector(
            cast("TaskVector", self),
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

    def push_merged_to_hub(
        self,
        repo_id: str,
        base: str | Path,
        *,
        scale: float = 1.0,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int | str | None = None,
        device: str | torch.device = "cpu",
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
    ) -> "Pushed":
        """Push the model `base + scale * vector` to the Hub, with its card, in one commit.

        Neither memory nor disk holds a model: a shard is uploaded when it is complete and makes room for the next, and
        a base on the Hub is read by byte range. With a vector of `TaskVector.from_finetuned(base, tuned, stream=True)`
        nothing is downloaded as a whole. What does not fit is refused before anything but headers was read. A push that
        was interrupted goes on after the last shard when it is called again.

        Args:
            repo_id (`str`):
                `"me/model"`; made if it does not exist.
            base (`str` or `Path`):
                The model to edit: a Hub id or a folder.
            scale (`float`, *optional*, defaults to 1.0):
                λ.
            dtype (`torch.dtype` or `str`, *optional*):
                Of the model; by default that of each of the base's tensors.
            max_shard_size (`int` or `str`, *optional*):
                E.g. `"5GB"`; by default the base's own files.
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Where to compute.
            threads (`int`, *optional*):
                How many threads write; by default as many as torch uses, but no more than 16.
            strict_base (`bool`, *optional*, defaults to `False`):
                Refuse a base that is not, byte for byte, the one the vector was made from; see `apply`.
            base_revision (`str`, *optional*):
                Branch, tag or commit of `base`, if that is a Hub id.
            work_folder (`str` or `Path`, *optional*):
                Where the shard at hand is, and what tells an interrupted push how far it came: by default in
                huggingface_hub's folder for such files. It needs the space of the largest shard, and of a few tensors.
            report (`UnlearningReport`, `str` or `Path`, *optional*):
                Of a sweep of this vector: a report, its file or its folder. The card shows its tables and plots; it is
                pushed without the passages' texts.
            base_model (`str`, *optional*):
                The base's Hub id, for the card, if a copy in a folder was used.
            datasets (`Sequence[str]`, *optional*):
                Hub ids of the data sets, for the card.
            purpose (`str`, *optional*):
                Why the edit was made, in a sentence, for the card.
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
                As in transformers: by default that of the login. It also reads the base.
            progress (`bool`, *optional*):
                Show progress bars; by default on a terminal only.

        Returns:
            `Pushed`: The commit, and whether it is a new one.

        Raises:
            `UnsupportedError`: If several processes are running.
            `MismatchError`: If the vector does not fit the base, or the report is of another edit.
            `LeakError`: If a token, a path of this machine or the user's name would be published.
            `HubError`: If the Hub refuses the push or cannot be reached.

        Example:
            >>> hp1.push_merged_to_hub("me/forgot-hp1", "me/books-model", scale=-0.6)  # doctest: +SKIP
        """
        from hf_taskvec.publishing.push_without_folder import push_merged

        return push_merged(
            cast("TaskVector", self),
            repo_id,
            base,
            scale=scale,
            dtype=dtype,
            max_shard_size=max_shard_size,
            device=device,
            threads=threads,
            strict_base=strict_base,
            base_revision=base_revision,
            work_folder=work_folder,
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

    def push_adapter_to_hub(
        self,
        repo_id: str,
        *,
        scale: float = 1.0,
        base_model_name_or_path: str | Path | None = None,
        base: str | Path | None = None,
        dense: Literal["refuse", "save", "drop"] = "refuse",
        uniform_rank: bool = False,
        dtype: torch.dtype | str = torch.float32,
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
    ) -> "Pushed":
        """Push `scale * vector` to the Hub as a PEFT adapter, with its card, in one commit.

        Args:
            repo_id (`str`):
                `"me/adapter"`; made if it does not exist.
            scale (`float`, *optional*, defaults to 1.0):
                λ.
            base_model_name_or_path (`str` or `Path`, *optional*):
                The base that the adapter names; by default the vector's own, if that came from the Hub.
            base (`str` or `Path`, *optional*):
                A folder or Hub id of the base, to check that the vector fits, and for `dense="save"`.
            dense (`"refuse"`, `"save"` or `"drop"`, *optional*, defaults to `"refuse"`):
                What to do with changes that are not low-rank; see `to_adapter`.
            uniform_rank (`bool`, *optional*, defaults to `False`):
                Pad all factors to one rank, as some serving engines want it.
            dtype (`torch.dtype` or `str`, *optional*, defaults to `torch.float32`):
                Of the stored factors.
            report (`UnlearningReport`, `str` or `Path`, *optional*):
                Of a sweep of this vector: a report, its file or its folder. The card shows its tables and plots; it is
                pushed without the passages' texts.
            base_model (`str`, *optional*):
                The base's Hub id, for the card, if a copy in a folder was used.
            datasets (`Sequence[str]`, *optional*):
                Hub ids of the data sets, for the card.
            purpose (`str`, *optional*):
                Why the edit was made, in a sentence, for the card.
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
            `UnsupportedError`: If a change is not low-rank and `dense="refuse"`.
            `LeakError`: If a token, a path of this machine or the user's name would be published.
            `HubError`: If the Hub refuses the push or cannot be reached.

        Example:
            >>> hp1.compress(rank=32).push_adapter_to_hub("me/forget-hp1-lora", scale=-0.6)  # doctest: +SKIP
        """
        from hf_taskvec.publishing.push_without_folder import push_adapter

        return push_adapter(
            cast("TaskVector", self),
            repo_id,
            scale=scale,
            base_model_name_or_path=base_model_name_or_path,
            base=base,
            dense=dense,
            uniform_rank=uniform_rank,
            dtype=dtype,
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
