"""Claim 2: task vectors are gradients (Zhou et al. 2025). A small smooth network, full batches, everything in fp64."""

import itertools
import math
from collections.abc import Callable
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
Activation = Callable[[torch.Tensor], torch.Tensor]


def logits(theta: torch.Tensor, x: torch.Tensor, activation: Activation = torch.tanh) -> torch.Tensor:
    """The outputs of a network whose weights are one flat vector."""
    start = 0
    for number, (wide, high) in enumerate(itertools.pairwise(SIZES)):
        weight = theta[start : start + wide * high].view(high, wide)
        x = x @ weight.T
        start += wide * high
        x = activation(x) if number < len(SIZES) - 2 else x
    return x


def loss(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor, activation: Activation = torch.tanh) -> torch.Tensor:
    """Its cross-entropy."""
    return torch.nn.functional.cross_entropy(logits(theta, x, activation), y)


@dataclass(frozen=True)
class Problem:
    base: torch.Tensor
    tasks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    activation: Activation = torch.tanh

    def gradient(self, theta: torch.Tensor, task: int) -> torch.Tensor:
        return torch.func.grad(loss)(theta, *self.tasks[task], self.activation)

    def curvature(self, theta: torch.Tensor, task: int, direction: torch.Tensor) -> torch.Tensor:
        """∇²L_t(θ) times a vector."""
        return torch.func.jvp(lambda at: self.gradient(at, task), (theta,), (direction,))[1]

    def single(self, task: int, rate: float, epochs: int) -> torch.Tensor:
        """θ_t: a task's own gradient descent."""
        theta = self.base
        for _ in range(epochs):
            theta = theta - rate * self.gradient(theta, task)
        return theta

    def arithmetic(self, rate: float, epochs: int) -> torch.Tensor:
        """θ_TA: `base + α Σ τ_t`."""
        total = torch.zeros_like(self.base)
        for task in range(len(self.tasks)):
            total += self.single(task, rate, epochs) - self.base
        return self.base + ALPHA * total

    def joint(self, rate: float, epochs: int) -> list[torch.Tensor]:
        """θ_MT after 0, 1, …, epochs steps of size αη on the sum of the losses."""
        path = [self.base]
        for _ in range(epochs):
            step = sum(self.gradient(path[-1], task) for task in range(len(self.tasks)))
            path.append(path[-1] - ALPHA * rate * step)
        return path

    def drifts(self, path: list[torch.Tensor], task: int) -> list[torch.Tensor]:
        """p_t^0, p_t^1, … of eq. (7), along θ_MT^(0), θ_MT^(1), …: sums of r_t, by which a task's gradient differs."""
        total, found = torch.zeros_like(self.base), []
        for theta in path:
            every = [self.gradient(theta, other) for other in range(len(self.tasks))]
            total = total + ALPHA * sum(every) - every[task]
            found.append(total)
        return found

    def bending(self, path: list[torch.Tensor], task: int) -> torch.Tensor:
        """s_t of eq. (8), along a whole path."""
        pairs = zip(path, self.drifts(path, task), strict=True)
        return torch.stack([self.curvature(theta, task, drift) for theta, drift in pairs]).sum(dim=0)

    def gap(self, path: list[torch.Tensor]) -> torch.Tensor:
        """C of eq. (3), along θ_MT^(0), …, θ_MT^(k)."""
        return torch.stack([self.bending(path[:-2], task) for task in range(len(self.tasks))]).sum(dim=0)

    def expanded(self, path: list[torch.Tensor], task: int, rate: float) -> torch.Tensor:
        """What Lemma 1 gives for θ_t after as many epochs as the path has, without its O(η³)."""
        return path[-1] + rate * self.drifts(path[:-1], task)[-1] - rate**2 * self.bending(path[:-2], task)


def make_problem(seed: int = 0, activation: Activation = torch.tanh) -> Problem:
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
    return Problem(base, tasks, activation)


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
    left: dict[int, list[float]] = {epochs: [] for epochs in EPOCHS}  # by Lemma 1: of the task that is worst
    errors = {}
    printed = {}
    for epochs in EPOCHS:
        for rate in RATES:
            path = problem.joint(rate, epochs)
            gap, second = problem.arithmetic(rate, epochs) - path[-1], rate**2 * problem.gap(path)
            gaps[epochs].append(gap.norm().item())
            predicted[epochs].append(ALPHA * second.norm().item())
            apart = [problem.single(n, rate, epochs) - problem.expanded(path, n, rate) for n in range(TASKS)]
            left[epochs].append(max(each.norm().item() for each in apart))
        errors[epochs] = ((gap + ALPHA * second).norm() / gap.norm()).item()  # at the smallest rate
        printed[epochs] = ((gap - second).norm() / gap.norm()).item()
    exponents, thirds = (
        {epochs: slope(RATES[3:], found[3:]) for epochs, found in each.items()} for each in (gaps, left)
    )
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
            all(abs(value - 2) < t.ORDER for value in exponents.values()),
        ),
        Claim(
            PAPER,
            f"a task's own model after k = {', '.join(map(str, EPOCHS))} epochs is θ_MT + ηp − η²s, up to η³",
            "Lemma 1, eqs. (9), (10)",
            "exponent 3 of what is left, for the worst task",
            "exponents " + ", ".join(f"{value:.3f}" for value in thirds.values()),
            all(abs(value - 3) < t.ORDER for value in thirds.values()),
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
