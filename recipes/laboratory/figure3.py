"""Figure 3 of Kuzborskij and Abbasi Yadkori (2025) at its network's size: 100 inputs, hidden layers of 1000 and 100.

The paper's 10⁵ steps at λ = 1e-4. The number of samples and the initial weights, which the paper does not state, are 50
and the usual ones. (A tenth of the steps at ten times the weight decay leaves as much of the initial weights; it came
first, and its verdicts are in docs/papers.md.)
"""

from dataclasses import dataclass

import torch
from laboratory import thresholds as t
from laboratory.claims import Claim
from laboratory.decay import PAPER, initial, labels, logistic, network, stable_ranks, unit
from tqdm.auto import tqdm

SIZES, SAMPLES, DECAY, STEPS, EVERY = (100, 1000, 100, 1), 50, 1e-4, 100_000, 2500
PAIRS = {"different tasks": (0, 1), "the same task": (0, 2), "different tasks, no weight decay": (3, 4)}


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    steps: list[int]
    own: dict[str, list[float]]
    merged: dict[str, list[float]]
    ranks: dict[str, list[list[float]]]  # of one network and of the merged one: (matrices, steps)


def run(quick: bool) -> Result:
    generator = torch.Generator().manual_seed(300)
    half = SIZES[0] // 2
    inputs = torch.zeros(2, SAMPLES, SIZES[0])
    inputs[0, :, :half] = torch.randn(SAMPLES, half, generator=generator)
    inputs[1, :, half:] = torch.randn(SAMPLES, half, generator=generator)
    inputs = unit(inputs)
    targets = torch.stack([labels(each, 1.0, generator) for each in inputs])
    # Networks 0, 1: two tasks; 2: the first task again; 3, 4: the two tasks without weight decay.
    task = torch.tensor([0, 1, 0, 0, 1])
    x, y = inputs[task], targets[task]
    decays = torch.tensor([DECAY, DECAY, DECAY, 0.0, 0.0])[:, None, None]
    weights = [weight.requires_grad_() for weight in initial(SIZES, 5)]
    steps: list[int] = []
    own: dict[str, list[float]] = {name: [] for name in PAIRS}
    merged: dict[str, list[float]] = {name: [] for name in PAIRS}
    ranks: dict[str, list[list[float]]] = {"one network": [], "merged": []}
    for step in tqdm(range(1, (200 if quick else STEPS) + 1), desc="figure 3", disable=None, leave=False):
        found = torch.autograd.grad(logistic(network(x, weights), y).sum(), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, found, strict=True):
                weight.sub_(gradient.add_(decays * weight))  # η = 1
        if step % EVERY == 0 or step in (1, 50, 100, 200):
            steps.append(step)
            now = [weight.detach() for weight in weights]
            losses = logistic(network(x, now), y)
            for name, pair in PAIRS.items():
                rows = torch.tensor(pair)
                summed = [weight[rows].sum(dim=0, keepdim=True).expand(2, -1, -1) for weight in now]
                own[name].append(losses[rows].mean().item())
                merged[name].append(logistic(network(x[rows], summed), y[rows]).mean().item())
            ranks["one network"].append(stable_ranks([weight[:1] for weight in now[:-1]])[0].tolist())
            both = [weight[:2].sum(dim=0, keepdim=True) for weight in now[:-1]]
            ranks["merged"].append(stable_ranks(both)[0].tolist())
    return Result(_claims(steps, own, merged, ranks), steps, own, merged, ranks)


def _claims(
    steps: list[int], own: dict[str, list[float]], merged: dict[str, list[float]], ranks: dict[str, list[list[float]]]
) -> list[Claim]:
    found = []
    for name in PAIRS:
        keeps = name == "different tasks"
        found.append(
            Claim(
                PAPER,
                f"(100, 1000, 100, 1), {steps[-1]} steps at λ = {DECAY:g}: summing the weights, {name}",
                "figure 3",
                f"{'keeps' if keeps else 'does not keep'} both (loss at most {t.KEPT} above its own)",
                f"loss {own[name][-1]:.3f} alone, {merged[name][-1]:.3f} merged",
                (merged[name][-1] - own[name][-1] <= t.KEPT) == keeps,
            )
        )
    first, last, both = ranks["one network"][0], ranks["one network"][-1], ranks["merged"][-1]
    found.append(
        Claim(
            PAPER,
            "(100, 1000, 100, 1): the stable ranks fall, and the merged network's are as low",
            "figure 3",
            "lower than at the start in every matrix; the merged network's at most √2 times one network's",
            f"{', '.join(f'{a:.2f} → {b:.2f}' for a, b in zip(first, last, strict=True))}; "
            f"merged {', '.join(f'{value:.2f}' for value in both)}",
            all(b < a for a, b in zip(first, last, strict=True))
            and all(m <= 2**0.5 * one + t.NEAR_ONE for m, one in zip(both, last, strict=True)),
        )
    )
    return found
