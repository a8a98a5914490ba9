"""The usual unlearning methods, each one loss on the text to forget and one on the text to keep.

What is minimised is `forget_weight · L_forget + keep_weight · L_keep`, batches of both in each step. The defaults are
those of the authors' code or of open-unlearning (Dorna et al. 2025), as each class says. None of them is a task
vector; they are here to stand beside one, on the same model, text, budget and attacks.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import logsigmoid

from hf_taskvec.algebra.matrix_kinds import place_of
from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean
from hf_taskvec.models.layout import layout_of_model
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.text_losses import (
    TextLoss,
    block_next_token_losses,
    next_token_loss,
    states_after,
)
from hf_taskvec.training.token_blocks import IGNORED, mixed_seed
from hf_taskvec.training.trained_model import meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class UnlearningMethod(ABC):
    """A method that unlearns by gradient steps. What it is called, and whether it needs another model or text."""

    name: ClassVar[str]
    paper: ClassVar[str]
    #: whether it compares with the model as it was before
    compares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not (value is None and name == "layer") and (not number or value < 0):
                raise BadValueError(f"{name}={value!r} of {self.name} must be a number of at least 0.")

    @property
    def keeps(self) -> bool:
        """Whether it trains on text to keep."""
        return bool(vars(self).get("keep_weight"))

    @abstractmethod
    def forget_loss(self, model: Any, before: Any, seed: int) -> TextLoss:
        """The loss of the text to forget.

        Args:
            model (`PreTrainedConfig`):
                Of the model that is trained.
            before (`PreTrainedModel`, *optional*):
                The model as it was, frozen, if the method `compares`.
            seed (`int`):
                Of what is drawn at random.
        """

    def keep_loss(self, model: Any, before: Any) -> TextLoss:
        """The loss of the text to keep: the next token's, unless a method has its own."""
        return TextLoss(next_token_loss, weight=vars(self)["keep_weight"])

    def settings(self, given: TrainingSettings, config: "PreTrainedConfig") -> TrainingSettings:
        """How it is trained, where a method says more than the caller."""
        return given


@dataclass(frozen=True)
class GradientAscent(UnlearningMethod):
    """GA: the next-token loss of the text to forget is made *large*. It knows no bound, and usually ends in ruins.

    Example:
        >>> GradientAscent().keeps
        False

    """

    name: ClassVar[str] = "ga"
    paper: ClassVar[str] = "https://arxiv.org/abs/2210.01504"

    def forget_loss(self, model: Any, before: Any, seed: int) -> TextLoss:
        """The next-token loss, negated."""
        return TextLoss(_ascent)


@dataclass(frozen=True)
class GradientDifference(UnlearningMethod):
    """GradDiff: gradient ascent on the text to forget, descent on the text to keep.

    Args:
        forget_weight (`float`, *optional*, defaults to 1.0), keep_weight (`float`, *optional*, defaults to 1.0):
            How much each of the two counts; open-unlearning's defaults.
    """

    forget_weight: float = 1.0
    keep_weight: float = 1.0
    name: ClassVar[str] = "grad_diff"
    paper: ClassVar[str] = "https://arxiv.org/abs/2203.12817"

    def forget_loss(self, model: Any, before: Any, seed: int) -> TextLoss:
        """The next-token loss, negated."""
        return TextLoss(_ascent, weight=self.forget_weight)


@dataclass(frozen=True)
class NPO(UnlearningMethod):
    """Negative preference optimisation: `−2/β · log σ(−β · log(π / π_before))` of each block, which levels off.

    `log π` is that of the whole block, so with long blocks the slope levels off after a small change of each token.

    Args:
        beta (`float`, *optional*, defaults to 0.1):
            How soon it levels off; towards 0 it is gradient ascent.
        forget_weight (`float`, *optional*, defaults to 1.0), keep_weight (`float`, *optional*, defaults to 1.0):
            How much each of the two counts; open-unlearning's defaults. Without text to keep, 0.
    """

    beta: float = 0.1
    forget_weight: float = 1.0
    keep_weight: float = 1.0
    name: ClassVar[str] = "npo"
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.05868"
    compares: ClassVar[bool] = True

    def forget_loss(self, model: Any, before: Any, seed: int) -> TextLoss:
        """The preference loss of each block."""

        def summed(logits: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                was = block_next_token_losses(before(input_ids=ids, use_cache=False).logits, labels)
            risen = block_next_token_losses(logits, labels) - was
            return -2.0 / self.beta * logsigmoid(self.beta * risen).sum()

        return TextLoss(summed, "block", self.forget_weight)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_above_zero(self, "beta")


@dataclass(frozen=True)
class SimNPO(UnlearningMethod):
    """SimNPO: `−2/β · log σ(β · (l − δ))` of each block's mean next-token loss `l`; no other model is needed.

    Args:
        beta (`float`, *optional*, defaults to 4.5), delta (`float`, *optional*, defaults to 0.0):
            How soon it levels off, and where.
        forget_weight (`float`, *optional*, defaults to 0.125), keep_weight (`float`, *optional*, defaults to 1.0):
            How much each of the two counts. All four are open-unlearning's.
    """

    beta: float = 4.5
    delta: float = 0.0
    forget_weight: float = 0.125
    keep_weight: float = 1.0
    name: ClassVar[str] = "simnpo"
    paper: ClassVar[str] = "https://arxiv.org/abs/2410.07163"

    def forget_loss(self, model: Any, before: Any, seed: int) -> TextLoss:
        """The loss of each block by its mean over the predicted tokens."""

        def summed(logits: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            predicted = (labels[:, 1:] != IGNORED).sum(dim=1).clamp_min(1)
            mean = block_next_token_losses(logits, labels) / predicted
            return -2.0 / self.beta * logsigmoid(self.beta * (mean - self.delta)).sum()

        return TextLoss(summed, "block", self.forget_weight)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_above_zero(self, "beta")


@dataclass(frozen=True)
class RMU(UnlearningMethod):
    """Representation misdirection: hidden states of the text to forget go to one random place, those to keep stay.

    The loss is the mean square, over hidden units and tokens, of the distance after one layer. Trained are only the
    second MLP matrices of that layer and of the two before it; with LoRA their factors.

    Args:
        steering (`float`, *optional*, defaults to 2.0):
            The norm of the place. Its direction is drawn, each coordinate from 0 to 1, by the training's seed.
        layer (`int`, *optional*):
            After which layer, from 0. The authors take 7, of 16 or more; without it, the one at 7/16 of the depth,
            but at most 7.
        forget_weight (`float`, *optional*, defaults to 1.0), keep_weight (`float`, *optional*, defaults to 1.0):
            How much each of the two counts.
    """

    steering: float = 2.0
    layer: int | None = None
    forget_weight: float = 1.0
    keep_weight: float = 1.0
    name: ClassVar[str] = "rmu"
    paper: ClassVar[str] = "https://arxiv.org/abs/2403.03218"
    compares: ClassVar[bool] = True

    def layer_of(self, config: "PreTrainedConfig") -> int:
        """After which layer of a model."""
        layers = config.get_text_config().num_hidden_layers
        last = layers - 2  # what transformers gives for the last layer has passed the final norm: another quantity
        layer = min(7, round(7 * layers / 16), last) if self.layer is None else self.layer
        if not 0 <= layer <= last:
            raise BadValueError(f"layer={layer} of rmu: of the model's {layers} layers, 0 to {last} can be chosen.")
        return layer

    def forget_loss(self, model: Any, before: Any, seed: int) -> TextLoss:
        """How far the hidden states are from the place."""
        size = model.get_text_config().hidden_size
        drawn = torch.rand(size, generator=torch.Generator().manual_seed(mixed_seed(seed, 2)))
        place = self.steering * drawn / drawn.norm()

        def summed(states: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return _distance(states, place.to(states.device), labels)

        return TextLoss(summed, "block", self.forget_weight, self.layer_of(model))

    def keep_loss(self, model: Any, before: Any) -> TextLoss:
        """How far the hidden states are from what they were."""
        layer = self.layer_of(model)

        def summed(states: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                were = states_after(before, ids, layer)
            return _distance(states, were, labels)

        return TextLoss(summed, "block", self.keep_weight, layer)

    def settings(self, given: TrainingSettings, config: "PreTrainedConfig") -> TrainingSettings:
        """Trained are the second MLP matrices of three layers, unless the caller names others."""
        if given.targets is not None:
            return given
        last = self.layer_of(config)
        model = meta_model(config)
        layout = layout_of_model(model)
        places = {name: place_of(layout.canonical(name)) for name, _ in model.named_parameters()}
        found = sorted(
            name.removesuffix(".weight")
            for name, place in places.items()
            if place and place.kind == "MLP-2" and last - 2 <= place.layer <= last
        )
        if not found:
            raise UnsupportedError(
                f"rmu trains second MLP matrices, and none are known in a {config.model_type} model. Name the modules "
                "to train: TrainingSettings(targets=...)."
            )
        return replace(given, targets=tuple(found))


METHODS: dict[str, type[UnlearningMethod]] = {
    each.name: each for each in (GradientAscent, GradientDifference, NPO, SimNPO, RMU)
}


def unlearning_method(given: "str | UnlearningMethod") -> UnlearningMethod:
    """A method by its name, with the authors' settings, or as it is given.

    Args:
        given (`str` or `UnlearningMethod`):
            One of `ga`, `grad_diff`, `npo`, `simnpo` and `rmu`, or a method of your own settings.

    Returns:
        `UnlearningMethod`: The method.

    Raises:
        `MissingNameError`: If there is none of that name.

    Example:
        >>> unlearning_method("simnpo")
        SimNPO(beta=4.5, delta=0.0, forget_weight=0.125, keep_weight=1.0)

    """
    if isinstance(given, UnlearningMethod):
        return given
    if given not in METHODS:
        hint = did_you_mean(str(given), METHODS)
        raise MissingNameError(f"no unlearning method {given!r}.{hint} It is one of {', '.join(METHODS)}.")
    return METHODS[given]()


def _ascent(logits: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -next_token_loss(logits, ids, labels)


def _distance(states: torch.Tensor, goal: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean square over hidden units and a block's tokens, summed over the blocks."""
    counts = (labels != IGNORED).to(torch.float32)
    squares = (states.float() - goal.float()).square().mean(dim=-1) * counts
    return (squares.sum(dim=1) / counts.sum(dim=1).clamp_min(1)).sum()


def _check_above_zero(method: UnlearningMethod, name: str) -> None:
    if not vars(method)[name] > 0:
        raise BadValueError(f"{name}={vars(method)[name]!r} of {method.name} must be above 0.")
