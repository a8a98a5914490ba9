"""`TaskVector`: an immutable, lazy linear expression over weight changes, and what can be done with it.

The methods that save, apply and export a vector import the package that does the work when they are called. So the
algebra itself needs neither transformers nor peft, and these (with `vector_constructors` and `vector_pushing`) are the
only imports in the library that point upwards.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from hf_taskvec.algebra.moved_names import moved_name, moved_names
from hf_taskvec.algebra.quantisation import Scheme
from hf_taskvec.algebra.rounding import parse_dtype
from hf_taskvec.algebra.vector_pushing import VectorPushing
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from hf_taskvec.analysis.survival import Survival
    from hf_taskvec.application.live_edit import Edit


class TaskVector(VectorPushing):
    """A change to a model's weights: a mapping from parameter name to `ParameterChange`.

    `-v`, `0.5 * v`, `a + b - c` build expressions and read no tensor; low-rank factors stay factors. Tensors are read
    when the expression is used: applied, saved, exported or measured.

    Args:
        terms (`Mapping[str, Iterable[Term]]`):
            The weighted changes of each parameter. The class methods make them from models, adapters and tensors.
        provenance (`Provenance`, *optional*):
            Where they come from.
        discarded (`Mapping[str, float]`, *optional*):
            The share of each matrix's squared norm that an approximation has lost.

    Example:
        >>> import torch
        >>> a = TaskVector.from_tensors({"w": torch.ones(2, 2)}, name="a")
        >>> b = TaskVector.from_tensors({"w": torch.eye(2)}, name="b")
        >>> (a - 0.5 * b).dense("w")
        tensor([[0.5000, 1.0000],
                [1.0000, 0.5000]])
        >>> (a - 0.5 * b).expression
        'a - 0.5*b'
        >>> len(a - a)
        0

    """

    def moved(self, names: Mapping[str, str]) -> "TaskVector":
        """The same changes of parameters that another model calls otherwise, by a stated map of beginnings of names.

        A text model's vector fits the model of pictures and text that contains it, and back.

        Args:
            names (`Mapping[str, str]`):
                What a name starts with -> what it starts with in the other model. Of several that fit, the longest
                counts. Every parameter must be named, and what its own base ties to it: leave others out with `filter`
                first.

        Returns:
            `TaskVector`: The vector under the other names. Nothing is read.

        Raises:
            `MissingNameError`: If a parameter starts with none of them, or nothing starts with one of them.
            `MismatchError`: If two parameters would get one name.

        Example:
            >>> import torch
            >>> from hf_taskvec import TaskVector
            >>> v = TaskVector.from_tensors({"model.norm.weight": torch.ones(2), "lm_head.weight": torch.ones(3, 2)})
            >>> list(v.moved({"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}))
            ['language_model.model.norm.weight', 'language_model.lm_head.weight']

        """
        bases = [origin.base for origin in self.provenance.origins if origin.base]
        tied = [alias for base in bases for alias, owner in base.tied if owner in self]
        new = moved_names([*self, *tied], names)
        terms = {new[name]: change.terms for name, change in self.items()}
        provenance = self.provenance.through("moved", names=dict(names))
        return type(self)(terms, provenance.with_ties(lambda name: moved_name(name, names)))

    def without(
        self,
        others: "TaskVector | Sequence[TaskVector]",
        *,
        by: Literal["tensor", "subspace"] = "tensor",
        rank: int | None = None,
        side: Literal["both", "left", "right"] = "both",
    ) -> "TaskVector":
        """The vector without what lies in the span of others, parameter by parameter: the merging rule `without`.

        For edits that shall leave something alone, such as `-1.2 * tau.without([aligned, retain])`.

        Args:
            others (`TaskVector` or `Sequence[TaskVector]`):
                One or more vectors of the same architecture; their lengths and signs do not matter. A parameter that
                none of them changes stays as it is, and one that lies in their span is no longer changed: a vector
                without itself is empty.
            by (`str`, *optional*, defaults to `"tensor"`):
                `"tensor"` subtracts from each parameter the multiples of the others that make it orthogonal to each of
                them. The result is a sum of the vectors, exact and lazy; its coefficients are found by this call, which
                reads all vectors. `"subspace"` takes more away: with the projections P and Q onto the others' leading
                left and right singular vectors, each matrix becomes `v - P v Q`, when it is used; biases and norms are
                projected by tensor.
            rank (`int`, *optional*):
                By subspace: how many singular vectors of each of the others count. The default is all of them; where a
                matrix of the others is not held as factors, a number is needed.
            side (`str`, *optional*, defaults to `"both"`):
                By subspace: `"left"` gives `v - P v` (nothing is written where the others write), `"right"` gives
                `v - v Q` (nothing is read that the others read).

        Returns:
            `TaskVector`: What is left. Factors stay factors where the others are factors, and by subspace always.

        Raises:
            `BadValueError`: If there are no others, or an option makes no sense.
            `MissingNameError`: If there is no such `by` or `side`.
            `MismatchError`: If the vectors come from models of different architectures, shapes or tokenizers.

        Example:
            >>> import torch
            >>> v = TaskVector.from_tensors({"w": torch.tensor([3.0, 4.0])}, name="v")
            >>> u = TaskVector.from_tensors({"w": torch.tensor([2.0, 0.0])}, name="u")
            >>> v.without(u).dense("w")
            tensor([0., 4.])
            >>> v.without(u).expression
            "combine([v, u], 'without')"
            >>> len(v.without([u, 2 * v]))
            0

        """
        from hf_taskvec.merging import combine

        taken = [others] if isinstance(others, TaskVector) else list(others)
        if not taken:
            raise BadValueError("without() takes at least one other vector: there is nothing to project away from.")
        given: dict[str, Any] = {"by": by, "rank": rank, "side": side}
        defaults = {"by": "tensor", "rank": None, "side": "both"}
        options = {name: value for name, value in given.items() if value != defaults[name]}
        return combine([self, *taken], "without", **options)

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
            self,
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

    def apply(
        self,
        base: str | Path,
        output: str | Path,
        *,
        scale: float = 1.0,
        dtype: torch.dtype | str | None = None,
        requantise: Literal["same", "bf16"] | None = None,
        max_shard_size: int | str | None = None,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        overwrite: bool = False,
        strict_base: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        progress: bool | None = None,
    ) -> Path:
        """Write `base + scale * vector` as a complete model folder, streamed: no model is ever in memory.

        Every element is accumulated in fp64 and rounded once (see `algebra.sums.Sum` for where fp32 is enough). The
        folder appears under its name when it is complete; a run that was interrupted is resumed by calling it again.
        Under `accelerate launch` the processes share the work and write the same bytes as one would.

        Args:
            base (`str` or `Path`):
                A Hub id or a folder. It may be another model than the vector's own base, of the same architecture.
            output (`str` or `Path`):
                The folder to write.
            scale (`float`, *optional*, defaults to 1.0):
                λ.
            dtype (`torch.dtype` or `str`, *optional*):
                Of the result; by default that of each of the base's tensors.
            requantise (`"same"` or `"bf16"`, *optional*):
                Needed where the base stores weights in fewer bits (FP8, MXFP4, compressed-tensors, GPTQ, AWQ; GGUF).
                With `"same"` the edited weights are stored so again, and `taskvec_apply.json` tells for each what was
                left of its edit; with `"bf16"` the output is a model without quantisation.
            max_shard_size (`int` or `str`, *optional*):
                The largest size of one file, e.g. `"5GB"`; by default the base's own files.
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Where to compute.
            threads (`int`, *optional*):
                How many threads write, each with 10 to 15 MB of its own (more where a single row of a tensor has more
                than half a million elements); by default as many as torch uses, but no more than 16.
            overwrite (`bool`, *optional*, defaults to `False`):
                Replace an earlier output of `apply`, if nothing of others is in it.
            strict_base (`bool`, *optional*, defaults to `False`):
                Refuse a base that is not, byte for byte, the one the vector was made from. What the vector knows of its
                base decides: its files, if it was extracted from a folder or the Hub in this process; a digest of every
                byte, if a full fine-tune was extracted from a live base or saved whole; the Hub's own digests of files.
                Where only a name or samples are recorded, as of most adapters that were saved, it is refused.
            revision (`str`, *optional*):
                Branch, tag or commit of a Hub id.
            token (`str` or `bool`, *optional*):
                As in transformers.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `Path`: The folder.

        Raises:
            `MismatchError`: If the vector does not fit the base.
            `ChangedSourceError`: If the base is not the vector's own, or the vector cannot tell, and `strict_base` is
                set.
            `OutputError`: If the folder holds something else, or cannot be written.
            `BadValueError`: If a result is not finite in its dtype, or an argument makes no sense.
        """
        from hf_taskvec.application.to_checkpoint import apply

        return apply(
            self,
            base,
            output,
            scale=scale,
            dtype=dtype,
            requantise=requantise,
            max_shard_size=max_shard_size,
            device=device,
            threads=threads,
            overwrite=overwrite,
            strict_base=strict_base,
            revision=revision,
            token=token,
            progress=progress,
        )

    def edit(
        self, model: torch.nn.Module, scale: float = 1.0, *, merge: bool = True, original: str | Path | None = None
    ) -> "Edit":
        """Put the vector on a live model, and get a handle to move λ and to undo it.

        `edit.set_scale(x)` moves to another λ, always from the untouched original; `edit.restore()` brings the model
        back bit for bit; `edit.keep()` leaves it as it is. Of a model that is sharded over processes (FSDP2, tensor
        parallelism) each process changes its part; all of them make the edit and move λ together.

        Args:
            model (`torch.nn.Module`):
                A plain, offloaded (`device_map`), PEFT-wrapped, sharded or compiled model, also in
                DistributedDataParallel.
            scale (`float`, *optional*, defaults to 1.0):
                λ.
            merge (`bool`, *optional*, defaults to `True`):
                Write into the weights. With `False` the vector, which must be low-rank, is attached beside them: a λ
                costs nothing, each row of a batch may have its own (`edit.set_row_scales`), quantised bases work.
            original (`str` or `Path`, *optional*):
                A folder or Hub id that the model was loaded from, to re-read the weights from instead of keeping a
                copy of them. (What is offloaded to disk is re-read from there anyway.)

        Returns:
            `Edit`: The handle, which is also a context manager that restores the model.

        Raises:
            `MismatchError`: If the vector does not fit the model.
            `UnsupportedError`: If the model cannot be edited in this way.
        """
        from hf_taskvec.application.to_live_model import edit

        return edit(self, model, scale, merge, original)

    def applied_to(
        self, model: torch.nn.Module, scale: float = 1.0, *, merge: bool = True, original: str | Path | None = None
    ) -> "AbstractContextManager[Edit]":
        """A `with` block in which the model is edited; afterwards it is as before, bit for bit, whatever happened.

        An edit that was made inside and is still open ends with the block.

        Args:
            model (`torch.nn.Module`):
                As for `edit`.
            scale (`float`, *optional*, defaults to 1.0):
                λ.
            merge (`bool`, *optional*, defaults to `True`):
                As for `edit`.
            original (`str` or `Path`, *optional*):
                As for `edit`.

        Returns:
            `AbstractContextManager[Edit]`: The block, which gives the edit.
        """
        from hf_taskvec.application.to_live_model import applied_to

        return applied_to(self, model, scale, merge, original)

    def to_adapter(
        self,
        output: str | Path,
        base_model_name_or_path: str | Path | None = None,
        *,
        base: str | Path | None = None,
        dense: Literal["refuse", "save", "drop"] = "refuse",
        uniform_rank: bool = False,
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
            self,
            output,
            base_model_name_or_path,
            base=base,
            dense=dense,
            uniform_rank=uniform_rank,
            dtype=parse_dtype(dtype),
            overwrite=overwrite,
            scale=scale,
            progress=progress,
        )

    def survival(
        self,
        base: str | Path | torch.nn.Module,
        scheme: Scheme = "nf4",
        *,
        scale: float = 1.0,
        revision: str | None = None,
        token: str | bool | None = None,
        progress: bool | None = None,
    ) -> "Survival":
        """What is left of `base + scale * vector` when it is quantised: the share of weights that get another code.

        No model is run. The weights of the base and of the edited model are quantised, as bitsandbytes would (but
        without it), and their codes compared; in tiles, with bounded memory. For many λ in one pass see
        `hf_taskvec.analysis.survival_by_scale`.

        Args:
            base (`str`, `Path` or `torch.nn.Module`):
                The model that is edited: a Hub id, a folder, or a live model.
            scheme (`str`, *optional*, defaults to `"nf4"`):
                `"nf4"` or `"int8"`, as in bitsandbytes; `"fp8"` or `"int4"`, as in torchao.
            scale (`float`, *optional*, defaults to 1.0):
                λ.
            revision (`str`, *optional*):
                Branch, tag or commit of a Hub id.
            token (`str` or `bool`, *optional*):
                As in transformers.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `Survival`: The shares in all, of each layer and of each weight; and which parameters are not quantised.

        Raises:
            `MismatchError`: If the vector does not fit the base.
            `BadValueError`: If there is no such scheme, or a result is not finite.
            `UnsupportedError`: If which weights would be quantised cannot be told.
        """
        from hf_taskvec.analysis.survival import survival

        return survival(self, base, scheme, scale=scale, revision=revision, token=token, progress=progress)
