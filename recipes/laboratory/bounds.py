"""Theorem 2 of Zhou et al. (2025): bounds of ‖C‖, beside C itself, with whole Hessians in fp64: tanh (i), ReLU (ii).

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
from laboratory.gradients import ALPHA, PAPER, SIZES, TASKS, Activation, Problem, logits, loss, make_problem

FACTORS = (0.01, 0.1, 0.3, 1.0, 3.0)
EPOCHS, RATE = 4, 0.05
STEEPEST, BENT = 1.0, 4 / (3 * math.sqrt(3))  # sup|tanh′|, which is ReLU's, and sup|tanh″|


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
    beyond: float  # the part of the Hessian that is not JᵀHJ, over all of it: at most, by the spectral norm

    @property
    def structural(self) -> float:
        """Eq. (25), with the measured maxima."""
        return _steps() * self.gradient * self.hessian

    @property
    def printed(self) -> float:
        """Theorem 2."""
        return _steps() * self.printed_gradient * self.printed_hessian


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    bounds: list[Bounds]  # of tanh networks
    relu: list[Bounds]


def _steps() -> float:
    """T (h+1)(h+2)/2 (αT+1), with h = k − 2."""
    h = EPOCHS - 2
    return TASKS * (h + 1) * (h + 2) / 2 * (ALPHA * TASKS + 1)


def run(quick: bool) -> Result:
    factors = FACTORS[2:4] if quick else FACTORS
    found, relu = ([bounds(factor, activation) for factor in factors] for activation in (torch.tanh, torch.relu))
    return Result(claims(found) + relu_claims(relu), found, relu)


def bounds(factor: float, activation: Activation = torch.tanh) -> Bounds:
    """For a network whose initial weights are multiplied by a factor."""
    usual = make_problem(activation=activation)
    problem = Problem(factor * usual.base, usual.tasks, activation)
    path = problem.joint(RATE, EPOCHS)
    points = path[: EPOCHS - 1]  # θ_MT^(0) … θ_MT^(h), of which C is made
    pairs = [(theta, task) for theta in points for task in range(TASKS)]
    gradient = max(problem.gradient(theta, task).norm().item() for theta, task in pairs)
    hessians = [torch.func.hessian(loss)(theta, *problem.tasks[task], activation) for theta, task in pairs]
    lengths = [torch.linalg.matrix_norm(hessian, 2).item() for hessian in hessians]
    others = [h - outer_part(theta, problem, task) for h, (theta, task) in zip(hessians, pairs, strict=True)]
    shares = [torch.linalg.matrix_norm(o, 2).item() / whole for o, whole in zip(others, lengths, strict=True)]
    norms = torch.stack([torch.stack([torch.linalg.matrix_norm(w, 2) for w in layers(theta)]) for theta in points])
    s = norms.amax(dim=0)  # s_ℓ, over the path
    product = s.prod().item()
    m = max(x.norm(dim=1).max().item() for x, _ in problem.tasks)  # M_x
    slope = STEEPEST ** (len(s) - 1)
    bent = 0.5 if activation is torch.relu else 2 * BENT  # in front of M_x² Π²: (ii), (i)
    return Bounds(
        factor,
        problem.gap(path).norm().item(),
        gradient,
        max(lengths),
        math.sqrt(2) * m * product * slope,
        math.sqrt(2) * m * slope * math.sqrt(sum((product / each) ** 2 for each in s.tolist())),
        bent * m**2 * product**2 * slope**2,
        max(shares),
    )


def outer_part(theta: torch.Tensor, problem: Problem, task: int) -> torch.Tensor:
    """JᵀHJ of eq. (29), the mean over samples: the loss's Hessian if the network's own were 0."""
    x, _ = problem.tasks[task]
    jacobian = torch.func.jacrev(logits)(theta, x, problem.activation)
    p = logits(theta, x, problem.activation).softmax(dim=1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("nkp,nkl,nlq->pq", jacobian, inner, jacobian) / len(x)


def layers(theta: torch.Tensor) -> list[torch.Tensor]:
    """The weight matrices of a flat vector."""
    shapes = [(high, wide) for wide, high in itertools.pairwise(SIZES)]
    parts = theta.split([high * wide for high, wide in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def claims(found: list[Bounds]) -> list[Claim]:
    return [
        _claim(
            "‖C‖ over T(h+1)(h+2)/2·(αT+1)·H_max·G_max, both as measured",
            "Theorem 2, eq. (25)",
            found,
            [each.c / each.structural for each in found],
        ),
        _claim(
            "the gradient over √2 M_x Π β^(L−1)",
            "Theorem 2 (i), G_max",
            found,
            [each.gradient / each.printed_gradient for each in found],
        ),
        _claim(
            "the Hessian over 2γ M_x² Π² β^(2L−2)",
            "Theorem 2 (i), H_max",
            found,
            [each.hessian / each.printed_hessian for each in found],
        ),
        _claim(
            "‖C‖ over the whole bound",
            "Theorem 2 (i)",
            found,
            [each.c / each.printed for each in found],
        ),
        _claim(
            "Π in G_max; the gradient of W_ℓ has the other layers' norms: √2 M_x β^(L−1) √Σ(Π/s_ℓ)²",
            "Theorem 2 (i), G_max",
            found,
            [each.gradient / each.corrected_gradient for each in found],
            erratum=True,
        ),
    ]


def relu_claims(found: list[Bounds]) -> list[Claim]:
    return [
        _claim(
            "ReLU: the Hessian over ½ M_x² Π²",
            "Theorem 2 (ii), H_max",
            found,
            [each.hessian / each.printed_hessian for each in found],
        ),
        _claim(
            "ReLU: ‖C‖ over the whole bound, T(h+1)(h+2)/2·(αT+1)·½√2 M_x³ Π³",
            "Theorem 2 (ii), appendix A.2",
            found,
            [each.c / each.printed for each in found],
        ),
        Claim(
            PAPER,
            "ReLU: the network's Hessian is 0 almost everywhere, and the loss's is JᵀHJ; it is 0 within one layer, "
            "but not between two",
            "appendix A.2",
            "no other part of the Hessian",
            f"the other part is up to {max(each.beyond for each in found):.0%} of it (spectral norms)",
            False,
            erratum=True,
        ),
    ]


def _claim(text: str, where: str, found: list[Bounds], values: list[float], erratum: bool = False) -> Claim:
    predicted = f"at most 1, at initial weights × {', '.join(f'{each.factor:g}' for each in found)}"
    measured = ", ".join(f"{value:.2g}" for value in values)
    return Claim(PAPER, text, where, predicted, measured, max(values) <= 1 + t.EXACT, erratum=erratum)
