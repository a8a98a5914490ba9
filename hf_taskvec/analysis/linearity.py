"""Cross-task linearity (Zhou et al. 2024): are features linear in the weights between fine-tunes of one model?

`f_ℓ(α θ_a + (1−α) θ_b) ≈ α f_ℓ(θ_a) + (1−α) f_ℓ(θ_b)` at every layer ℓ; and, for what task arithmetic does,
`f_ℓ(θ_0 + λ(τ_a + τ_b)) ≈ ½ f_ℓ(θ_0 + 2λτ_a) + ½ f_ℓ(θ_0 + 2λτ_b)` (addition) and
`f_ℓ(θ_0) ≈ ½ f_ℓ(θ_0 + λτ) + ½ f_ℓ(θ_0 − λτ)` (negation). Each is measured, sample by sample, by the cosine of the two
sides and by the coefficient `‖left‖ · cosine / ‖right‖`, which should be 1, beside the cosine of the two features that
are mixed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.token_batches import (
    Batch,
    Data,
    Rows,
    batches,
    check_batch_size,
    check_model,
    check_rows,
    check_vectors,
    evaluating,
    is_finite,
    progress_bar,
    token_rows,
)
from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean
from hf_taskvec.models.layout import is_peft_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The feature of a row: the mean over its tokens, or the one of its last token.
Feature = Literal["mean", "last"]
# Pooled features of one edited model that are held, in bytes; a vector is put on and off once for so many rows.
_HELD_BYTES = 1 << 26
# The weights of the two vectors in an edited model.
_Mixture = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Measures:
    """One kind of linearity: tensors of (layers, samples), in fp64."""

    cosine: torch.Tensor
    coefficient: torch.Tensor
    baseline: torch.Tensor

    @property
    def layers(self) -> int:
        return self.cosine.shape[0]


@dataclass(frozen=True, eq=False)
class Linearity:
    """Measures by kind: `interpolation α=0.5`, `addition`, `negation of …`."""

    measures: Mapping[str, Measures]
    feature: str
    samples: int

    def __getitem__(self, kind: str) -> Measures:
        if kind not in self.measures:
            raise MissingNameError(f"there is no {kind!r}.{did_you_mean(kind, self.measures)}")
        return self.measures[kind]

    @property
    def layers(self) -> int:
        return next(iter(self.measures.values())).layers

    def table(self) -> list[dict[str, float | str]]:
        """Medians over the samples, a line for each kind and layer."""
        return [
            {
                "kind": kind,
                "layer": layer,
                "1 − cosine": (1 - found.cosine[layer]).median().item(),
                "1 − baseline": (1 - found.baseline[layer]).median().item(),
                "coefficient": found.coefficient[layer].median().item(),
            }
            for kind, found in self.measures.items()
            for layer in range(found.layers)
        ]

    def figure(self) -> "Figure":
        """1 − cosine beside the baseline, and the coefficient, with quartiles, layer by layer."""
        from hf_taskvec.analysis.plots import linearity_figure

        return linearity_figure(self)


def cross_task_linearity(
    model: torch.nn.Module,
    vector_a: TaskVector,
    vector_b: TaskVector,
    data: Data,
    *,
    alphas: Sequence[float] = (0.25, 0.5, 0.75),
    scale: float = 0.4,
    feature: Feature = "mean",
    batch_size: int = 8,
    max_length: int | None = None,
    tokenizer: Any = None,
    merge: bool = True,
    progress: bool | None = None,
) -> Linearity:
    """How linear a model's features are in its weights, between and beyond two fine-tunes of it.

    Args:
        model: the live base θ_0. It is edited in place, and is as before, bit for bit, when this returns or raises.
        vector_a, vector_b: the fine-tunes' task vectors.
        data: rows of text of both tasks: a `datasets.Dataset` with `input_ids`, token-id sequences, or texts.
        alphas: the mixtures of the interpolation.
        scale: λ of addition and negation (0.4 in the paper).
        feature: see `Feature`.
        batch_size: rows in a forward pass.
        max_length: cut rows to this many tokens.
        tokenizer: for texts.
        merge: see `TaskVector.edit`.
        progress: show a progress bar; by default on a terminal.
    """
    if feature not in get_args(Feature):
        raise BadValueError(f"feature={feature!r} is not one of {', '.join(get_args(Feature))}.")
    if not is_finite(scale) or scale == 0:
        raise BadValueError(f"scale={scale!r} must be a number other than 0; the paper uses 0.4.")
    if not isinstance(alphas, Sequence) or not all(map(is_finite, alphas)):
        raise BadValueError(f"alphas={alphas!r} must be a list of numbers between 0 and 1.")
    check_model(model)
    check_vectors(vector_a, vector_b)
    check_batch_size(batch_size)
    rows = token_rows(data, tokenizer, max_length)
    check_rows(rows, model)
    kinds = _kinds(vector_a, vector_b, alphas, scale)
    needed = list(
        dict.fromkeys(mixture for left, right, other in kinds.values() for mixture in (left, right[0], other[0]))
    )
    width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    held = max(1, _HELD_BYTES // (4 * width * len(layers_of(model))))
    parts: dict[str, list[tuple[torch.Tensor, ...]]] = {kind: [] for kind in kinds}
    with progress_bar([], "Linearity", progress, len(rows) * len(needed)) as bar:
        for start in range(0, len(rows), held):
            chunk = rows[start : start + held]
            found = {}
            for mixture in needed:
                vector = mixture[0] * vector_a + mixture[1] * vector_b
                with vector.applied_to(model, merge=merge) if len(vector) else nullcontext(), evaluating(model):
                    found[mixture] = _features(model, chunk, feature, batch_size, bar)
                _check_features(found[mixture], vector)
            for kind, (left, right, other) in kinds.items():
                parts[kind].append(_measure(found[left], (found[right[0]], right[1]), (found[other[0]], other[1])))
    measures = {
        kind: Measures(*(torch.cat(each).T for each in zip(*found, strict=True))) for kind, found in parts.items()
    }
    return Linearity(measures, feature, len(rows))


_Weighted = tuple[_Mixture, float]


def _kinds(
    a: TaskVector, b: TaskVector, alphas: Sequence[float], scale: float
) -> dict[str, tuple[_Mixture, _Weighted, _Weighted]]:
    """Kind -> the edited model on the left, and the two with their weights on the right."""
    kinds: dict[str, tuple[_Mixture, _Weighted, _Weighted]] = {}
    for alpha in alphas:
        if not 0 < alpha < 1:
            raise BadValueError(f"alphas holds {alpha}: an interpolation is between 0 and 1.")
        kinds[f"interpolation α={alpha:g}"] = ((alpha, 1 - alpha), ((1.0, 0.0), alpha), ((0.0, 1.0), 1 - alpha))
    kinds["addition"] = ((scale, scale), ((2 * scale, 0.0), 0.5), ((0.0, 2 * scale), 0.5))
    names = (a.expression, b.expression) if a.expression != b.expression else ("the first", "the second")
    kinds[f"negation of {names[0]}"] = ((0.0, 0.0), ((scale, 0.0), 0.5), ((-scale, 0.0), 0.5))
    kinds[f"negation of {names[1]}"] = ((0.0, 0.0), ((0.0, scale), 0.5), ((0.0, -scale), 0.5))
    return kinds


def _check_features(features: torch.Tensor, vector: TaskVector) -> None:
    """Refuse features that have no direction: NaN, infinite or zero."""
    norms = features.double().norm(dim=-1)
    if not bool((norms.isfinite() & (norms > 0)).all()):
        edited = f"θ_0 + {vector.expression}" if len(vector) else "θ_0"
        raise BadValueError(
            f"{edited}: features are NaN, infinite or zero, so they point nowhere. The model overflows there, or its weights are "
            "broken: use a smaller scale=, smaller vectors, or a model in a wider dtype."
        )


def _measure(
    left: torch.Tensor, one: tuple[torch.Tensor, float], other: tuple[torch.Tensor, float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cosine, coefficient and baseline of features (samples, layers, size), in fp64."""
    left, a, b = left.double(), one[0].double(), other[0].double()
    right = one[1] * a + other[1] * b
    cosine = torch.cosine_similarity(left, right, dim=-1)
    coefficient = left.norm(dim=-1) * cosine / right.norm(dim=-1)
    return cosine, coefficient, torch.cosine_similarity(a, b, dim=-1)


# Features, by hooks.


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The blocks of a decoder, in order."""
    inner = model.get_base_model() if is_peft_model(model) else model
    count = inner.config.get_text_config().num_hidden_layers
    for module in inner.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedError(
        f"{type(inner).__name__} has no list of {count} layers, so their features cannot be told apart."
    )


_Hook = Callable[[torch.nn.Module, tuple[Any, ...], Any], Any]


@contextmanager
def _hooked(hooks: Sequence[tuple[torch.nn.Module, _Hook]]) -> Iterator[None]:
    handles = []
    try:
        handles += [module.register_forward_hook(hook) for module, hook in hooks]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hidden(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@torch.inference_mode()
def _features(model: Any, rows: Rows, feature: Feature, batch_size: int, bar: Any) -> torch.Tensor:
    """Pooled features of every layer: (rows, layers, size), in fp32. Nothing else of a forward pass is kept."""
    found: list[torch.Tensor] = []
    for batch in batches(rows, batch_size):
        pooled: list[torch.Tensor] = []

        def keep(
            module: torch.nn.Module, inputs: tuple[Any, ...], output: Any, batch: Batch = batch, to: list = pooled
        ) -> None:
            to.append(_pooled(_hidden(output), batch, feature))

        with _hooked([(layer, keep) for layer in layers_of(model)]):
            _trunk(model)(**batch.inputs(model), use_cache=False)
        found.append(torch.stack(pooled, dim=1))
        bar.update(len(batch.lengths))
    return torch.cat(found)


def _pooled(hidden: torch.Tensor, batch: Batch, feature: Feature) -> torch.Tensor:
    hidden = hidden.float().cpu()
    if feature == "last":
        return hidden[torch.arange(len(hidden)), batch.lengths - 1]
    mask = batch.attention_mask[..., None]
    return (hidden * mask).sum(dim=1) / batch.lengths[:, None]


def _trunk(model: Any) -> Any:
    """The model without its output layer, whose logits nobody looks at here."""
    inner = model.get_base_model() if is_peft_model(model) else model
    return inner.base_model if inner.base_model is not inner else inner


# Stitching.


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

    Args:
        model: the live θ_0; it is edited only during a call.
        layer: after which block the features are replaced, from 0; negative numbers count from the end.
        parts: weights and vectors: the features are `Σ weight · f_ℓ(θ_0 + vector)`; `None` stands for θ_0 itself.
        merge: see `TaskVector.edit`.

    The paper's forgetting in feature space, `f_ℓ(θ_0) − Δ_ℓ(λτ)`, is `[(1, None), (-0.5, λ * τ), (0.5, -λ * τ)]`. The
    result takes what the model takes (`input_ids`, `attention_mask`), without a cache of keys and values.
    """
    check_model(model)
    for part in parts:
        if not isinstance(part, tuple | list) or len(part) != 2 or not is_finite(part[0]):
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
            found.append(_hidden(output))
            raise _LayerReachedError

        with _hooked([(block, stop)]), torch.inference_mode(), suppress(_LayerReachedError):
            model(*inputs, **options)
        return found[0]

    def call(*inputs: Any, **options: Any) -> torch.Tensor:
        if options.setdefault("use_cache", False):
            raise BadValueError("a stitched model keeps no cache of keys and values: leave out use_cache.")
        mixed: torch.Tensor | None = None
        for weight, vector in parts:
            with vector.applied_to(model, merge=merge) if vector else nullcontext(), evaluating(model):
                part = weight * features(inputs, options)
            mixed = part if mixed is None else mixed + part

        def replace(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

        with _hooked([(block, replace)]), evaluating(model), torch.inference_mode():
            return model(*inputs, **options).logits

    return call
