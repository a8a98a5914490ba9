"""Lemmas 1 to 4 and Theorems 1 to 3 of Kuzborskij and Abbasi Yadkori (2025), on small networks in fp64.

Gradient descent with weight decay runs until nothing moves. Networks of one kind are trained at once, one for each
weight decay. Theorems 1 and 2 sum the weights of two networks whose inputs are orthogonal.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from laboratory import thresholds as t
from laboratory.claims import Claim
from laboratory.decay import PAPER, logistic, unit
from tqdm.auto import tqdm

SIZES = (12, 16, 16, 1)
DEPTH = len(SIZES) - 1
DECAYS = (0.003, 0.01, 0.02)
Weights = list[torch.Tensor]  # (networks, out, in)
Activation = Callable[[torch.Tensor], torch.Tensor]
KINDS: dict[str, Activation] = {"linear": lambda x: x, "ReLU": torch.relu, "ReLU²": lambda x: x.relu().square()}


def hidden(x: torch.Tensor, weights: Weights, activation: Activation) -> list[torch.Tensor]:
    """h_1, …, h_K of many networks, x being (networks, samples, size); the last is the output."""
    found = []
    for number, weight in enumerate(weights):
        x = x @ weight.transpose(1, 2)
        x = activation(x) if number < len(weights) - 1 else x
        found.append(x)
    return found


def output(x: torch.Tensor, weights: Weights, activation: Activation) -> torch.Tensor:
    return hidden(x, weights, activation)[-1][..., 0]


def gradients(x: torch.Tensor, y: torch.Tensor, weights: Weights, activation: Activation) -> Weights:
    """Of each network's own loss, without the decay."""
    weights = [weight.detach().requires_grad_() for weight in weights]
    return list(torch.autograd.grad(logistic(output(x, weights, activation), y).sum(), weights))


def descend(
    x: torch.Tensor,
    y: torch.Tensor,
    weights: Weights,
    activation: Activation,
    decays: Sequence[float] | Callable[[int], float],
    rate: float,
    steps: int,
    what: str,
    after: Callable[[int, Weights], None] | None = None,
) -> Weights:
    """Gradient descent; weight decays of each network, or one of the step."""
    fixed = None if callable(decays) else torch.tensor(decays, dtype=torch.float64)[:, None, None]
    for step in tqdm(range(steps), desc=what, disable=None, leave=False):
        decay = decays(step) if callable(decays) else fixed
        found = gradients(x, y, weights, activation)
        weights = [w - rate * (g + decay * w) for w, g in zip(weights, found, strict=True)]
        if after is not None:
            after(step + 1, weights)
    return weights


def data(seed: int, count: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the unit sphere, labelled by the side of a plane: a margin that decay cannot wipe out."""
    generator = torch.Generator().manual_seed(seed)
    x = unit(torch.randn(count, SIZES[0], generator=generator, dtype=torch.float64))
    direction = torch.randn(SIZES[0], generator=generator, dtype=torch.float64)
    return x, torch.where(x @ direction >= 0, 1.0, -1.0).double()


def random_weights(seed: int, count: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(high, wide) for wide, high in itertools.pairwise(SIZES)]
    drawn = [torch.randn(h, w, generator=generator, dtype=torch.float64) * math.sqrt(2 / w) for h, w in shapes]
    return [weight.expand(count, -1, -1) for weight in drawn]


@dataclass(frozen=True)
class Stationary:
    """Networks of one kind at the end of training, one for each weight decay."""

    residual: list[float]  # ‖λθ + ∇L‖ / ‖λθ‖
    norms: torch.Tensor  # ‖W_k‖_F²: (networks, layers)
    expected: torch.Tensor  # −1/n Σ ℓ'(y f) y f / λ, Lemma 3's ‖W_k‖_F²
    second: torch.Tensor  # σ_2 / σ_1 of the matrices: (networks, layers − 1)
    inverse: list[float]  # 1/K Σ ‖W_k‖_2 / ‖W_k‖_F
    loss: list[float]


def settle(kind: str, steps: int) -> Stationary:
    """Train networks of a kind to the end."""
    x, y = (each.expand(len(DECAYS), *each.shape) for each in data(3))
    activation = KINDS[kind]
    weights = descend(x, y, random_weights(4, len(DECAYS)), activation, DECAYS, 0.5, steps, f"{kind} networks")
    decays = torch.tensor(DECAYS, dtype=torch.float64)
    found = gradients(x, y, weights, activation)
    flat, slope = (torch.cat([each.flatten(1) for each in values], dim=1) for values in (weights, found))
    residual = (decays[:, None] * flat + slope).norm(dim=1) / (decays[:, None] * flat).norm(dim=1)
    f = output(x, weights, activation) * y
    values = [torch.linalg.svdvals(weight) for weight in weights]
    norms = torch.stack([weight.flatten(1).square().sum(dim=1) for weight in weights], dim=1)
    inverse = torch.stack([s[:, 0] for s in values], dim=1) / norms.sqrt()
    return Stationary(
        residual.tolist(),
        norms,
        (torch.sigmoid(-f) * f).mean(dim=1) / decays,
        torch.stack([s[:, 1] / s[:, 0] for s in values[:-1]], dim=1),
        inverse.mean(dim=1).tolist(),
        logistic(output(x, weights, activation), y).tolist(),
    )


@dataclass(frozen=True)
class Merged:
    """Two networks of orthogonal inputs, step by step: what summing their weights does to the first one's outputs."""

    times: list[float]
    across: list[float]  # the largest |f_θ'(x)|, relative to the largest |f_θ(x)|
    gap: list[float]  # the largest |f_{θ+θ'}(x) − f_θ(x)|, relative
    layers: list[float]  # the same of each layer at the end
    rate: float  # at which `across` falls at the end
    shared: list[float]  # of each hidden layer at the end: the largest |cosine| of both networks' activations
    least: float  # γ of Definition 1 at the end, the least of the hidden layers


def merge(kind: str, decays: float | Callable[[int], float], rate: float, steps: int, balanced: bool) -> Merged:
    """Train both networks, on inputs in two halves of the space."""
    activation = KINDS[kind]
    half = SIZES[0] // 2
    x, y = (torch.stack(each) for each in zip(data(5), data(6), strict=True))
    x[0, :, half:], x[1, :, :half] = 0, 0
    x = unit(x)
    y = torch.where(
        (x @ torch.randn(SIZES[0], 1, generator=torch.Generator().manual_seed(7)).double())[..., 0] >= 0, 1.0, -1.0
    )
    y = y.double()
    weights = (
        rank_one_weights(8)
        if balanced
        else [torch.stack([a[0], b[0]]) for a, b in zip(random_weights(8, 1), random_weights(9, 1), strict=True)]
    )
    times, across, gap = [], [], []

    def compare(step: int, weights: Weights) -> list[float]:
        own = [h[0] for h in hidden(x, weights, activation)]
        summed = [weight.sum(dim=0, keepdim=True) for weight in weights]
        both = [h[0] for h in hidden(x[:1], summed, activation)]
        other = output(x[:1], [weight[1:] for weight in weights], activation)
        scale = own[-1].abs().max()
        times.append(step * rate)
        across.append((other.abs().max() / scale).item())
        gap.append(((both[-1] - own[-1]).abs().max() / scale).item())
        return [((a - b).norm() / b.norm()).item() for a, b in zip(both, own, strict=True)]

    def after(step: int, weights: Weights) -> None:
        if step % max(1, steps // 100) == 0:
            compare(step, weights)

    per_network = decays if callable(decays) else (decays, decays)
    weights = descend(x, y, weights, activation, per_network, rate, steps, f"merging {kind} networks", after)
    layers = compare(steps, weights)
    first, second = ([h[n] for h in hidden(x, weights, activation)[:-1]] for n in (0, 1))
    shared = [cosines(a, b).abs().max().item() for a, b in zip(first, second, strict=True)]
    return Merged(times[:-1], across[:-1], gap[:-1], layers, _rate(times, across), shared, smallest(x, weights))


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of all pairs of rows; 0 where one is 0."""
    return torch.nn.functional.normalize(a, dim=-1) @ torch.nn.functional.normalize(b, dim=-1).T


def smallest(x: torch.Tensor, weights: Weights) -> float:
    """γ_k of Definition 1, the least of the hidden layers k, of the inputs and of the networks."""
    found = []
    for weight in weights[:-1]:
        lengths = x.norm(dim=-1, keepdim=True)
        x = (x @ weight.transpose(1, 2)).relu()
        normalised = x / lengths
        found.append(normalised[normalised > 0].min().item())
    return min(found)


def _rate(times: list[float], values: list[float]) -> float:
    """At which values fall as e^(−rate · t), between the first quarter and where they are rounding."""
    kept = [(a, b) for a, b in zip(times, values, strict=True) if b > 1e-12][len(times) // 4 :]
    if len(kept) < 2 or kept[0][0] == kept[-1][0]:
        return float("nan")
    return (math.log(kept[0][1]) - math.log(kept[-1][1])) / (kept[-1][0] - kept[0][0])


def rank_one_weights(seed: int) -> Weights:
    """Two chains with W_{k+1}ᵀW_{k+1} = W_k W_kᵀ, as Theorem 1 asks for: W_k = s a_k a_{k−1}ᵀ of unit vectors."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(2):
        units = [unit(torch.randn(size, generator=generator, dtype=torch.float64)) for size in SIZES]
        found.append([torch.outer(high, wide) for wide, high in itertools.pairwise(units)])
    return [torch.stack(pair) for pair in zip(*found, strict=True)]


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    stationary: dict[str, Stationary]
    merged: dict[str, Merged]


def run(quick: bool) -> Result:
    steps = 400 if quick else 16000
    stationary = {kind: settle(kind, steps) for kind in KINDS}
    decay = 0.01
    merged = {
        "deep linear (Theorem 1)": merge("linear", decay, 0.1, 400 if quick else 8000, balanced=True),
        "ReLU (Theorem 2)": merge("ReLU", decay, 0.5, 400 if quick else 8000, balanced=False),
        "ReLU, λ_t = 0.3/√t": merge("ReLU", lambda s: 0.3 / math.sqrt(s + 100), 0.5, 400 if quick else 8000, False),
    }
    return Result(claims(stationary, merged, decay), stationary, merged)


def claims(stationary: dict[str, Stationary], merged: dict[str, Merged], decay: float) -> list[Claim]:
    decays = ", ".join(f"{each:g}" for each in DECAYS)
    residuals = {kind: max(found.residual) for kind, found in stationary.items()}
    second = stationary["linear"].second.max().item()
    balanced = {
        kind: ((found.norms / found.expected[:, None]) - 1).abs().max().item() for kind, found in stationary.items()
    }
    degrees = (stationary["ReLU²"].norms / stationary["ReLU²"].norms[:, -1:]).mean(dim=0).tolist()
    lemma4 = [_lemma4(stationary[kind]) for kind in ("linear", "ReLU")]
    least = [min(min(each[n]) for each in lemma4) for n in range(3)]
    linear, relu, schedule = merged.values()
    shrinking = f"{linear.across[0]:.1e} → {linear.across[-1]:.1e}, as e^(−{linear.rate:.4f} t)"
    return [
        Claim(
            PAPER,
            f"at the end λθ = −∇L(θ) (λ = {decays})",
            "Lemma 1",
            f"‖λθ + ∇L‖ ≤ {t.STATIONARY:g} ‖λθ‖ for smooth networks",
            ", ".join(f"{kind} {value:.0e}" for kind, value in residuals.items()),
            max(residuals["linear"], residuals["ReLU²"]) <= t.STATIONARY,
        ),
        Claim(
            PAPER,
            "the matrices of a deep linear network are of rank one",
            "Lemma 2",
            f"σ_2/σ_1 ≤ {t.RANK_ONE:g}",
            f"{second:.0e}",
            second <= t.RANK_ONE,
        ),
        Claim(
            PAPER,
            "all layers have the same norm, λ‖W_k‖_F² = −1/n Σ ℓ'(y f) y f (linear, ReLU)",
            "Lemma 3",
            f"relative difference ≤ {t.BALANCED:g}",
            f"{balanced['linear']:.0e}, {balanced['ReLU']:.0e}",
            max(balanced["linear"], balanced["ReLU"]) <= t.BALANCED,
        ),
        Claim(
            PAPER,
            "Lemma 3 for every positively homogeneous network, ReLU^p among them",
            "Lemma 3, section 1.1",
            "equal norms; but its proof needs degree 1 in each layer, and ReLU² has degrees 4, 2, 1",
            "‖W_k‖_F² of ReLU² networks over the last layer's: " + ", ".join(f"{value:.2f}" for value in degrees),
            False,
            erratum=True,
        ),
        Claim(
            PAPER,
            "the mean of ‖W_k‖_2/‖W_k‖_F is at least (λ / L^(1/2−1/K))^(1/2)",
            "Lemma 4, eq. (2)",
            "least ratio to the bound ≥ 1 (linear, ReLU)",
            f"{least[0]:.2f}",
            least[0] >= 1,
        ),
        Claim(
            PAPER,
            "… and at least λ^(1−1/K) e^(1−2/K)",
            "Lemma 4, eq. (3)",
            "least ratio to the bound ≥ 1",
            f"{least[1]:.2f}",
            least[1] >= 1,
        ),
        Claim(
            PAPER,
            "B ≤ 1/(eλ) in the proof of eq. (3)",
            "appendix A",
            "B² ≤ 1/(eλ), which gives the larger λ^(1/2) e^(1/2−1/K)",
            f"least ratio to that bound {least[2]:.2f}",
            least[2] >= 1,
            erratum=True,
        ),
        Claim(
            PAPER,
            f"deep linear networks, orthogonal inputs: the other's output vanishes (λ = {decay:g}, K = {DEPTH})",
            "Theorem 3",
            f"at the end ≤ {t.SAME:g} of its own outputs",
            shrinking,
            linear.across[-1] <= t.SAME,
        ),
        Claim(
            PAPER,
            "e^(−λKt) in the bound of Theorems 1 and 3",
            "appendix B.3",
            f"λK = {decay * DEPTH:g}, where the proof has e^(−λKt/2); but a(t) of eq. (5) tends to −λ = −{decay:g} at "
            "a stationary point that is not 0, and ∫a of Lemma 6 grows with t: e^(−λt)",
            f"rate at the end {linear.rate:.4f}",
            False,
            erratum=True,
        ),
        Claim(
            PAPER,
            "deep linear networks, orthogonal inputs: summing all weights leaves the outputs",
            "Theorem 1",
            f"|f_(θ+θ') − f_θ| at the end ≤ {t.SAME:g} of the outputs",
            f"{linear.gap[-1]:.1e}; by layer {', '.join(f'{value:.1e}' for value in linear.layers)}",
            linear.gap[-1] <= t.SAME,
        ),
        Claim(
            PAPER,
            "deep ReLU networks, orthogonal inputs: summing all weights leaves every layer",
            "Theorem 2",
            f"relative differences ≤ {t.SAME:g} in every layer, for a constant λ or λ_t of order 1/√t",
            f"{', '.join(f'{value:.1e}' for value in relu.layers)}; "
            f"λ_t: {', '.join(f'{value:.1e}' for value in schedule.layers)}",
            min(max(relu.layers), max(schedule.layers)) <= t.SAME,
        ),
        Claim(
            PAPER,
            "deep ReLU networks, orthogonal inputs: activations of both networks become orthogonal in every layer",
            "Lemma 8, Corollary 2",
            f"largest |cosine| ≤ {t.SAME:g} at the end",
            f"{', '.join(f'{value:.2f}' for value in relu.shared)} (γ = {relu.least:.0e}); "
            f"λ_t: {', '.join(f'{value:.2f}' for value in schedule.shared)} (γ = {schedule.least:.0e})",
            min(max(relu.shared), max(schedule.shared)) <= t.SAME,
        ),
    ]


def _lemma4(found: Stationary) -> tuple[list[float], list[float], list[float]]:
    """The mean inverse stable rank over eq. (2), eq. (3), and eq. (3) with B² ≤ 1/(eλ)."""
    k = DEPTH
    twos, threes, squares = [], [], []
    for decay, loss, inverse in zip(DECAYS, found.loss, found.inverse, strict=True):
        twos.append(inverse / math.sqrt(decay / loss ** (1 / 2 - 1 / k)))
        threes.append(inverse / (decay ** (1 - 1 / k) * math.e ** (1 - 2 / k)))
        squares.append(inverse / (decay**0.5 * math.e ** (1 / 2 - 1 / k)))
    return twos, threes, squares
