"""The ways to make a task vector: from models, adapters, gradients, tensors and files, and as noise.

Each method that needs a higher package imports it when it is called; see `task_vector`.
"""

from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from hf_taskvec.algebra.deltas import Dense, LowRank
from hf_taskvec.algebra.expressions import check_label
from hf_taskvec.algebra.linear_expression import LinearExpression
from hf_taskvec.algebra.noise import noise_like
from hf_taskvec.algebra.provenance import ModelRecord, Origin, Provenance
from hf_taskvec.algebra.rounding import FLOATS
from hf_taskvec.algebra.sources import InMemory, sampled_fingerprint
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import BadValueError, MismatchError, UnsupportedError

if TYPE_CHECKING:
    from peft import PeftModel
    from typing_extensions import Self

    from hf_taskvec.algebra.task_vector import TaskVector

#: a Hub id (`"me/model"` or `"me/model@revision"`), a folder, or a live model
Model = str | Path | torch.nn.Module


class VectorConstructors(LinearExpression):
    """The methods that make a `TaskVector` of something else."""

    @classmethod
    def from_finetuned(
        cls,
        base: Model,
        tuned: Model,
        *,
        name: str | None = None,
        base_revision: str | None = None,
        tuned_revision: str | None = None,
        vocabulary: Literal["truncate", "extend", "union"] | None = None,
        heads: Literal["exclude", "match"] | None = None,
        tokenizers: tuple[Any, Any] | None = None,
        stream: bool = False,
        token: str | bool | None = None,
        progress: bool | None = None,
    ) -> "TaskVector":
        """The vector `τ = tuned − base` of a full fine-tune: the base comes first.

        The other order gives the negated vector. A warning is given where the base's own files (its record, its config
        or its card) say that it was made from the fine-tune.

        The difference is that of the real numbers, whatever the dtypes: a bf16 base and an fp32 fine-tune give an
        exact fp32 change. Applying it rounds once, to the dtype of the model it is applied to.

        Args:
            base (`str`, `Path` or `torch.nn.Module`):
                A Hub id (`"me/model"` or `"me/model@revision"`), a folder, or a live model. Files are mapped and read
                only when used; of a live model the exact difference is taken at once, so that training or editing the
                model afterwards does not change the vector.
            tuned (`str`, `Path` or `torch.nn.Module`):
                The fine-tuned model, given in the same ways.
            name (`str`, *optional*):
                The vector's label in expressions, a name such as a variable has; by default made from the tuned
                model's name.
            base_revision (`str`, *optional*):
                Branch, tag or commit of the base, for a Hub id.
            tuned_revision (`str`, *optional*):
                The same of the fine-tune.
            vocabulary (`str`, *optional*):
                What to do when the embeddings differ in their number of rows: `"truncate"` compares the rows that both
                have, `"extend"` also takes the fine-tune's additional rows as a change from zero. `"union"` takes the
                row of each token that the fine-tune added as a parameter of its own, a change from zero, named after
                the token; so fine-tunes with other added tokens can be added. By default such models are refused.
            heads (`str`, *optional*):
                What to do when the heads differ, as those of other tasks do (`classifier`, `score`): `"exclude"` leaves
                all heads out of the vector, `"match"` compares those that both models have in one shape. A head is what
                the model's body does not have, or what only one of two classes has. By default such models are refused.
            tokenizers (`tuple`, *optional*):
                For `vocabulary="union"`: the base's tokenizer and the fine-tune's (a tokenizer, a folder or a Hub id
                each), or None for one that lies beside its model. By default both do.
            stream (`bool`, *optional*, defaults to `False`):
                Download no weights from the Hub: headers now, and each tensor by its byte range when it is used. For
                models that are used once, as in `apply(…, push_to=…)`.
            token (`str` or `bool`, *optional*):
                As in transformers.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `TaskVector`: The vector.

        Raises:
            `MismatchError`: If the two models do not have the same parameters.
            `BadValueError`: If they are identical, or a weight is not finite.
            `MissingFileError`: If a model is neither here nor on the Hub.
        """
        from hf_taskvec.extraction.from_finetuned import from_finetuned

        if name is not None:
            check_label(name)
        return from_finetuned(
            base,
            tuned,
            name=name,
            base_revision=base_revision,
            tuned_revision=tuned_revision,
            vocabulary=vocabulary,
            heads=heads,
            tokenizers=tokenizers,
            stream=stream,
            token=token,
            progress=progress,
        )

    @classmethod
    def from_adapter(
        cls,
        adapter: "str | Path | PeftModel",
        *,
        base: Model | None = None,
        name: str | None = None,
        revision: str | None = None,
        base_revision: str | None = None,
        adapter_name: str | None = None,
        initial: str | Path | None = None,
        token: str | bool | None = None,
    ) -> "TaskVector":
        """The vector of a LoRA adapter, its factors kept as factors.

        The vector is what was trained, and so what PEFT computes before merging. On a base that ties head and
        embedding, the same change of both (`ensure_weight_tying`, trained tokens) is one change of the stored weight;
        a change of the *head* alone (LoRA or `modules_to_save` on `lm_head`) is kept as one; a change of the embedding
        alone is refused, and takes an untied copy of the base as `base`.

        Args:
            adapter (`str`, `Path` or `PeftModel`):
                A folder, a Hub id, or a live `PeftModel`.
            base (`str`, `Path` or `torch.nn.Module`, *optional*):
                Needed only for what is not low-rank (`modules_to_save`, trained biases and tokens, DoRA); by default
                the base that the adapter's config names.
            name (`str`, *optional*):
                The vector's label in expressions, a name such as a variable has; by default made from the adapter's
                name.
            revision (`str`, *optional*):
                Branch, tag or commit of the adapter, for a Hub id.
            base_revision (`str`, *optional*):
                The same of the base.
            adapter_name (`str`, *optional*):
                Which adapter of a live `PeftModel`; by default the active one, if there is only one.
            initial (`str` or `Path`, *optional*):
                The adapter as it was before training, for one that began with a part of the base (PiSSA, OLoRA, CorDA,
                LoRA-GA, LoftQ): the vector is what training added.
            token (`str` or `bool`, *optional*):
                As in transformers.

        Returns:
            `TaskVector`: The vector.

        Raises:
            `UnsupportedError`: If the adapter is of a kind that is no change to weights.
            `MismatchError`: If the adapter and the base do not belong together.
            `MissingFileError`: If the adapter, or a base that is needed, cannot be found.
        """
        from hf_taskvec.extraction.from_adapter import from_adapter

        if name is not None:
            check_label(name)
        return from_adapter(
            adapter,
            base=base,
            name=name,
            revision=revision,
            base_revision=base_revision,
            adapter_name=adapter_name,
            initial=initial,
            token=token,
        )

    @classmethod
    def from_gradient(
        cls,
        model: torch.nn.Module,
        data: Any,
        learning_rate: float,
        *,
        name: str = "gradient",
        batch_size: int = 8,
        max_length: int | None = None,
        tokenizer: Any = None,
        progress: bool | None = None,
    ) -> "TaskVector":
        """The vector of one full-batch gradient step, `−learning_rate ∇L(θ)`: what one epoch of gradient descent gives.

        L is the mean loss of the next token over all of the data, without dropout. The gradient is accumulated over
        batches, in fp32 or better; under `accelerate launch` the processes share the rows. The model and its `.grad`
        stay as they are.

        Args:
            model (`torch.nn.Module`):
                A live causal language model; parameters that require no gradient are left out.
            data (`datasets.Dataset`, sequences of token ids, or texts):
                A data set needs a column `input_ids`.
            learning_rate (`float`):
                Of the step.
            name (`str`, *optional*, defaults to `"gradient"`):
                The vector's label in expressions, a name such as a variable has.
            batch_size (`int`, *optional*, defaults to 8):
                Rows in a forward pass.
            max_length (`int`, *optional*):
                Cut rows to this many tokens.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                For texts.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `TaskVector`: The vector.

        Raises:
            `BadValueError`: If the gradient is zero or not finite, or the data cannot be predicted.
            `UnsupportedError`: If the model is wrapped by PEFT, or holds fused experts.
        """
        from hf_taskvec.analysis.gradients import from_gradient

        check_label(name)
        return from_gradient(
            model,
            data,
            learning_rate,
            name=name,
            batch_size=batch_size,
            max_length=max_length,
            tokenizer=tokenizer,
            progress=progress,
        )

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]], *, name: str = "tensors"
    ) -> "Self":
        """A vector from plain tensors. They are copied, so later changes to them do not reach the vector.

        Args:
            tensors (`Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]`):
                For each parameter a dense change, or a pair `(left, right)` of low-rank factors.
            name (`str`, *optional*, defaults to `"tensors"`):
                The vector's label in expressions, a name such as a variable has.

        Returns:
            `TaskVector`: The vector.

        Raises:
            `UnsupportedError`: If a tensor is not floating-point.
            `MismatchError`: If two factors cannot be multiplied.
        """
        check_label(name)
        terms, sources = {}, {}
        for key, value in tensors.items():
            given = value if isinstance(value, tuple) else (value,)
            if isinstance(value, tuple) and len(value) != 2:
                raise BadValueError(f"{key}: a low-rank change is given by two factors, not {len(value)}.")
            for tensor in given:
                if tensor.dtype not in FLOATS:
                    raise UnsupportedError(f"{key}: a change must be floating-point, not {tensor.dtype}.")
            copies = tuple(InMemory(tensor.detach().cpu().clone()) for tensor in given)
            try:
                delta = LowRank(*copies) if len(copies) == 2 else Dense(copies)
            except MismatchError as error:
                raise MismatchError(f"{key}: {error}") from None
            terms[key] = (Term(1.0, delta),)
            sources.update({f"{key}:{part}": copy for part, copy in enumerate(copies)})
        record = ModelRecord(name, fingerprint=sampled_fingerprint(sources))
        return cls(terms, Provenance.of(Origin(name, "given as tensors", tuned=record)))

    @classmethod
    def load(
        cls,
        where: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        verify: bool = True,
    ) -> "TaskVector":
        """A saved vector. Its files are mapped; nothing is read until used.

        Args:
            where (`str` or `Path`):
                A folder or a Hub id (`"me/vector"` or `"me/vector@revision"`).
            revision (`str`, *optional*):
                Branch, tag or commit, for a Hub id.
            token (`str` or `bool`, *optional*):
                As in transformers.
            verify (`bool`, *optional*, defaults to `True`):
                Check each tensor against its checksum when it is first used.

        Returns:
            `TaskVector`: The vector.

        Raises:
            `MissingFileError`: If there is no saved vector there.
            `CorruptFileError`: If a file is damaged.
        """
        from hf_taskvec.files.load_vector import load

        return load(where, revision=revision, token=token, verify=verify)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> "TaskVector":
        """The same as `load`, by the name that transformers and PEFT have for it.

        Args:
            pretrained_model_name_or_path (`str` or `Path`):
                A folder or a Hub id.
            revision (`str`, *optional*):
                Branch, tag or commit, for a Hub id.
            token (`str` or `bool`, *optional*):
                As in transformers.

        Returns:
            `TaskVector`: The vector.
        """
        return cls.load(pretrained_model_name_or_path, revision=revision, token=token)

    def noise(self, seed: int = 0) -> "Self":
        """A random vector of the same norm in every parameter: the control that an edit is compared with.

        Every element of each parameter that the vector changes gets Gaussian noise, scaled so that the parameter's
        Frobenius norm is the vector's own (to the rounding of fp32). Low-rank changes get random factors of the same
        rank, and so stay low-rank; where only some rows are changed, these get the noise. The numbers hang on the seed,
        the parameter's name and their place alone.

        Args:
            seed (`int`, *optional*, defaults to 0):
                Of the numbers; another seed gives another vector of these norms.

        Returns:
            `TaskVector`: The noise. Nothing is read or drawn before it is used; its expression says that it is noise,
                with which seed, and like which vector.

        Raises:
            `BadValueError`: If the seed is not a whole number.

        Example:
            >>> from hf_taskvec import TaskVector
            >>> v = TaskVector.from_tensors({"w": torch.ones(4, 4)}, name="v")
            >>> round(v.noise(seed=1).norm("w"), 4), v.noise(seed=1).expression
            (4.0, 'noise(v, seed=1)')

        """
        if isinstance(seed, bool) or not isinstance(seed, Integral):
            raise BadValueError(f"seed={seed!r}: the seed of noise is a whole number.")
        terms = {name: (noise_like(change, int(seed)),) for name, change in self.items()}
        return type(self)(terms, self.provenance.through("noise", seed=int(seed)))
