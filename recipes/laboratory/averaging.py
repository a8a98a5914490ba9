"""What else Zhou et al. (2024) measure: averages of k models, ensembles, stitching, what pretraining is for.

ReLU networks on made-up pictures (`pictures.py`). Fine-tunes of one task differ in their learning rates and in the
order of the pictures.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from laboratory import pictures
from laboratory import thresholds as t
from laboratory.claims import Claim
from laboratory.pictures import Data, Weights

PAPER = "Cross-task linearity emerges in the pretraining-finetuning paradigm (Zhou et al. 2024)"
RATES = (0.01, 0.02, 0.04, 0.07, 0.1, 0.14, 0.18, 0.24)
SCALES = tuple(round(0.05 * n, 2) for n in range(1, 21))
LAYER = 1  # where models are stitched: the second of three hidden layers


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    points: list[tuple[float, float]]  # accuracy of an average of three models, and of their ensemble
    stitched: dict[str, list[tuple[float, float]]]  # by λ, on both tasks
    negated: dict[str, list[tuple[float, float]]]  # by λ, on the task and on pretraining's pictures
    pretrainings: dict[str, tuple[list[float], list[float]]]  # 1 − cosine and its baseline, by layer
    bounds: list[tuple[float, float, float, float]]  # δ, λ_max, ‖θ_i − θ_j‖², their product over 8


def run(quick: bool) -> Result:
    world, generator = pictures.make_world(0, 2), torch.Generator().manual_seed(50)
    long, short = (3, 2) if quick else (20, 6)
    base = pictures.pretrained(world, 0, long)
    data, tests = (world.drawn(count, generator) for count in (1024, 1024))
    soup = variants(base, data, RATES, short, generator)
    first = (tests[0][0], tests[1][0])
    averages = average_measures(soup, first[0])
    points = ensembles(soup, first)
    tuned = pictures.train(pictures.copies(base, 2), data, 3 * short, generator, "fine-tuning")
    own = world.draw(None, 1024, generator)
    stitched, negated = stitching(base, tuned, tests), negation(base, tuned, tests, own)
    random = variants(pictures.pretrained(world, 0, long, shuffled=True), data, RATES[-2:], 3 * short, generator)
    normal = variants(base, data, RATES[-2:], 3 * short, generator)
    pretrainings = {name: halfway_measures(w, first[0]) for name, w in (("usual", normal), ("random labels", random))}
    bounds = theorem_points(world, data, (1, 2) if quick else (1, 2, 4, 8, 16, 32), short, generator)
    claims = [
        _averages(averages),
        _ensembles(points),
        *_stitched(stitched),
        *_negated(negated),
        _pretraining(pretrainings),
        *_theorem(bounds),
    ]
    curves = {
        name: (
            (1 - cosine).median(dim=1).values.tolist(),
            (1 - baseline).median(dim=1).values.tolist(),
        )
        for name, (cosine, _, baseline) in pretrainings.items()
    }
    return Result(claims, points, stitched, negated, curves, bounds)


def variants(base: Weights, data: Data, rates: Sequence[float], epochs: int, generator: torch.Generator) -> Weights:
    """Fine-tunes on the first task: a learning rate each, and the pictures in an order of its own."""
    orders = [torch.randperm(data[1].shape[1], generator=generator) for _ in rates]
    own = (torch.stack([data[0][0, order] for order in orders]), torch.stack([data[1][0, order] for order in orders]))
    each = torch.tensor(rates)[:, None, None]
    return pictures.train(pictures.copies(base, len(rates)), own, epochs, generator, "variants", rate=each)


def average_measures(weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cosine, coefficient and baseline of eq. (1), `f(mean of θ) ≈ mean of f(θ)`: each (layers, samples), in fp64."""
    weights = [weight.double() for weight in weights]
    middle = pictures.features([weight.mean(dim=0, keepdim=True) for weight in weights], x.double()[None])
    own = pictures.features(weights, x.double().expand(len(weights[0]), *x.shape))
    cosines, coefficients, baselines = [], [], []
    for left, each in zip(middle, own, strict=True):
        right = each.mean(dim=0)
        cosine = torch.cosine_similarity(left[0], right, dim=-1)
        cosines.append(cosine)
        coefficients.append(left[0].norm(dim=-1) * cosine / right.norm(dim=-1))
        baselines.append(torch.cosine_similarity(left, each, dim=-1).mean(dim=0))
    return torch.stack(cosines), torch.stack(coefficients), torch.stack(baselines)


def halfway_measures(weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of two models, as in figure 2: the baseline is the cosine between the features of both."""
    cosine, coefficient, _ = average_measures(weights, x)
    own = pictures.features([weight.double() for weight in weights], x.double().expand(2, *x.shape))
    return cosine, coefficient, torch.stack([torch.cosine_similarity(*each, dim=-1) for each in own])


def ensembles(weights: Weights, test: Data) -> list[tuple[float, float]]:
    """For every three models: the accuracy of their average, and of their mean logits."""
    x, y = test
    logits = pictures.logits(weights, x.expand(len(weights[0]), *x.shape))
    found = []
    for three in itertools.combinations(range(len(weights[0])), 3):
        rows = torch.tensor(three)
        averaged = pictures.accuracies(
            [weight[rows].mean(dim=0, keepdim=True) for weight in weights], (x[None], y[None])
        )
        ensemble = 100 * (logits[rows].mean(dim=0).argmax(dim=-1) == y).double().mean()
        found.append((averaged.item(), ensemble.item()))
    return found


def stitched_accuracy(base: Weights, parts: Sequence[tuple[float, Weights]], test: Data) -> float:
    """θ_0 from the layer on, with a mixture of other models' features before it."""
    x, y = test
    mixed = sum(weight * pictures.features(model, x[None])[LAYER] for weight, model in parts)
    rest = base[LAYER + 1 :]
    return 100 * (pictures.logits(rest, mixed).argmax(dim=-1) == y).double().mean().item()


def moved(base: Weights, tuned: Weights, n: int, scale: float) -> Weights:
    """θ_0 + λ τ_n."""
    return [b + scale * (w - b) for w, b in zip(pictures.one(tuned, n), base, strict=True)]


def stitching(base: Weights, tuned: Weights, tests: Data) -> dict[str, list[tuple[float, float]]]:
    """Figure 9: the mixture of both tasks' features, and each task's alone, on both tasks."""
    kinds = {"both": (0.5, 0.5), "task 1 alone": (1.0, 0.0), "task 2 alone": (0.0, 1.0)}
    return {
        name: [
            tuple(
                stitched_accuracy(
                    base,
                    [(weight, moved(base, tuned, n, scale)) for n, weight in enumerate(weights) if weight],
                    (tests[0][on], tests[1][on]),
                )
                for on in (0, 1)
            )
            for scale in SCALES
        ]
        for name, weights in kinds.items()
    }


def negation(base: Weights, tuned: Weights, tests: Data, own: Data) -> dict[str, list[tuple[float, float]]]:
    """Figure 10: `f(θ_0) − Δ(λτ)`, that is `2 f(θ_0) − f(θ_0 + λτ)` (eq. 4), beside `f(θ_0 − λτ)`."""
    found: dict[str, list[tuple[float, float]]] = {"2f(θ_0) − f(θ_0 + λτ)": [], "f(θ_0 − λτ)": []}
    for scale in (0.0, *SCALES):
        kinds = (
            [(2.0, base), (-1.0, moved(base, tuned, 0, scale))],
            [(1.0, moved(base, tuned, 0, -scale))],
        )
        for name, parts in zip(found, kinds, strict=True):
            task = stitched_accuracy(base, parts, (tests[0][0], tests[1][0]))
            found[name].append((task, stitched_accuracy(base, parts, own)))
    return found


def sharpness(weights: Weights, data: Data, steps: int = 30) -> float:
    """The largest eigenvalue of the loss's Hessian, by power iteration."""
    weights = [weight.detach().double().requires_grad_() for weight in weights]
    data = (data[0].double(), data[1])
    gradients = torch.autograd.grad(pictures.losses(weights, data).sum(), weights, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in weights]
    value = 0.0
    for _ in range(steps):
        length = torch.sqrt(sum((d * d).sum() for d in direction))
        direction = [d / length for d in direction]
        product = torch.autograd.grad(gradients, weights, grad_outputs=direction, retain_graph=True)
        value = sum((p * d).sum() for p, d in zip(product, direction, strict=True)).item()
        direction = [p.detach() for p in product]
    return value


def theorem_points(
    world: pictures.World, data: Data, lengths: Sequence[int], epochs: int, generator: torch.Generator
) -> list[tuple[float, float, float, float]]:
    """δ of the loss at α = ½ for pairs of fine-tunes, from checkpoints that differ in how long they were pretrained."""
    test = (data[0][:1], data[1][:1])
    found = []
    for length in lengths:
        base = pictures.pretrained(world, 0, length)
        largest = sharpness(base, test)
        weights = [weight.double() for weight in variants(base, data, RATES[::2] + RATES[-1:], epochs, generator)]
        wide = (test[0].double(), test[1])
        losses = [pictures.losses(pictures.one(weights, n), wide).item() for n in range(len(weights[0]))]
        flat = pictures.flat(weights)
        for i, j in itertools.combinations(range(len(losses)), 2):
            middle = [(weight[i : i + 1] + weight[j : j + 1]) / 2 for weight in weights]
            delta = abs(pictures.losses(middle, wide).item() - (losses[i] + losses[j]) / 2)
            distance = (flat[i] - flat[j]).square().sum().item()
            found.append((delta, largest, distance, largest * distance / 8))
    return found


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least squares line with an intercept."""
    return correlation(x, y) ** 2


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    a, b = (torch.tensor(each, dtype=torch.float64) for each in (x, y))
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


def linear(measures: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> bool:
    """Whether medians over samples are near in every layer."""
    cosine, coefficient, baseline = measures
    near = (1 - cosine).median(dim=1).values <= t.QUARTER * (1 - baseline).median(dim=1).values
    flat = (coefficient.median(dim=1).values - 1).abs() <= t.NEAR_ONE
    return bool((near & flat).all())


def described(measures: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> str:
    """The worst layer."""
    cosine, coefficient, baseline = (
        (each if n == 1 else 1 - each).median(dim=1).values for n, each in enumerate(measures)
    )
    worst = int(cosine.argmax())
    return f"1 − cosine {cosine[worst]:.1e}, baseline {baseline[worst]:.1e}, coefficient {coefficient[worst]:.3f}"


def _averages(measures: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Claim:
    return Claim(
        PAPER,
        f"features of an average of {len(RATES)} fine-tunes are the average of theirs",
        "eq. (1), figures 5, 6",
        "in every layer 1 − cosine ≪ its baseline (here: a quarter), coefficient near 1 (±0.1)",
        f"worst layer: {described(measures)}",
        linear(measures),
    )


def _ensembles(points: Sequence[tuple[float, float]]) -> Claim:
    found = correlation(*zip(*points, strict=True))
    return Claim(
        PAPER,
        f"accuracies of averages and of ensembles go together ({len(points)} triples)",
        "figure 4",
        f"a linear correlation, here ≥ {t.CORRELATED}",
        f"{found:.2f}",
        found >= t.CORRELATED,
    )


def _stitched(found: dict[str, list[tuple[float, float]]]) -> list[Claim]:
    worse = {name: [min(pair) for pair in pairs] for name, pairs in found.items()}
    single = [max(pair) for pair in zip(worse["task 1 alone"], worse["task 2 alone"], strict=True)]
    better = sum(both > alone for both, alone in zip(worse["both"], single, strict=True))
    last = {name: pairs[-1] for name, pairs in found.items()}
    return [
        Claim(
            PAPER,
            "half of each task's features, stitched into θ_0, serve both tasks; one task's alone do not",
            "figure 9",
            "the worse task is better than with either alone, for each λ from 0.05 to 1",
            f"for {better} of {len(SCALES)} λ; at λ = 1 ({last['both'][0]:.1f}, {last['both'][1]:.1f}) against "
            f"({last['task 1 alone'][0]:.1f}, {last['task 1 alone'][1]:.1f}) and "
            f"({last['task 2 alone'][0]:.1f}, {last['task 2 alone'][1]:.1f})",
            better == len(SCALES),
        )
    ]


def _negated(found: dict[str, list[tuple[float, float]]]) -> list[Claim]:
    one, other = found.values()
    drops = [one[0][n] - sum(pair[n] for pair in one[1:]) / len(SCALES) for n in (0, 1)]
    apart = [max(abs(a[n] - b[n]) for a, b in zip(one, other, strict=True)) for n in (0, 1)]
    return [
        Claim(
            PAPER,
            "2f(θ_0) − f(θ_0 + λτ), stitched into θ_0, forgets the task and keeps pretraining's",
            "eq. (4), figure 10",
            f"the task loses at least {t.SELECTIVE:g} times as much (mean over λ from 0.05 to 1)",
            f"{drops[0]:.1f} and {drops[1]:.1f} points",
            drops[0] > 0 and drops[0] >= t.SELECTIVE * drops[1],
        ),
        Claim(
            PAPER,
            "it does as f(θ_0 − λτ) does",
            "eq. (4), figure 10",
            f"accuracies within {t.AGREES:g} points on both, for each λ up to 1",
            f"largest differences {apart[0]:.1f} and {apart[1]:.1f} points",
            max(apart) <= t.AGREES,
        ),
    ]


def _pretraining(found: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Claim:
    usual, random = found["usual"], found["random labels"]
    return Claim(
        PAPER,
        "pretraining on random labels does not make fine-tunes linear, the usual pretraining does",
        "figure 12",
        "linear in every layer (a quarter, ±0.1) after the usual one alone",
        f"worst layers: {described(usual)}; random labels: {described(random)}",
        linear(usual) and not linear(random),
    )


def _theorem(points: Sequence[tuple[float, float, float, float]]) -> list[Claim]:
    delta, largest, distance, product = zip(*points, strict=True)
    fits = [r_squared(x, delta) for x in (product, largest, distance)]
    ratio = max(d / p for d, p in zip(delta, product, strict=True))
    return [
        Claim(
            PAPER,
            f"δ goes with λ_max‖θ_i − θ_j‖² more than with either alone ({len(points)} pairs)",
            "Theorem 1, appendix B.2",
            "R² is largest for the product (the paper has 0.903, 0.782, 0.839)",
            f"{fits[0]:.3f}, λ_max {fits[1]:.3f}, distance {fits[2]:.3f}",
            fits[0] > max(fits[1:]),
        ),
        Claim(
            PAPER,
            "δ ≤ α(1−α)λ_max‖θ_i − θ_j‖²/2, without the higher orders",
            "Theorem 1",
            "largest ratio ≤ 1",
            f"{ratio:.2f}",
            ratio <= 1,
        ),
    ]
