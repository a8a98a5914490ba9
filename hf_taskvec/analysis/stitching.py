"""Stitched models (Zhou et al. 2024): a model whose features at one layer are a mixture of other models'."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import reduce
from typing import Any

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.argument_checks import check_model, check_vectors, is_finite_number
from hf_taskvec.analysis.layer_features import forward_hooks, hidden_states, layers_of, with_hidden_states
from hf_taskvec.errors import BadValueError
from hf_taskvec.models.model_facts import evaluation_mode


class _LayerReachedError(Exception):
    """Ends a forward pass whose rest is not needed."""


def stitch(
    model: torch.nn.Module,
    layer: int,
    parts: Sequence[tuple[float, TaskVector | None]],
    *,
    merge: bool = True,
) -> Callable[..., torch.Tensor]:
    """A callable that gives the logits of the stitched model: θ_0 whose features at one layer are a mixture of others'.

    The paper's forgetting in feature space (eq. (4)), `f_ℓ(θ_0) − Δ_ℓ(λτ)` with `Δ_ℓ(λτ) = f_ℓ(θ_0 + λτ) − f_ℓ(θ_0)`,
    is `[(2, None), (-1, λ * τ)]`: it stands for `f_ℓ(θ_0 − λτ)` without that model.

    Args:
        model (`torch.nn.Module`):
            The live θ_0; it is edited only during a call.
        layer (`int`):
            After which block the features are replaced, from 0; negative numbers count from the end.
        parts (`Sequence[tuple[float, TaskVector | None]]`):
            Weights and vectors: the features are `Σ weight · f_ℓ(θ_0 + vector)`; `None` stands for θ_0 itself.
        merge (`bool`, *optional*, defaults to `True`):
            See `TaskVector.edit`.

    Returns:
        `Callable`: Takes what the model takes (`input_ids`, `attention_mask`), without a cache of keys and values, and
        gives the logits.

    Raises:
        `BadValueError`: If the layer does not exist, or a part is not a weight and a vector.
        `UnsupportedError`: If the model has no list of layers.

    Example:
        >>> mixed = stitch(model, 10, [(0.5, vector_a), (0.5, vector_b)])  # doctest: +SKIP
        >>> logits = mixed(**tokenizer("Once upon a time", return_tensors="pt"))  # doctest: +SKIP

    """
    check_model(model)
    for part in parts:
        if not isinstance(part, tuple | list) or len(part) != 2 or not is_finite_number(part[0]):
            raise BadValueError(f"a part of a stitched model is (weight, vector), not {part!r}.")
    check_vectors(*(vector for _, vector in parts if vector is not None))
    blocks = layers_of(model)
    if not -len(blocks) <= layer < len(blocks):
        raise BadValueError(f"layer={layer}: the model has {len(blocks)} layers, 0 to {len(blocks) - 1}.")
    if not parts:
        raise BadValueError("a stitched model needs at least one part.")
    block = blocks[layer]

    def features(inputs: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        found = []

        def stop(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found.append(hidden_states(output))
            raise _LayerReachedError

        with forward_hooks([(block, stop)]), torch.inference_mode(), suppress(_LayerReachedError):
            model(*inputs, **options)
        return found[0]

    def call(*inputs: Any, **options: Any) -> torch.Tensor:
        if options.setdefault("use_cache", False):
            raise BadValueError("a stitched model keeps no cache of keys and values: leave out use_cache.")

        def part(weight: float, vector: TaskVector | None) -> torch.Tensor:
            with vector.applied_to(model, merge=merge) if vector else nullcontext(), evaluation_mode(model):
                return weight * features(inputs, options)

        mixed = reduce(torch.add, (part(weight, vector) for weight, vector in parts))

        def replace(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return with_hidden_states(output, mixed)

        with forward_hooks([(block, replace)]), evaluation_mode(model), torch.inference_mode():
            return model(*inputs, **options).logits

    return call
