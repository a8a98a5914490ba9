"""Claim 1: the one-layer transformer of Li et al. (2025), eq. (4), on the data of their Definition 2.

`f(X) = 1/P Σ_l aᵀ relu(V Σ_s x_s softmax_l(x_sᵀ W x_l))`, hinge loss, SGD. Tokens are ±μ, which decide the label by
majority, and orthonormal v_j, which do not. Two tasks differ in their μ only, and `α = μ_1ᵀ μ_2`. The signs in `a` are
drawn once and shared by all positions, as the paper's proofs have it.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from laboratory.claims import Claim
from tqdm.auto import tqdm

from hf_taskvec import TaskVector
from hf_taskvec.analysis import Recommendation, TransferScales, recommend_scales

PAPER = "When is task vector provably effective for model editing? (Li et al. 2025)"
# What counts as small and as Θ(1) of a hinge loss, which is 1 for an output of 0. Set before anything was measured.
SMALL, LARGE = 0.2, 0.5
ALPHAS = {"irrelevant": 0.0, "aligned": 0.5, "nearly alike": 0.9, "contradictory": -0.5, "nearly opposite": -0.9}
GAMMAS = (0.8, -0.5)


@dataclass(frozen=True)
class Setting:
    """Sizes that the theorems ask for: m ≥ M² log M neurons, batches of B ≥ ε⁻² log M, d ≥ M + patterns."""

    patterns: int = 16  # M
    width: int = 800  # m
    tokens: int = 20  # P
    relevant: float = 0.4  # δ*
    confusing: float = 0.1  # δ#
    batch: int = 256  # B
    rate: float = 0.5  # η
    steps: int = 400  # T
    tests: int = 500
    seed: int = 0

    @property
    def size(self) -> int:  # d: the v_j, μ_1, μ_2 and two directions orthogonal to both
        return self.patterns + 4


Weights = dict[str, torch.Tensor]


def output(x: torch.Tensor, weights: Weights, signs: torch.Tensor) -> torch.Tensor:
    """Eq. (4). `x` is (samples, tokens, size)."""
    scores = x @ weights["W"] @ x.transpose(1, 2)  # [s, l] = x_sᵀ W x_l
    mixed = scores.softmax(dim=1).transpose(1, 2) @ x
    return ((mixed @ weights["V"].T).relu() @ signs).mean(dim=1)


def draw(
    setting: Setting, mu: torch.Tensor, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition 2: samples and labels of the task whose discriminative pattern is μ."""
    rest = (1 - setting.relevant - setting.confusing) / setting.patterns
    chances = torch.tensor([setting.relevant, setting.confusing, *[rest] * setting.patterns])
    kinds = torch.multinomial(chances.expand(count, -1), setting.tokens, True, generator=generator)
    while True:  # the label-relevant pattern must be in the majority
        wrong = (kinds == 0).sum(1) <= (kinds == 1).sum(1)
        if not wrong.any():
            break
        kinds[wrong] = torch.multinomial(
            chances.expand(int(wrong.sum()), -1), setting.tokens, True, generator=generator
        )
    y = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1
    dictionary = torch.cat([torch.stack([mu, -mu]), torch.eye(setting.size)[: setting.patterns]])
    x = dictionary[kinds]
    return torch.where((kinds < 2)[..., None], x * y[:, None, None], x), y


def hinge(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (1 - y * f).relu().mean()


@dataclass
class OneLayerModel:
    """The untrained model, and task vectors made by fine-tuning it."""

    setting: Setting
    base: Weights = field(init=False)
    signs: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        s, generator = self.setting, torch.Generator().manual_seed(self.setting.seed)
        scale = 1 / math.sqrt(s.width)
        self.base = {
            "W": torch.randn(s.size, s.size, generator=generator) * scale,
            "V": torch.randn(s.width, s.size, generator=generator) * scale,
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

    def loss(self, vector: TaskVector, mu: torch.Tensor) -> float:
        """The hinge loss of base + vector on new data of a task."""
        weights = {k: v + vector.dense(k) if k in vector else v for k, v in self.base.items()}
        generator = torch.Generator().manual_seed(self.setting.seed + 2)
        x, y = draw(self.setting, mu, self.setting.tests, generator)
        with torch.no_grad():
            return hinge(output(x, weights, self.signs), y).item()

    def pruned(self, vector: TaskVector, mu: torch.Tensor) -> tuple[TaskVector, float, float]:
        """The vector without the unlucky rows of ΔV, the share of rows kept, and the mean norms, unlucky over lucky.

        A neuron is lucky (eqs. (13), (14)) if before training it is active on the mean token of the label that its sign
        in `a` votes for.
        """
        s, dense = self.setting, vector.dense("V")
        rest = torch.eye(s.size)[: s.patterns].sum(0) * (1 - s.relevant - s.confusing) / s.patterns
        means = [rest + sign * (s.relevant - s.confusing) * mu for sign in (1, -1)]
        active = [self.base["V"] @ mean > 0 for mean in means]
        lucky = torch.where(self.signs > 0, *active)
        norms = dense.norm(dim=1)
        smaller = TaskVector.from_tensors({"W": vector.dense("W"), "V": dense * lucky[:, None]}, name="pruned")
        return smaller, lucky.float().mean().item(), (norms[~lucky].mean() / norms[lucky].mean()).item()

    def largest(self, vector: TaskVector, rows: int) -> TaskVector:
        """The vector with so many rows of ΔV, those of the largest norm."""
        half_less = (rows - 0.5) / self.setting.width  # a share that is rounded up to `rows`
        return vector.prune_rows(half_less, include=re.compile("^V$"))


@dataclass(frozen=True)
class Curve:
    """Losses of both tasks for each λ of `θ_0 + τ_1 + λ τ_2`."""

    alpha: float
    scales: tuple[float, ...]
    first: tuple[float, ...]
    second: tuple[float, ...]

    def where(self, succeeds: Callable[[float, float], bool]) -> list[float]:
        found = zip(self.scales, self.first, self.second, strict=True)
        return [scale for scale, one, other in found if succeeds(one, other)]


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    curves: dict[str, Curve]
    transfer: TransferScales
    axis: tuple[float, ...]
    losses: list[list[float]]  # of the new task, λ_2 down, λ_1 across


def theorems(alpha: float) -> Recommendation:
    """Theorems 1 and 2 as they stand: only an α of 0 is irrelevant, and case (B) reaches down to −α⁻²."""
    beta = 0.01
    return recommend_scales(alpha, irrelevant=0.0, gap=0.05, beta=beta, c=beta / alpha**2 if alpha < 0 else 0.02)


def both_small(first: float, second: float) -> bool:
    return first <= SMALL and second <= SMALL


def only_first_small(first: float, second: float) -> bool:
    return first <= SMALL and second >= LARGE


def run(quick: bool) -> Result:
    setting = Setting(patterns=8, width=160, batch=128, steps=150, tests=200) if quick else Setting()
    model = OneLayerModel(setting)
    mu = model.pattern(1.0)
    others = {name: model.pattern(alpha) if alpha else model.pattern(0.0, 1.0) for name, alpha in ALPHAS.items()}
    first = model.finetuned(mu, "first")
    seconds = {name: model.finetuned(other, name.replace(" ", "_")) for name, other in others.items()}
    claims = [_finetuning(model, first, mu, seconds, others)]
    curves = {}
    scales = tuple(-4.5 + 0.25 * step for step in range(28))
    for name, vector in seconds.items():
        losses = [[model.loss(first + scale * vector, pattern) for scale in scales] for pattern in (mu, others[name])]
        curves[name] = Curve(ALPHAS[name], scales, tuple(losses[0]), tuple(losses[1]))
    claims += [_adding(curve) for curve in curves.values()] + [_forgetting(curve) for curve in curves.values()]
    transfer = recommend_scales(gammas=GAMMAS).transfer
    assert transfer is not None
    axis = tuple(-2 + 0.25 * step for step in range(17))
    new = model.pattern(*GAMMAS)
    orthogonal = seconds["irrelevant"]
    grid = [[model.loss(one * first + other * orthogonal, new) for one in axis] for other in axis]
    claims.append(_transfer(transfer, axis, grid))
    claims.append(_closed_form(model, transfer, first, orthogonal, new))
    claims += _corollaries(model, first, seconds, mu, others)
    return Result(claims, curves, transfer, axis, grid)


def _span(curve: Curve, scales: Sequence[float]) -> str:
    """Runs of neighbouring λ."""
    runs: list[list[float]] = []
    for scale in scales:
        here = curve.scales.index(scale)
        if runs and curve.scales[here - 1] == runs[-1][-1]:
            runs[-1].append(scale)
        else:
            runs.append([scale])
    return ", ".join(f"{run[0]:g} … {run[-1]:g}" if len(run) > 1 else f"{run[0]:g}" for run in runs) or "none"


def _finetuning(
    model: OneLayerModel,
    first: TaskVector,
    mu: torch.Tensor,
    seconds: dict[str, TaskVector],
    others: dict[str, torch.Tensor],
) -> Claim:
    losses = [model.loss(first, mu), *(model.loss(seconds[name], others[name]) for name in seconds)]
    text = ", ".join(f"{loss:.3f}" for loss in losses)
    return Claim(
        PAPER, "fine-tuning learns each task", f"hinge loss ≤ Θ(ε), here ≤ {SMALL}", text, max(losses) <= SMALL
    )


def _adding(curve: Curve) -> Claim:
    region = theorems(curve.alpha).add
    found = curve.where(both_small)
    claim = f"Theorem 1, α = {curve.alpha:g}: adding task 2"
    if region is None or region.low is None or region.high is None:
        return Claim(
            PAPER, claim, "no λ serves both tasks", f"both losses ≤ {SMALL} for λ: {_span(curve, found)}", not found
        )
    inside = [scale for scale in curve.scales if region.low <= scale <= region.high]
    holds = all(scale in found for scale in inside)
    measured = f"both losses ≤ {SMALL} for λ: {_span(curve, found)}"
    return Claim(PAPER, claim, f"works for λ ≥ 1 − α + β ≈ {1 - curve.alpha:g} (|λ| not too large)", measured, holds)


def _forgetting(curve: Curve) -> Claim:
    region = theorems(curve.alpha).forget
    assert region is not None and region.low is not None and region.high is not None
    found = curve.where(only_first_small)
    inside = [scale for scale in curve.scales if region.low <= scale <= region.high]
    holds = bool(inside) and all(scale in found for scale in inside)
    case = "(A)" if curve.alpha == 0 else "(C)" if curve.alpha > 0 else "(B)"
    return Claim(
        PAPER,
        f"Theorem 2 {case}, α = {curve.alpha:g}: forgetting task 2, keeping task 1",
        f"works for {region.low:.3g} ≤ λ ≤ {region.high:.3g}",
        f"loss 1 ≤ {SMALL} and loss 2 ≥ {LARGE} for λ: {_span(curve, found)}",
        holds,
    )


def _transfer(transfer: TransferScales, axis: Sequence[float], grid: list[list[float]]) -> Claim:
    points = [(one, other, grid[j][i]) for j, other in enumerate(axis) for i, one in enumerate(axis)]
    inside = [loss for one, other, loss in points if transfer.holds((one, other))]
    outside = [loss for one, other, loss in points if not transfer.holds((one, other))]
    good, elsewhere = sum(loss <= SMALL for loss in inside), sum(loss <= SMALL for loss in outside)
    return Claim(
        PAPER,
        f"Theorem 3, γ = ({GAMMAS[0]:g}, {GAMMAS[1]:g}): a new task from two",
        f"loss ≤ Θ(ε), here ≤ {SMALL}, wherever the three conditions hold",
        f"at {good} of {len(inside)} grid points inside the region, and at {elsewhere} of {len(outside)} outside",
        bool(inside) and good == len(inside),
    )


def _closed_form(
    model: OneLayerModel, transfer: TransferScales, first: TaskVector, second: TaskVector, new: torch.Tensor
) -> Claim:
    one, other = transfer.scales
    loss = model.loss(one * first + other * second, new)
    untouched = model.loss(0 * first, new)
    return Claim(
        PAPER,
        "eqs. (75), (76), corrected: the closed form for λ",
        f"λ = ({one:.2f}, {other:.2f}) gives loss ≤ {SMALL}",
        f"loss {loss:.3f} (θ_0: {untouched:.3f})",
        loss <= SMALL,
    )


def _corollaries(
    model: OneLayerModel,
    first: TaskVector,
    seconds: dict[str, TaskVector],
    mu: torch.Tensor,
    others: dict[str, torch.Tensor],
) -> list[Claim]:
    second, other = seconds["irrelevant"], others["irrelevant"]
    scale = 1.25  # inside Theorem 1's region
    whole = [model.loss(first + scale * second, pattern) for pattern in (mu, other)]
    ranked = [vector.compress(rank=1) for vector in (first, second)]
    low = [model.loss(ranked[0] + scale * ranked[1], pattern) for pattern in (mu, other)]
    lost = ", ".join(f"{name}: {math.sqrt(share):.0%}" for name, share in ranked[0].discarded.items())
    pruned, share, ratio = zip(*(model.pruned(*pair) for pair in ((first, mu), (second, other))), strict=True)
    few = [model.loss(pruned[0] + scale * pruned[1], pattern) for pattern in (mu, other)]
    # As many rows as there are lucky neurons, but the largest ones, whoever they belong to.
    rows = [round(each * model.setting.width) for each in share]
    largest = [model.largest(*pair) for pair in zip((first, second), rows, strict=True)]
    by_norm = [model.loss(largest[0] + scale * largest[1], pattern) for pattern in (mu, other)]
    bound = math.sqrt(math.log(model.setting.batch) / model.setting.batch)
    return [
        Claim(
            PAPER,
            f"Corollary 1: rank-1 vectors do as well (α = 0, λ = {scale:g})",
            f"both losses ≤ {SMALL}, as with full vectors ({whole[0]:.3f}, {whole[1]:.3f})",
            f"losses {low[0]:.3f}, {low[1]:.3f}; left out of the norm of each change: {lost}",
            max(low) <= SMALL,
        ),
        Claim(
            PAPER,
            f"Corollary 2: all rows of ΔV but those of lucky neurons can be pruned (α = 0, λ = {scale:g})",
            f"both losses ≤ {SMALL}",
            f"losses {few[0]:.3f}, {few[1]:.3f}, with {share[0]:.0%} and {share[1]:.0%} of the rows",
            max(few) <= SMALL,
        ),
        Claim(
            PAPER,
            f"Corollary 2: all rows of ΔV but as many of the largest norm can be pruned (α = 0, λ = {scale:g})",
            f"both losses ≤ {SMALL}",
            f"losses {by_norm[0]:.3f}, {by_norm[1]:.3f}; left out of the norm of ΔV: "
            + ", ".join(f"{math.sqrt(vector.discarded['V']):.0%}" for vector in largest),
            max(by_norm) <= SMALL,
        ),
        Claim(
            PAPER,
            "Corollary 2: the other rows are smaller by √(log B / B)",
            f"mean norm at most Θ({bound:.2f}) of the large rows'",
            f"{ratio[0]:.2f} and {ratio[1]:.2f}",
            max(ratio) <= 2 * bound,
        ),
    ]
