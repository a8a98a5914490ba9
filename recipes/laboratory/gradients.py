"""Claim 2: task vectors are gradients (Zhou et al. 2025). A small smooth network, full batches, everything in fp64."""

import itertools
import math
from dataclasses import dataclass

import torch
from laboratory import thresholds as t
from laboratory.claims import Claim

PAPER = "On task vectors and gradients (Zhou et al. 2025)"
SIZES = (6, 12, 12, 3)
TASKS, SAMPLES = 3, 40
ALPHA = 0.4
RATES = tuple(0.2 / 2**n for n in range(8))
EPOCHS = (2, 3, 5)


def loss(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of a tanh network whose weights are one flat vector."""
    start = 0
    for number, (wide, high) in enumerate(itertools.pairwise(SIZES)):
        weight = theta[start : start + wide * high].view(high, wide)
        x = x @ weight.T
        start += wide * high
        x = x.tanh() if number < len(SIZES) - 2 else x
    return torch.nn.functional.cross_entropy(x, y)


@dataclass(frozen=True)
class Problem:
    base: torch.Tensor
    tasks: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def gradient(self, theta: torch.Tensor, task: int) -> torch.Tensor:
        return torch.func.grad(loss)(theta, *self.tasks[task])

    def curvature(self, theta: torch.Tensor, task: int, direction: torch.Tensor) -> torch.Tensor:
        """∇²L_t(θ) times a vector."""
        return torch.func.jvp(lambda at: self.gradient(at, task), (theta,), (direction,))[1]

    def arithmetic(self, rate: float, epochs: int) -> torch.Tensor:
        """θ_TA: each task's own gradient descent, then `base + α Σ τ_t`."""
        total = torch.zeros_like(self.base)
        for task in range(len(self.tasks)):
            theta = self.base
            for _ in range(epochs):
                theta = theta - rate * self.gradient(theta, task)
            total += theta - self.base
        return self.base + ALPHA * total

    def joint(self, rate: float, epochs: int) -> list[torch.Tensor]:
        """θ_MT after 0, 1, …, epochs steps of size αη on the sum of the losses."""
        path = [self.base]
        for _ in range(epochs):
            step = sum(self.gradient(path[-1], task) for task in range(len(self.tasks)))
            path.append(path[-1] - ALPHA * rate * step)
        return path

    def gap(self, path: list[torch.Tensor]) -> torch.Tensor:
        """C of eq. (3), along θ_MT^(0), …, θ_MT^(k)."""
        total = torch.zeros_like(self.base)
        tasks = range(len(self.tasks))
        gradients = [[self.gradient(theta, task) for task in tasks] for theta in path[:-2]]
        for task in tasks:
            drift = torch.zeros_like(self.base)
            for theta, found in zip(path[:-2], gradients, strict=True):
                drift = drift + ALPHA * sum(found) - found[task]  # Σ_{m ≤ e} r_t
                total += self.curvature(theta, task, drift)
        return total


def make_problem(seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    count = sum(wide * high for wide, high in itertools.pairwise(SIZES))
    base = torch.randn(count, generator=generator, dtype=torch.float64) / math.sqrt(SIZES[1])
    tasks = tuple(
        (
            torch.randn(SAMPLES, SIZES[0], generator=generator, dtype=torch.float64),
            torch.randint(0, SIZES[-1], (SAMPLES,), generator=generator),
        )
        for _ in range(TASKS)
    )
    return Problem(base, tasks)


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    rates: tuple[float, ...]
    gaps: dict[int, list[float]]
    predicted: dict[int, list[float]]


def run(quick: bool) -> Result:
    problem = make_problem()
    once = [problem.arithmetic(rate, 1) - problem.joint(rate, 1)[-1] for rate in RATES]
    largest = max(gap.abs().max().item() for gap in once) / problem.base.abs().max().item()
    gaps: dict[int, list[float]] = {epochs: [] for epochs in EPOCHS}
    predicted: dict[int, list[float]] = {epochs: [] for epochs in EPOCHS}
    errors = {}
    printed = {}
    for epochs in EPOCHS:
        for rate in RATES:
            path = problem.joint(rate, epochs)
            gap, second = problem.arithmetic(rate, epochs) - path[-1], rate**2 * problem.gap(path)
            gaps[epochs].append(gap.norm().item())
            predicted[epochs].append(ALPHA * second.norm().item())
        errors[epochs] = ((gap + ALPHA * second).norm() / gap.norm()).item()  # at the smallest rate
        printed[epochs] = ((gap - second).norm() / gap.norm()).item()
    exponents = {epochs: slope(RATES[3:], found[3:]) for epochs, found in gaps.items()}
    claims = [
        Claim(
            PAPER,
            "one epoch: θ_TA = θ_MT",
            "Theorem 1, eq. (1)",
            "equal to rounding (about 1e-16 of the weights)",
            f"largest difference {largest:.1e} of the largest weight",
            largest < t.EXACT,
        ),
        Claim(
            PAPER,
            f"k = {', '.join(map(str, EPOCHS))} epochs: the gap falls as η²",
            "Theorem 1, eq. (2)",
            "exponent 2",
            "exponents " + ", ".join(f"{value:.3f}" for value in exponents.values()),
            all(abs(value - 2) < 0.05 for value in exponents.values()),
        ),
        Claim(
            PAPER,
            f"the gap is −αη²C to leading order (η = {RATES[-1]:.4g})",
            "appendix A.1",
            "relative error → 0 with η",
            "relative errors " + ", ".join(f"{value:.1%}" for value in errors.values()),
            max(errors.values()) < t.GAP,
        ),
        Claim(
            PAPER,
            "the gap is +η²C",
            "eqs. (2), (5), (12), (15)",
            "relative error → 0 with η",
            "relative errors " + ", ".join(f"{value:.0%}" for value in printed.values()),
            max(printed.values()) < t.GAP,
            erratum=True,
        ),
    ]
    return Result(claims, RATES, gaps, predicted)


def slope(x: tuple[float, ...], y: list[float]) -> float:
    """The exponent of a power law, by least squares in logarithms."""
    a, b = (torch.tensor(values, dtype=torch.float64).log() for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    return ((a * b).sum() / (a * a).sum()).item()
