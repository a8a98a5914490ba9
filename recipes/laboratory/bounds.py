"""Theorem 2 of Zhou et al. (2025): bounds of ‖C‖, beside C itself, with whole Hessians in fp64.

The initial weights are multiplied by several factors: the printed bound of the gradient takes the product of all
layers' norms, while the gradient of one layer's weights takes the product of the others'. The smallest factor was added
after a first look, which showed the gradient coming nearer to its bound as the weights get smaller.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from laboratory import thresholds as t
from laboratory.claims import Claim
from laboratory.gradients import ALPHA, PAPER, SIZES, TASKS, Problem, loss, make_problem

FACTORS = (0.01, 0.1, 0.3, 1.0, 3.0)
EPOCHS, RATE = 4, 0.05
STEEPEST, BENT = 1.0, 4 / (3 * math.sqrt(3))  # sup|tanh′| and sup|tanh″|


@dataclass(frozen=True)
class Bounds:
    """What Theorem 2 speaks of, and what it says; `corrected` has the gradient's bound with Π/s_ℓ."""

    factor: float
    c: float
    gradient: float
    hessian: float
    printed_gradient: float
    corrected_gradient: float
    printed_hessian: float

    @property
    def structural(self) -> float:
        """Eq. (25), with the measured maxima."""
        return _steps() * self.gradient * self.hessian

    @property
    def printed(self) -> float:
        """Theorem 2 (i)."""
        return _steps() * self.printed_gradient * self.printed_hessian


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    bounds: list[Bounds]


def _steps() -> float:
    """T (h+1)(h+2)/2 (αT+1), with h = k − 2."""
    h = EPOCHS - 2
    return TASKS * (h + 1) * (h + 2) / 2 * (ALPHA * TASKS + 1)


def run(quick: bool) -> Result:
    found = [bounds(factor) for factor in (FACTORS[2:4] if quick else FACTORS)]
    return Result(claims(found), found)


def bounds(factor: float) -> Bounds:
    """For a network whose initial weights are multiplied by a factor."""
    usual = make_problem()
    problem = Problem(factor * usual.base, usual.tasks)
    path = problem.joint(RATE, EPOCHS)
    points = path[: EPOCHS - 1]  # θ_MT^(0) … θ_MT^(h), of which C is made
    pairs = [(theta, task) for theta in points for task in range(TASKS)]
    gradient = max(problem.gradient(theta, task).norm().item() for theta, task in pairs)
    hessian = max(
        torch.linalg.matrix_norm(torch.func.hessian(loss)(theta, *problem.tasks[task]), 2).item()
        for theta, task in pairs
    )
    norms = torch.stack([torch.stack([torch.linalg.matrix_norm(w, 2) for w in layers(theta)]) for theta in points])
    s = norms.amax(dim=0)  # s_ℓ, over the path
    product = s.prod().item()
    m = max(x.norm(dim=1).max().item() for x, _ in problem.tasks)  # M_x
    depth = len(s)
    slope = STEEPEST ** (depth - 1)
    others = sum((product / each) ** 2 for each in s.tolist())
    return Bounds(
        factor,
        problem.gap(path).norm().item(),
        gradient,
        hessian,
        math.sqrt(2) * m * product * slope,
        math.sqrt(2) * m * slope * math.sqrt(others),
        2 * BENT * m**2 * product**2 * slope**2,
    )


def layers(theta: torch.Tensor) -> list[torch.Tensor]:
    """The weight matrices of a flat vector."""
    shapes = [(high, wide) for wide, high in itertools.pairwise(SIZES)]
    parts = theta.split([high * wide for high, wide in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def claims(found: list[Bounds]) -> list[Claim]:
    factors = ", ".join(f"{each.factor:g}" for each in found)

    def ratios(values: list[float]) -> str:
        return ", ".join(f"{value:.2g}" for value in values)

    def claim(text: str, where: str, values: list[float], erratum: bool = False) -> Claim:
        predicted = f"at most 1, at initial weights × {factors}"
        return Claim(PAPER, text, where, predicted, ratios(values), max(values) <= 1 + t.EXACT, erratum=erratum)

    return [
        claim(
            "‖C‖ over T(h+1)(h+2)/2·(αT+1)·H_max·G_max, both as measured",
            "Theorem 2, eq. (25)",
            [each.c / each.structural for each in found],
        ),
        claim(
            "the gradient over √2 M_x Π β^(L−1)",
            "Theorem 2 (i), G_max",
            [each.gradient / each.printed_gradient for each in found],
        ),
        claim(
            "the Hessian over 2γ M_x² Π² β^(2L−2)",
            "Theorem 2 (i), H_max",
            [each.hessian / each.printed_hessian for each in found],
        ),
        claim("‖C‖ over the whole bound", "Theorem 2 (i)", [each.c / each.printed for each in found]),
        claim(
            "Π in G_max; the gradient of W_ℓ has the other layers' norms: √2 M_x β^(L−1) √Σ(Π/s_ℓ)²",
            "Theorem 2 (i), G_max",
            [each.gradient / each.corrected_gradient for each in found],
            erratum=True,
        ),
    ]
