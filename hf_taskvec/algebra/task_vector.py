"""`TaskVector`: an immutable, lazy linear expression over weight changes, and what can be done with it.

Methods that do more than algebra import the package that does the work when they are called. So the algebra itself
needs neither transformers nor peft, and these (with `vector_constructors` and `vector_outputs`) are the only imports in
the library that point upwards.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from hf_taskvec.algebra.moved_names import moved_name, moved_names
from hf_taskvec.algebra.quantisation import Scheme
from hf_taskvec.algebra.vector_outputs import VectorOutputs
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from hf_taskvec.analysis.survival import Survival
    from hf_taskvec.application.live_edit import Edit


class TaskVector(VectorOutputs):
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
