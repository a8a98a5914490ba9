"""Claim 4: weight decay, low rank and merging (Kuzborskij and Abbasi-Yadkori 2025). ReLU networks, gradient descent."""

import itertools
from dataclasses import dataclass

import torch
from laboratory import thresholds as t
from laboratory.claims import Claim
from tqdm.auto import tqdm

PAPER = "Low-rank bias, weight decay, and model merging (Kuzborskij and Abbasi Yadkori 2025)"
DECAYS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def network(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Many ReLU networks at once: x is (networks, samples, size), each weight (networks, out, in)."""
    for number, weight in enumerate(weights):
        x = x @ weight.transpose(1, 2)
        x = x.relu() if number < len(weights) - 1 else x
    return x[..., 0]


def logistic(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss of each network."""
    return torch.nn.functional.softplus(-y * f).mean(dim=-1)


def labels(x: torch.Tensor, frequency: float, generator: torch.Generator) -> torch.Tensor:
    """The sign of sin(frequency · Wᵀx), as in the paper's section 6."""
    direction = torch.randn(x.shape[-1], generator=generator)
    return torch.where((frequency * x @ direction).sin() >= 0, 1.0, -1.0)


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def initial(sizes: tuple[int, ...], networks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    layers = itertools.pairwise(sizes)
    return [torch.randn(networks, high, wide, generator=generator) / wide**0.5 for wide, high in layers]


def train(
    x: torch.Tensor,
    y: torch.Tensor,
    start: list[torch.Tensor],
    decays: torch.Tensor,
    rate: float,
    steps: int,
    what: str,
) -> list[torch.Tensor]:
    """Gradient descent on the regularised logistic loss, one weight decay for each network."""
    weights = [weight.clone().requires_grad_() for weight in start]
    shrink = (1 - rate * decays)[:, None, None]
    for _ in tqdm(range(steps), desc=what, disable=None, leave=False):
        gradients = torch.autograd.grad(logistic(network(x, weights), y).sum(), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.mul_(shrink).sub_(gradient, alpha=rate)
    return [weight.detach() for weight in weights]


def stable_ranks(weights: list[torch.Tensor]) -> torch.Tensor:
    """‖W‖_F / ‖W‖_2 of each network's matrices: (networks, layers)."""
    return torch.stack([w.flatten(1).norm(dim=1) / torch.linalg.matrix_norm(w, 2) for w in weights], dim=1)


@dataclass(frozen=True)
class Ranks:
    """What training comes to at one frequency of the labels, by weight decay: means over draws."""

    harmonic: list[float | None]  # of the stable ranks; None where all weights have decayed to nothing
    errors: list[float]  # share of points on the wrong side


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    ranks: dict[int, Ranks]
    merging: dict[tuple[int, str], tuple[float, float]]  # own loss, merged loss: the mean over both tasks
    steps: list[int]
    reached: list[float]
    bound: list[float]


FREQUENCIES = (10, 100)
INITIAL = (1, 2, 3)  # times the usual initial weights, which the paper does not state
MERGES = {
    "weight decay, orthogonal inputs": True,
    "no weight decay, orthogonal inputs": False,
    "weight decay, the same task": False,
    "weight decay, the same inputs with other labels": False,
}


def run(quick: bool) -> Result:
    ranks = {frequency: _ranks(frequency, quick) for frequency in FREQUENCIES}
    merging = _merging(quick)
    steps, reached, bound, worst, gap = _shallow(quick)
    claims = [_falling(frequency, found) for frequency, found in ranks.items()]
    for (scale, name), (own, merged) in merging.items():
        keeps = MERGES[name]
        claims.append(
            Claim(
                PAPER,
                f"summing two networks' weights, initial weights ×{scale}: {name}",
                "section 6.2, figure 3",
                f"{'keeps' if keeps else 'does not keep'} both (loss at most {t.KEPT} above its own)",
                f"loss {own:.3f} alone, {merged:.3f} merged",
                (merged - own <= t.KEPT) == keeps,
            )
        )
    claims += [
        Claim(
            PAPER,
            "‖W_t x'‖ stays within its bound at every step",
            "Lemma 5",
            "largest ratio to the bound ≤ 1",
            f"{worst:.3f} over {steps[-1]} steps",
            worst <= 1 + 1e-12,
        ),
        Claim(
            PAPER,
            "|f_{θ+θ'}(x) − f_θ(x)| ≤ ‖W'_t x‖ at every step",
            "Corollary 1",
            "largest ratio ≤ 1",
            f"{gap:.3f} over {steps[-1]} steps",
            gap <= 1 + 1e-12,
        ),
    ]
    return Result(claims, ranks, merging, steps, reached, bound)


def _falling(frequency: int, found: Ranks) -> Claim:
    living = [value for value in found.harmonic if value is not None]
    values = ", ".join("all weights 0" if value is None else f"{value:.3f}" for value in found.harmonic)
    errors = ", ".join(f"{value:.0%}" for value in found.errors)
    return Claim(
        PAPER,
        f"frequency {frequency}: the stable rank falls as weight decay grows ({', '.join(f'{d:g}' for d in DECAYS)})",
        "figure 2, Lemma 4",
        "the harmonic mean over layers falls",
        f"{values} (1 is the least); points on the wrong side: {errors}",
        all(later < earlier for earlier, later in itertools.pairwise(living)),
    )


def _ranks(frequency: int, quick: bool) -> Ranks:
    """Two hidden layers of 10, a thousand points of a sphere, as in the paper's figure 2."""
    draws, samples, steps = (1, 200, 300) if quick else (1, 1000, 3000)
    count = len(DECAYS)
    inputs, targets = [], []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        x = unit(torch.randn(samples, 100, generator=generator))
        inputs.append(x.expand(count, -1, -1))
        targets.append(labels(x, float(frequency), generator).expand(count, -1))
    x, y, decays = torch.cat(inputs), torch.cat(targets), torch.tensor(DECAYS).repeat(draws)
    start = [weight.repeat_interleave(count, dim=0) for weight in initial((100, 10, 10, 1), draws)]
    weights = train(x, y, start, decays, 0.5, steps, f"stable rank, frequency {frequency}")
    # The last layer is a vector: its rank is 1 whatever happens. What has decayed to nothing has the rank of rounding.
    ranks = stable_ranks(weights[:-1])
    alive = torch.stack([w.flatten(1).norm(dim=1) for w in weights], dim=1).amin(dim=1) > 1e-3
    harmonic = ranks.shape[1] / (1 / ranks).sum(dim=1)
    wrong = (network(x, weights) * y <= 0).float().mean(dim=1).view(draws, count).mean(dim=0)
    table = zip(
        harmonic.view(draws, count).mean(dim=0).tolist(), alive.view(draws, count).all(dim=0).tolist(), strict=True
    )
    return Ranks([value if lives else None for value, lives in table], wrong.tolist())


def _merging(quick: bool) -> dict[tuple[int, str], tuple[float, float]]:
    """Own and merged losses, the mean of several draws. Orthogonal inputs lie in two halves of the space."""
    size, samples, decay = 100, 100, 1e-3
    draws, steps = (1, 200) if quick else (2, 3500)
    inputs, targets = [], []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(100 + draw)
        halves = torch.zeros(2, samples, size)
        halves[0, :, : size // 2] = torch.randn(samples, size // 2, generator=generator)
        halves[1, :, size // 2 :] = torch.randn(samples, size // 2, generator=generator)
        halves = unit(halves)
        own = torch.stack([labels(half, 1.0, generator) for half in halves])
        other = labels(halves[0], 1.0, generator)
        same = halves[:1].expand(2, -1, -1)
        inputs += [halves, halves, same, same]  # in the order of MERGES
        targets += [own, own, own[:1].expand(2, -1), torch.stack([own[0], other])]
    decays = torch.tensor([decay, 0.0, decay, decay]).repeat_interleave(2).repeat(draws)
    x, y = torch.cat(inputs), torch.cat(targets)
    found = {}
    for scale in INITIAL:
        start = [scale * weight for weight in initial((size, 100, 30, 1), len(x))]
        weights = train(x, y, start, decays, 1.0, steps, f"merging, initial weights ×{scale}")
        merged = [w.view(-1, 2, *w.shape[1:]).sum(dim=1).repeat_interleave(2, dim=0) for w in weights]
        losses = [
            logistic(network(x, each), y).view(draws, len(MERGES), 2).mean(dim=(0, 2)) for each in (weights, merged)
        ]
        found |= {(scale, name): (losses[0][i].item(), losses[1][i].item()) for i, name in enumerate(MERGES)}
    return found


def _shallow(quick: bool) -> tuple[list[int], list[float], list[float], float, float]:
    """Two shallow networks with nearly orthogonal inputs, in fp64: Lemma 5 and Corollary 1, step by step."""
    generator = torch.Generator().manual_seed(2)
    size, width, samples, rate, decay = 40, 60, 50, 0.5, 2e-2
    x = torch.randn(2, samples, size, generator=generator, dtype=torch.float64)
    x[0, :, size // 2 :] *= 0.02  # nearly orthogonal: the inner products between the tasks are small, but not 0
    x[1, :, : size // 2] *= 0.02
    x = unit(x)
    y = torch.stack([labels(each.float(), 3.0, generator).double() for each in x])
    epsilon = (x[0] @ x[1].T).abs().max().item()
    u = unit(torch.randn(width, generator=generator, dtype=torch.float64))
    weights = torch.randn(2, width, size, generator=generator, dtype=torch.float64)
    start = (x @ weights.flip(0).transpose(1, 2)).norm(dim=-1)  # ‖W'_0 x‖, each task's inputs in the other's network
    steps = list(range((100 if quick else 1500) + 1))
    reached, bound, worst, gap = [], [], 0.0, 0.0
    for step in steps:
        across = (x @ weights.flip(0).transpose(1, 2)).norm(dim=-1)
        left = (1 - rate * decay) ** step
        limit = start * left + epsilon * (1 - left) / decay
        worst = max(worst, (across / limit).max().item())
        f = ((x @ weights.transpose(1, 2)).relu() @ u, (x @ weights.sum(0).T).relu() @ u)
        gap = max(gap, ((f[1] - f[0]).abs() / across).max().item())
        reached.append(across.max().item())
        bound.append(limit.max().item())
        weights.requires_grad_()
        total = logistic((x @ weights.transpose(1, 2)).relu() @ u, y).sum()
        (gradient,) = torch.autograd.grad(total, weights)
        weights = ((1 - rate * decay) * weights - rate * gradient).detach()
    return steps, reached, bound, worst, gap
