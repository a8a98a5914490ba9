"""What Kuzborskij and Abbasi Yadkori (2025) build on: the linear example of section 5, Lemmas 6 and 7.

In fp64. Integrals over time are sums over steps of gradient descent, which are small.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from laboratory import thresholds as t
from laboratory.claims import Claim
from laboratory.decay import PAPER, logistic, unit
from laboratory.stationary import DEPTH, KINDS, data, gradients, output, random_weights, rank_one_weights
from tqdm.auto import tqdm

RATE, WEIGHT_DECAY = 0.1, 0.01


@dataclass(frozen=True)
class Integrals:
    """Of one network, from when its mean margin is positive: by layer, relative to what the loss falls by."""

    squares: list[float]  # ∫ ‖∇L‖²
    products: list[float]  # λ ∫ ⟨∇L, W⟩

    @property
    def sums(self) -> list[float]:
        return [a + b for a, b in zip(self.squares, self.products, strict=True)]


def linear_example(steps: int, rate: float = 0.5, decay: float = 0.02) -> float:
    """The largest |⟨θ_t, x'⟩| over its bound, for two linear predictors of nearly orthogonal inputs, at every step."""
    generator = torch.Generator().manual_seed(11)
    size, samples = 20, 30
    x = torch.randn(2, samples, size, generator=generator, dtype=torch.float64)
    x[0, :, size // 2 :] *= 0.05
    x[1, :, : size // 2] *= 0.05
    x = unit(x)
    y = torch.where(torch.randn(2, samples, generator=generator) >= 0, 1.0, -1.0).double()
    theta = torch.randn(2, size, 1, generator=generator, dtype=torch.float64)
    epsilon = (x[0] @ x[1].T).abs().max()
    start = (x @ theta.flip(0))[..., 0].abs()
    worst = 0.0
    for step in range(steps + 1):
        left = (1 - rate * decay) ** step
        across = (x @ theta.flip(0))[..., 0].abs()
        worst = max(worst, (across / (start * left + epsilon * (1 - left) / decay)).max().item())
        theta = linear_step(theta, x, y, rate, decay)
    return worst


def linear_step(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor, rate: float, decay: float) -> torch.Tensor:
    """A step on the regularised logistic loss of ⟨θ, x⟩, of several predictors."""
    slopes = -torch.sigmoid(-y * (x @ theta)[..., 0]) * y / y.shape[-1]
    return (1 - rate * decay) * theta - rate * (x.transpose(1, 2) @ slopes[..., None])


def lemma6(steps: int, rate: float = RATE, decay: float = WEIGHT_DECAY) -> tuple[list[float], list[float]]:
    """The left side over the right one, from time 0 to each step's: a deep linear network that begins balanced.

    As printed, with ‖w‖^(1 − 1/K); and with ‖w‖^(−2/K), which it is with the 1/‖w‖² that eq. (4) lacks in its last
    term: ∇Lᵀ(wwᵀ/‖w‖²).
    """
    x, y = (each[None] for each in data(5))
    weights = [weight[:1] for weight in rank_one_weights(8)]
    linear = KINDS["linear"]
    first = logistic(output(x, weights, linear), y).item()
    powers = (1 - 1 / DEPTH, -2 / DEPTH)
    totals: list[float] = [0.0, 0.0]
    found: tuple[list[float], list[float]] = ([], [])
    for step in tqdm(range(1, steps + 1), desc="Lemma 6", disable=None, leave=False):
        w = weights[0][0]
        for weight in weights[1:]:
            w = weight[0] @ w
        slopes = -torch.sigmoid(-y[0] * (x[0] @ w[0])) * y[0] / len(y[0])
        length, along = w.norm().item(), abs((slopes @ (x[0] @ w[0])).item())
        bound = math.sqrt((DEPTH - 1) * (1 + decay * DEPTH) * first * rate * step)
        for n, power in enumerate(powers):
            totals[n] += rate * (DEPTH - 1) * length**power * along
            found[n].append(totals[n] / bound)
        moves = gradients(x, y, weights, linear)
        weights = [a - rate * (g + decay * a) for a, g in zip(weights, moves, strict=True)]
    return found


def lemma7(kind: str, steps: int, rate: float = RATE, decay: float = WEIGHT_DECAY) -> Integrals:
    """Both integrals until the last step.

    A ReLU network chatters where neurons switch, at any step: its gradients are longer than the flow's, which slides
    along, and its layers together give more than what the loss falls by. A linear network's give just that.
    """
    x, y = (each[None] for each in data(5))
    weights, activation = random_weights(8, 1), KINDS[kind]
    squares = products = torch.zeros(DEPTH, dtype=torch.float64)
    first = logistic(output(x, weights, activation), y).item()
    for _ in tqdm(range(steps), desc=f"Lemma 7, {kind}", disable=None, leave=False):
        f = output(x, weights, activation)
        if (torch.sigmoid(-y * f) * y * f).mean() < 0:  # Assumption 1 is not met: begin anew from here
            squares = products = torch.zeros(DEPTH, dtype=torch.float64)
            first = logistic(f, y).item()
        found = gradients(x, y, weights, activation)
        squares = squares + rate * torch.stack([g.square().sum() for g in found])
        along = [(g * w).sum() for g, w in zip(found, weights, strict=True)]
        products = products + rate * decay * torch.stack(along)
        weights = [w - rate * (g + decay * w) for w, g in zip(weights, found, strict=True)]
    fallen = first - logistic(output(x, weights, activation), y).item()
    return Integrals((squares / fallen).tolist(), (products / fallen).tolist())


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    bounded: tuple[list[float], list[float]]  # Lemma 6, step by step: as printed, corrected


def run(quick: bool) -> Result:
    linear = linear_example(100 if quick else 1500)
    bounded = lemma6(200 if quick else 50000)
    found = {kind: lemma7(kind, 400 if quick else 10000) for kind in ("linear", "ReLU")}

    def several(what: Callable[[Integrals], list[float]]) -> str:
        rows = (f"{kind} {', '.join(f'{v:.2f}' for v in what(each))}" for kind, each in found.items())
        return "; ".join(rows)

    claims = [
        Claim(
            PAPER,
            "linear predictors: |⟨θ_t, x'⟩| stays within its bound at every step",
            "section 5",
            "largest ratio to the bound ≤ 1",
            f"{linear:.3f}",
            linear <= 1 + 1e-12,
        ),
        *(
            Claim(
                PAPER,
                f"deep linear networks: (K−1)∫‖w‖^({power})|⟨∇L, w⟩| is of order √t, so that ∫a falls with t{what}",
                "Lemma 6",
                "at most 1 of its bound at all times",
                f"{', '.join(f'{each[len(each) * n // 100 - 1]:.2f}' for n in (1, 10, 50, 100))} of it after 1, 10, 50 "
                "and 100 % of the time",
                max(each) <= 1,
                erratum=erratum,
            )
            for each, power, what, erratum in (
                (bounded[0], "1−1/K", "; eq. (4) lacks 1/‖w‖²", True),
                (bounded[1], "−2/K", "", False),
            )
        ),
        Claim(
            PAPER,
            "∫‖∇L‖² + λ∫⟨∇L, W⟩ of each layer is what the loss falls by",
            "Lemma 7",
            f"1 ± {t.GAP:g}, relative to it, for every layer",
            f"{several(lambda each: each.sums)}; all layers together {several(lambda each: [sum(each.sums)])}",
            all(abs(value - 1) <= t.GAP for each in found.values() for value in each.sums),
        ),
        Claim(
            PAPER,
            "with a positive margin ∫‖∇L‖² of each layer is at most what the loss falls by",
            "Lemma 7",
            "at most 1, relative to it; for the proof ⟨∇L, W⟩ ≥ 0",
            f"{several(lambda each: each.squares)}; λ∫⟨∇L, W⟩: {several(lambda each: each.products)}",
            max(value for each in found.values() for value in each.squares) <= 1,
        ),
    ]
    return Result(claims, bounded)
