"""What becomes of a task vector on a disk or on the Hub: itself, a model with it, or an adapter.

Each method imports the package that does the work when it is called; see `task_vector`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch

from hf_taskvec.algebra.rounding import parse_dtype
from hf_taskvec.algebra.vector_constructors import VectorConstructors
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.application.to_checkpoint import ApplyOptions, MergeOptions
    from hf_taskvec.publishing.push import CommitOptions, Pushed, PushOptions
    from hf_taskvec.publishing.push_without_folder import StreamedPushOptions


class VectorOutputs(VectorConstructors):
    """The methods of `TaskVector` that write it, or push it."""

    def save(
        self,
        output: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        reference: bool = False,
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
        progress: bool | None = None,
    ) -> Path:
        """Write the vector to a folder: `taskvec.json`, which a person can read, and safetensors files.

        Factors are stored as factors. Dense differences are stored without loss: in the smallest dtype in which they
        are exact, else as high and low parts. Of a full fine-tune that is saved whole, a digest of every byte of its
        base is recorded, by which `strict_base` knows it. The folder appears under its name when it is complete.

        Args:
            output (`str` or `Path`):
                The folder to write.
            dtype (`torch.dtype` or `str`, *optional*):
                Round dense changes to this dtype instead. `hf_taskvec.files.save_vector.rounding_errors` tells what
                that loses.
            reference (`bool`, *optional*, defaults to `False`):
                Store no tensors, only the ids, revisions and fingerprints of what the vector is made of. A reference
                to a model in a folder stores that folder's path, so it is of use on this machine only.
            overwrite (`bool`, *optional*, defaults to `False`):
                Replace a task vector that is already in the folder, if nothing of others is in it.
            max_shard_size (`int` or `str`, *optional*, defaults to `"5GB"`):
                The largest size of one file.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `Path`: The folder.

        Raises:
            `OutputError`: If the folder holds something else, or cannot be written.
            `UnsupportedError`: If a reference is asked for of something that is in no file.
        """
        from hf_taskvec.files.save_vector import save

        return save(
            cast("TaskVector", self),
            output,
            dtype=None if dtype is None else parse_dtype(dtype),
            reference=reference,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            progress=progress,
        )

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
        progress: bool | None = None,
    ) -> Path:
        """The same as `save`, by the name that transformers and PEFT have for it.

        Args:
            save_directory (`str` or `Path`):
                The folder to write.
            dtype (`torch.dtype` or `str`, *optional*):
                Round dense changes to this dtype; by default they are stored without loss.
            overwrite (`bool`, *optional*, defaults to `False`):
                Replace a task vector that is already in the folder, if nothing of others is in it.
            max_shard_size (`int` or `str`, *optional*, defaults to `"5GB"`):
                The largest size of one file.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `Path`: The folder.
        """
        return self.save(
            save_directory, dtype=dtype, overwrite=overwrite, max_shard_size=max_shard_size, progress=progress
        )

    @overload
    def apply(self, base: str | Path, output: str | Path, **options: "Unpack[ApplyOptions]") -> Path: ...

    @overload
    def apply(self, base: str | Path, *, push_to: str, **options: "Unpack[StreamedPushOptions]") -> "Pushed": ...

    def apply(
        self,
        base: str | Path,
        output: str | Path | None = None,
        *,
        push_to: str | None = None,
        scale: float = 1.0,
        dtype: torch.dtype | str | None = None,
        requantise: Literal["same", "bf16"] | None = None,
        tokenizer: Any = None,
        max_shard_size: int | str | None = None,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        overwrite: bool = False,
        strict_base: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        progress: bool | None = None,
        work_folder: str | Path | None = None,
        **commit: "Unpack[CommitOptions]",
    ) -> "Path | Pushed":
        """Write `base + scale * vector` as a complete model folder, or push it: streamed, no model is ever in memory.

        Every element is accumulated in fp64 and rounded once (see `algebra.sums.Sum` for where fp32 is enough). The
        folder appears under its name when it is complete; a run that was interrupted is resumed by calling it again.
        Under `accelerate launch` the processes share the work and write the same bytes as one would.

        With `push_to` the disk holds no model either: a shard is uploaded when it is complete and makes room for the
        next, a base on the Hub is read by byte range, and one commit at the end has it all, with its card. With a
        vector of `TaskVector.from_finetuned(base, tuned, stream=True)` nothing is downloaded as a whole. What does not
        fit is refused before anything but headers was read.

        Args:
            base (`str` or `Path`):
                A Hub id or a folder. It may be another model than the vector's own base, of the same architecture.
            output (`str` or `Path`, *optional*):
                The folder to write.
            push_to (`str`, *optional*):
                Instead of `output`: the repository on the Hub, `"me/model"` or `"me/model@branch"`; made if it does not
                exist.
            scale (`float`, *optional*, defaults to 1.0):
                λ.
            dtype (`torch.dtype` or `str`, *optional*):
                Of the result; by default that of each of the base's tensors.
            requantise (`"same"` or `"bf16"`, *optional*):
                Needed where the base stores weights in fewer bits (FP8, MXFP4, compressed-tensors, GPTQ, AWQ; GGUF).
                With `"same"` the edited weights are stored so again, and `taskvec_apply.json` tells for each what was
                left of its edit; with `"bf16"` the output is a model without quantisation.
            tokenizer (`PreTrainedTokenizerBase`, `str` or `Path`, *optional*):
                For vectors of `vocabulary="union"`: the base's tokenizer, by default the one beside it. With the tokens
                that it lacks it is written to the output.
            max_shard_size (`int` or `str`, *optional*):
                The largest size of one file, e.g. `"5GB"`; by default the base's own files.
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Where to compute.
            threads (`int`, *optional*):
                How many threads write, each with 10 to 15 MB of its own (more where a single row of a tensor has more
                than half a million elements); by default as many as torch uses, but no more than 16.
            overwrite (`bool`, *optional*, defaults to `False`):
                Replace an earlier output of `apply`, if nothing of others is in it. A push always makes a new commit.
            strict_base (`bool`, *optional*, defaults to `False`):
                Refuse a base that is not, byte for byte, the one the vector was made from. What the vector knows of its
                base decides: its files, if it was extracted from a folder or the Hub in this process; a digest of every
                byte, if a full fine-tune was extracted from a live base or saved whole; the Hub's own digests of files.
                Where only a name or samples are recorded, as of most adapters that were saved, it is refused.
            revision (`str`, *optional*):
                Branch, tag or commit of `base`, if that is a Hub id.
            token (`str` or `bool`, *optional*):
                As in transformers: for the base, and for the push.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.
            work_folder (`str` or `Path`, *optional*):
                With `push_to`: where the shard at hand is, and what tells an interrupted push how far it came. By
                default in huggingface_hub's folder for such files. It needs the space of the largest shard, and of a
                few tensors.
            commit (`CommitOptions`, *optional*):
                With `push_to`, what `push_to_hub` takes for the card and the commit: `report`, `base_model`,
                `datasets`, `purpose`, `private`, `create_pr`, `commit_message`, `commit_description`.

        Returns:
            `Path` or `Pushed`: The folder; with `push_to` the commit, and whether it is a new one.

        Raises:
            `MismatchError`: If the vector does not fit the base, or the report is of another edit.
            `ChangedSourceError`: If the base is not the vector's own, or the vector cannot tell, and `strict_base` is
                set.
            `OutputError`: If the folder holds something else, or cannot be written.
            `BadValueError`: If a result is not finite in its dtype, or an argument makes no sense.
            `LeakError`: If a token, a path of this machine or the user's name would be published.
            `HubError`: If the Hub refuses the push or cannot be reached.
            `UnsupportedError`: If several processes are running, and `push_to` is given.

        Example:
            >>> (-0.6 * hp1).apply("me/books-model", "forgot-hp1")  # doctest: +SKIP
            >>> hp1.apply("me/books-model", push_to="me/forgot-hp1", scale=-0.6)  # doctest: +SKIP
        """
        from hf_taskvec.application.to_checkpoint import apply

        vector = cast("TaskVector", self)
        options: MergeOptions = {
            "scale": scale,
            "dtype": dtype,
            "requantise": requantise,
            "tokenizer": tokenizer,
            "max_shard_size": max_shard_size,
            "device": device,
            "threads": threads,
            "strict_base": strict_base,
            "revision": revision,
            "token": token,
            "progress": progress,
        }
        if push_to is not None and output is None:
            if overwrite:
                raise BadValueError("overwrite= is for output=: a push adds a commit and loses nothing.")
            from hf_taskvec.publishing.push_without_folder import push_merged

            return push_merged(vector, base, push_to, options, commit, work_folder)
        if output is None or push_to is not None:
            raise BadValueError("apply() takes either output=, a folder, or push_to=, a repository on the Hub.")
        if commit or work_folder is not None:
            names = ", ".join(commit) or "work_folder"
            raise BadValueError(f"apply() takes {names} with push_to=, and writes a folder here. Leave it out.")
        return apply(vector, base, output, overwrite=overwrite, **options)

    def to_adapter(
        self,
        output: str | Path,
        base_model_name_or_path: str | Path | None = None,
        *,
        base: str | Path | None = None,
        dense: Literal["refuse", "save", "drop"] = "refuse",
        uniform_rank: bool = False,
        serve: Literal["vllm", "llama.cpp"] | None = None,
        dtype: torch.dtype | str = torch.float32,
        overwrite: bool = False,
        scale: float = 1.0,
        progress: bool | None = None,
    ) -> Path:
        """Export the vector as a PEFT adapter: at weight 1, the adapter *is* the vector (times `scale`).

        Args:
            output (`str` or `Path`):
                The folder to write.
            base_model_name_or_path (`str` or `Path`, *optional*):
                The base that the adapter names, so that `AutoPeftModelForCausalLM` finds it; by default the vector's
                own: a Hub id with its revision, else `base`, else the folder that it came from on this machine (a push
                replaces a folder by the Hub id that it is given). A vector of live models names none.
            base (`str` or `Path`, *optional*):
                A folder or Hub id of the base, to check that the vector fits, and for `dense="save"`; by default
                `base_model_name_or_path`.
            dense (`str`, *optional*, defaults to `"refuse"`):
                What to do with changes that are not low-rank (norms, biases, embeddings). PEFT can carry them only as
                whole values: `"save"` stores base + change (then the adapter cannot be scaled or negated), `"drop"`
                leaves them out, `"refuse"` raises and names them.
            uniform_rank (`bool`, *optional*, defaults to `False`):
                Pad all factors to one rank, as some serving engines want it.
            serve (`"vllm"` or `"llama.cpp"`, *optional*):
                Write what an engine takes, and refuse what it cannot. For vLLM: one rank of at most 512, and factors
                only; `hf_taskvec.application.max_lora_rank(output)` tells what to start it with. For llama.cpp (and
                Ollama): a GGUF file beside PEFT's, `adapter.gguf`, which is scaled when it is loaded.
            dtype (`torch.dtype` or `str`, *optional*, defaults to `torch.float32`):
                Of the stored factors.
            overwrite (`bool`, *optional*, defaults to `False`):
                Replace an earlier export in the folder (never an adapter that was trained there).
            scale (`float`, *optional*, defaults to 1.0):
                λ.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `Path`: The folder.

        Raises:
            `UnsupportedError`: If the vector has changes that are not low-rank, and `dense` is `"refuse"`.
            `OutputError`: If the folder holds something else, or cannot be written.
        """
        from hf_taskvec.application.to_adapter import to_adapter

        return to_adapter(
            cast("TaskVector", self),
            output,
            base_model_name_or_path,
            base=base,
            dense=dense,
            uniform_rank=uniform_rank,
            serve=serve,
            dtype=parse_dtype(dtype),
            overwrite=overwrite,
            scale=scale,
            progress=progress,
        )

    def push_to_hub(self, repo_id: str, **options: "Unpack[PushOptions]") -> "Pushed":
        """Push the vector to the Hub, with its card, in one commit. `TaskVector.load(repo_id)` brings it back.

        `apply(base, push_to=repo_id)` pushes a whole model, and `push_adapter_to_hub` a PEFT adapter.

        Args:
            repo_id (`str`):
                `"me/vector"`; made if it does not exist.
            options (`PushOptions`, *optional*):
                For the card and the commit, as in `push_folder`: `report`, `base_model`, `datasets`, `purpose`,
                `private`, `revision`, `create_pr`, `commit_message`, `commit_description`, `token`, `progress`.

        Returns:
            `Pushed`: The commit, and whether it is a new one.

        Raises:
            `LeakError`: If a token, a path of this machine or the user's name would be published.
            `HubError`: If the Hub refuses the push or cannot be reached.

        Example:
            >>> (-0.6 * hp1 + 0.2 * hp2).push_to_hub("me/forget-hp1", private=True)  # doctest: +SKIP
        """
        from hf_taskvec.publishing.push_without_folder import push_written

        return push_written(lambda folder: self.save(folder, progress=options.get("progress")), repo_id, options)

    def push_adapter_to_hub(
        self,
        repo_id: str,
        *,
        scale: float = 1.0,
        base_model_name_or_path: str | Path | None = None,
        base: str | Path | None = None,
        dense: Literal["refuse", "save", "drop"] = "refuse",
        uniform_rank: bool = False,
        serve: Literal["vllm", "llama.cpp"] | None = None,
        dtype: torch.dtype | str = torch.float32,
        **options: "Unpack[PushOptions]",
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
            serve (`"vllm"` or `"llama.cpp"`, *optional*):
                Write what an engine takes, and refuse what it cannot. For vLLM: one rank of at most 512, and factors
                only; `hf_taskvec.application.max_lora_rank(output)` tells what to start it with. For llama.cpp (and
                Ollama): a GGUF file beside PEFT's, `adapter.gguf`, which is scaled when it is loaded.
            dtype (`torch.dtype` or `str`, *optional*, defaults to `torch.float32`):
                Of the stored factors.
            options (`PushOptions`, *optional*):
                For the card and the commit, as for `push_to_hub`.

        Returns:
            `Pushed`: The commit, and whether it is a new one.

        Raises:
            `UnsupportedError`: If a change is not low-rank and `dense="refuse"`.
            `LeakError`: If a token, a path of this machine or the user's name would be published.
            `HubError`: If the Hub refuses the push or cannot be reached.

        Example:
            >>> hp1.compress(rank=32).push_adapter_to_hub("me/forget-hp1-lora", scale=-0.6)  # doctest: +SKIP
        """
        from hf_taskvec.publishing.push_without_folder import push_written

        def write(folder: Path) -> None:
            self.to_adapter(
                folder,
                base_model_name_or_path,
                base=base,
                dense=dense,
                uniform_rank=uniform_rank,
                serve=serve,
                dtype=dtype,
                scale=scale,
                progress=options.get("progress"),
            )

        return push_written(write, repo_id, options)
