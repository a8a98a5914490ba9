"""The one-layer transformer of Li et al. (2025), eq. (4), on the data of their Definition 2.

`f(X) = 1/P Σ_l aᵀ relu(V Σ_s x_s softmax_l(x_sᵀ W x_l))`, hinge loss, SGD. Tokens are ±μ, which decide the label by
majority, and orthonormal v_j, which do not. Two tasks differ in their μ only, and `α = μ_1ᵀ μ_2`. The signs in `a` are
drawn once and shared by all positions, as the paper's proofs have it.
"""

import math
import re
from dataclasses import dataclass, field

import torch
from tqdm.auto import tqdm

from hf_taskvec import TaskVector


@dataclass(frozen=True)
class Setting:
    """Sizes that the theorems ask for: m ≥ M² log M neurons, batches of B ≥ ε⁻² log M, d ≥ M + patterns.

    The proofs normalise the trained margin to 1. It is 1 if every sample has the same numbers of label-relevant and
    confusing tokens (`exact`): with drawn numbers the hinge loss goes on until the least of them has a margin of 1, and
    the mean margin ends near 1.9.
    """

    patterns: int = 12  # M
    width: int = 400  # m
    tokens: int = 20  # P
    relevant: float = 0.4  # δ*
    confusing: float = 0.1  # δ#
    batch: int = 128  # B
    rate: float = 0.2  # η
    steps: int = 200  # T, six times η⁻¹δ*⁻²
    tests: int = 200
    seed: int = 0
    exact: bool = True
    spread: float = 1.0  # ξ √m

    @property
    def size(self) -> int:  # d: the v_j, μ_1, μ_2 and two directions orthogonal to both
        return self.patterns + 4


DRAWN_COUNTS = Setting(patterns=16, width=800, batch=256, rate=0.5, steps=400, tests=500, exact=False)
Weights = dict[str, torch.Tensor]


def output(x: torch.Tensor, weights: Weights, signs: torch.Tensor) -> torch.Tensor:
    """Eq. (4). `x` is (samples, tokens, size)."""
    mixed = attention(x, weights).transpose(1, 2) @ x
    return ((mixed @ weights["V"].T).relu() @ signs).mean(dim=1)


def attention(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """The weight of key s for query l, as [s, l]: the softmax of x_sᵀ W x_l over s."""
    return (x @ weights["W"] @ x.transpose(1, 2)).softmax(dim=1)


def draw(
    setting: Setting, mu: torch.Tensor, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition 2: samples and labels of the task whose discriminative pattern is μ."""
    kinds = _exact_kinds(setting, count, generator) if setting.exact else _drawn_kinds(setting, count, generator)
    y = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1
    dictionary = torch.cat([torch.stack([mu, -mu]), torch.eye(setting.size)[: setting.patterns]])
    x = dictionary[kinds]
    return torch.where((kinds < 2)[..., None], x * y[:, None, None], x), y


def _exact_kinds(s: Setting, count: int, generator: torch.Generator) -> torch.Tensor:
    """δ* P tokens of kind 0 (label-relevant), δ# P of kind 1 (confusing), the others of the v_j."""
    relevant, confusing = round(s.relevant * s.tokens), round(s.confusing * s.tokens)
    rest = torch.randint(2, 2 + s.patterns, (count, s.tokens - relevant - confusing), generator=generator)
    fixed = torch.tensor([0] * relevant + [1] * confusing).expand(count, -1)
    return torch.cat([fixed, rest], dim=1)  # their order means nothing to eq. (4)


def _drawn_kinds(s: Setting, count: int, generator: torch.Generator) -> torch.Tensor:
    """Every token drawn by itself, until the label-relevant ones are in the majority."""
    rest = (1 - s.relevant - s.confusing) / s.patterns
    chances = torch.tensor([s.relevant, s.confusing, *[rest] * s.patterns])
    kinds = torch.multinomial(chances.expand(count, -1), s.tokens, True, generator=generator)
    while (wrong := (kinds == 0).sum(1) <= (kinds == 1).sum(1)).any():
        kinds[wrong] = torch.multinomial(chances.expand(int(wrong.sum()), -1), s.tokens, True, generator=generator)
    return kinds


def hinge(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (1 - y * f).relu().mean()


def dense(vector: TaskVector) -> Weights:
    """The change itself: a sweep adds up two of them much faster than it reads two vectors at every λ."""
    return {key: vector.dense(key) for key in vector}


@dataclass
class OneLayerModel:
    """The untrained model, and task vectors made by fine-tuning it."""

    setting: Setting
    base: Weights = field(init=False)
    signs: torch.Tensor = field(init=False)
    _tests: dict[tuple[float, ...], tuple[torch.Tensor, torch.Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        s, generator = self.setting, torch.Generator().manual_seed(self.setting.seed)
        scale = 1 / math.sqrt(s.width)  # of a; ξ is it times `spread`
        self.base = {
            "W": torch.randn(s.size, s.size, generator=generator) * scale * s.spread,
            "V": torch.randn(s.width, s.size, generator=generator) * scale * s.spread,
        }
        self.signs = (torch.randint(0, 2, (s.width,), generator=generator) * 2.0 - 1) * scale

    def pattern(self, *parts: float) -> torch.Tensor:
        """A unit vector with these components along μ_1, μ_2 and, for the rest of its length, orthogonal to both."""
        mu = torch.zeros(self.setting.size)
        first = self.setting.patterns
        mu[first : first + len(parts)] = torch.tensor(parts)
        mu[first + len(parts)] = math.sqrt(max(0.0, 1 - sum(part**2 for part in parts)))
        return mu

    def finetuned(self, mu: torch.Tensor, name: str) -> TaskVector:
        """The task vector of SGD on the hinge loss from the base."""
        s, generator = self.setting, torch.Generator().manual_seed(self.setting.seed + 1)
        weights = {key: value.clone().requires_grad_() for key, value in self.base.items()}
        for _ in tqdm(range(s.steps), desc=f"one-layer transformer, {name:13}", disable=None, leave=False):
            x, y = draw(s, mu, s.batch, generator)
            gradients = torch.autograd.grad(hinge(output(x, weights, self.signs), y), list(weights.values()))
            with torch.no_grad():
                for weight, gradient in zip(weights.values(), gradients, strict=True):
                    weight -= s.rate * gradient
        return TaskVector.from_tensors({k: weights[k].detach() - self.base[k] for k in weights}, name=name)

    def margins(self, change: TaskVector | Weights, mu: torch.Tensor) -> torch.Tensor:
        """`y f(X)` of base + change on new data of a task."""
        key = tuple(mu.tolist())
        if key not in self._tests:
            generator = torch.Generator().manual_seed(self.setting.seed + 2)
            self._tests[key] = draw(self.setting, mu, self.setting.tests, generator)
        x, y = self._tests[key]
        with torch.no_grad():
            return y * output(x, self.weights(change), self.signs)

    def weights(self, change: TaskVector | Weights) -> Weights:
        """Those of base + change."""
        found = dense(change) if isinstance(change, TaskVector) else change
        return {key: value + found[key] if key in found else value for key, value in self.base.items()}

    def loss(self, change: TaskVector | Weights, mu: torch.Tensor) -> float:
        """The hinge loss of base + change on new data of a task."""
        return (1 - self.margins(change, mu)).relu().mean().item()

    def lucky(self, mu: torch.Tensor) -> torch.Tensor:
        """Eqs. (13), (14): neurons that are active, before training, on the label that their sign in `a` votes for.

        A query's mixture of tokens is then the mean token, up to what the small initial W does.
        """
        s = self.setting
        rest = torch.eye(s.size)[: s.patterns].sum(0) * (1 - s.relevant - s.confusing) / s.patterns
        means = [rest + sign * (s.relevant - s.confusing) * mu for sign in (1, -1)]
        return torch.where(self.signs > 0, *[self.base["V"] @ mean > 0 for mean in means])

    def pruned(self, vector: TaskVector, mu: torch.Tensor) -> tuple[TaskVector, float, float]:
        """The vector without the unlucky rows of ΔV, the share of rows kept, and the mean norms, unlucky over lucky."""
        dense, lucky = vector.dense("V"), self.lucky(mu)
        norms = dense.norm(dim=1)
        smaller = TaskVector.from_tensors({"W": vector.dense("W"), "V": dense * lucky[:, None]}, name="pruned")
        return smaller, lucky.float().mean().item(), (norms[~lucky].mean() / norms[lucky].mean()).item()

    def largest(self, vector: TaskVector, rows: int) -> TaskVector:
        """The vector with so many rows of ΔV, those of the largest norm."""
        half_less = (rows - 0.5) / self.setting.width  # a share that is rounded up to `rows`
        return vector.prune_rows(half_less, include=re.compile("^V$"))
