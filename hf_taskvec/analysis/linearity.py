"""Cross-task linearity (Zhou et al. 2024): are features linear in the weights between fine-tunes of one model?

`f_ℓ(α θ_a + (1−α) θ_b) ≈ α f_ℓ(θ_a) + (1−α) f_ℓ(θ_b)` at every layer ℓ; and, for what task arithmetic does,
`f_ℓ(θ_0 + λ(τ_a + τ_b)) ≈ ½ f_ℓ(θ_0 + 2λτ_a) + ½ f_ℓ(θ_0 + 2λτ_b)` (addition) and
`f_ℓ(θ_0) ≈ ½ f_ℓ(θ_0 + λτ) + ½ f_ℓ(θ_0 − λτ)` (negation). Each is measured, sample by sample, by the cosine of the two
sides and by the coefficient `‖left‖ · cosine / ‖right‖`, which should be 1, beside the cosine of the two features that
are mixed.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.argument_checks import check_batch_size, check_model, check_vectors, is_finite_number
from hf_taskvec.analysis.layer_features import Feature, layer_features, layers_of
from hf_taskvec.analysis.token_rows import Data, check_rows, token_rows
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.figures import Plottable
from hf_taskvec.models.model_facts import evaluation_mode
from hf_taskvec.progress import progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Pooled features of one edited model that are held, in bytes; a vector is applied and removed once for so many rows.
_HELD_BYTES = 1 << 26
# The weights of the two vectors in an edited model.
_Mixture = tuple[float, float]


@dataclass(frozen=True, eq=False)
class LinearityMeasures:
    """One kind of linearity: tensors of (layers, samples), in fp64.

    Args:
        cosine (`torch.Tensor`):
            The cosine of the two sides.
        coefficient (`torch.Tensor`):
            `‖left‖ · cosine / ‖right‖`; 1 is linear.
        baseline (`torch.Tensor`):
            The cosine of the two features that are mixed.

    """

    cosine: torch.Tensor
    coefficient: torch.Tensor
    baseline: torch.Tensor

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.cosine.shape[0]


@dataclass(frozen=True, eq=False)
class Linearity(Plottable):
    """Cross-task linearity, made by `cross_task_linearity`; `found["addition"]` is one kind of it.

    Args:
        measures (`Mapping[str, LinearityMeasures]`):
            By kind: `interpolation α=0.5`, `addition`, `negation of …`.
        feature (`str`):
            Which feature of a row was measured: `"mean"` or `"last"`.
        samples (`int`):
            The number of rows.

    """

    measures: Mapping[str, LinearityMeasures]
    feature: Feature
    samples: int

    def __getitem__(self, kind: str) -> LinearityMeasures:
        if kind not in self.measures:
            raise MissingNameError(f"there is no {kind!r}.{did_you_mean(kind, self.measures)}")
        return self.measures[kind]

    @property
    def layers(self) -> int:
        """The number of layers."""
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
        """1 − cosine beside the baseline, and the coefficient, with quartiles, layer by layer.

        Returns:
            `matplotlib.figure.Figure`: The figure.

        Raises:
            `UnsupportedError`: If matplotlib is not installed.

        """
        from hf_taskvec.analysis.result_figures import linearity_figure

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
        model (`torch.nn.Module`):
            The live base θ_0. It is edited in place, and is as before, bit for bit, when this returns or raises.
        vector_a (`TaskVector`):
            The task vector of one fine-tune.
        vector_b (`TaskVector`):
            The task vector of the other.
        data (`Dataset`, or an iterable of token-id sequences or texts):
            Rows of text of both tasks; a `datasets.Dataset` has the column `input_ids`.
        alphas (`Sequence[float]`, *optional*, defaults to `(0.25, 0.5, 0.75)`):
            The mixtures of the interpolation.
        scale (`float`, *optional*, defaults to 0.4):
            λ of addition and negation (0.4 in the paper).
        feature (`str`, *optional*, defaults to `"mean"`):
            The feature of a row: the mean over its tokens (`"mean"`), or the one of its last token (`"last"`).
        batch_size (`int`, *optional*, defaults to 8):
            Rows in a forward pass.
        max_length (`int`, *optional*):
            Cut rows to this many tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For texts.
        merge (`bool`, *optional*, defaults to `True`):
            See `TaskVector.edit`.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `Linearity`: Cosine, coefficient and baseline by kind, layer and row.

    Raises:
        `BadValueError`: If an argument is out of range, or an edited model's features are NaN, infinite or zero.
        `UnsupportedError`: If the model has no list of layers.

    Example:
        >>> found = cross_task_linearity(model, vector_a, vector_b, texts, tokenizer=tokenizer)  # doctest: +SKIP
        >>> found["addition"].coefficient.median(dim=1)  # doctest: +SKIP

    """
    if feature not in get_args(Feature):
        raise BadValueError(f"feature={feature!r} is not one of {', '.join(get_args(Feature))}.")
    if not is_finite_number(scale) or scale == 0:
        raise BadValueError(f"scale={scale!r} must be a number other than 0; the paper uses 0.4.")
    if not isinstance(alphas, Sequence) or not all(map(is_finite_number, alphas)):
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
                with vector.applied_to(model, merge=merge) if len(vector) else nullcontext(), evaluation_mode(model):
                    found[mixture] = layer_features(model, chunk, feature, batch_size, bar)
                _check_features(found[mixture], vector)
            for kind, (left, right, other) in kinds.items():
                parts[kind].append(_measure(found[left], (found[right[0]], right[1]), (found[other[0]], other[1])))
    measures = {
        kind: LinearityMeasures(*(torch.cat(each).T for each in zip(*found, strict=True)))
        for kind, found in parts.items()
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
            f"{edited}: features are NaN, infinite or zero, so they point nowhere. The model overflows there, or its "
            "weights are broken: use a smaller scale=, smaller vectors, or a model in a wider dtype."
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
