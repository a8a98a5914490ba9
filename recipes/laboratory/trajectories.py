"""Figures 2, 3 and 4 of Zhou et al. (2025): is epoch 1 enough, where do gradients point, where do merges go?

Tasks are rotations of made-up pictures (`pictures.py`), fine-tuned by SGD of a constant learning rate.
"""

from dataclasses import dataclass

import torch
from laboratory import pictures
from laboratory import thresholds as t
from laboratory.claims import Claim
from laboratory.pictures import Weights

from hf_taskvec import combine

PAPER = "On task vectors and gradients (Zhou et al. 2025)"
TASKS, EPOCHS = 4, 20
SCALES = tuple(round(0.1 * n, 1) for n in range(1, 31))
RULES = {"TIES": ("ties", {}), "breadcrumbs": ("breadcrumbs", {}), "DARE": ("dare", {"density": 0.2})}


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    accuracies: dict[str, list[float]]  # merged after one epoch and after all, by task
    shares: list[list[float]]  # of the gradients' norms: (tasks, epochs)
    with_first: list[list[float]]
    paths: dict[str, torch.Tensor]  # of merged models, in two principal components
    final: dict[str, float]  # their mean loss at the end


def run(quick: bool) -> Result:
    draws = [_measure(seed, quick) for seed in range(1 if quick else 3)]
    merged = {key: torch.stack([d[0][key] for d in draws]).mean(dim=0) for key in draws[0][0]}
    shares, cosines = (torch.stack([d[n] for d in draws]).mean(dim=0) for n in (1, 2))
    final = {key: sum(d[4][key] for d in draws) / len(draws) for key in draws[0][4]}
    apart = {key: sum(d[5][key] for d in draws) / len(draws) for key in draws[0][5]}
    claims = _claims(merged, shares, cosines, final, apart)
    table = {key: value.tolist() for key, value in merged.items()}
    return Result(claims, table, shares.tolist(), cosines.tolist(), draws[0][3], final)


def _measure(seed: int, quick: bool) -> tuple:
    """One draw: accuracies, gradients' shares and cosines, paths, final losses, distances."""
    epochs = 6 if quick else EPOCHS
    world, generator = pictures.make_world(seed, TASKS), torch.Generator().manual_seed(100 + seed)
    base = pictures.pretrained(world, seed, 2 if quick else 20)
    data, chosen_on, tests = (world.drawn(count, generator) for count in (1024, 512, 1024))
    checkpoints: list[Weights] = [pictures.copies(base, TASKS)]
    tuned = pictures.train(
        checkpoints[0], data, epochs, generator, "epochs", after=lambda _, weights: checkpoints.append(weights)
    )

    def merged(weights: Weights) -> torch.Tensor:
        """The accuracy on each task of θ_0 + λ Σ τ, with the λ that is best on other pictures."""
        models = pictures.summed(base, weights, SCALES)
        best = int(pictures.on_all_tasks(pictures.accuracies, models, chosen_on).mean(dim=1).argmax())
        return pictures.on_all_tasks(pictures.accuracies, pictures.one(models, best), tests)[0]

    accuracies = {
        "untouched": pictures.on_all_tasks(pictures.accuracies, base, tests)[0],
        "one epoch": merged(checkpoints[1]),
        "all epochs": merged(tuned),
        "one epoch alone": pictures.accuracies(checkpoints[1], tests),
        "all epochs alone": pictures.accuracies(tuned, tests),
    }
    found = torch.stack([pictures.flat(pictures.gradients(weights, data)) for weights in checkpoints[:-1]], dim=1)
    norms = found.norm(dim=2)
    shares = norms / norms.sum(dim=1, keepdim=True)
    cosines = torch.cosine_similarity(found, found[:, :1], dim=2)

    models: dict[str, list[Weights]] = {"task arithmetic": [], **{name: [] for name in RULES}}
    for weights in checkpoints[1:]:
        vectors = pictures.vectors(base, weights)
        models["task arithmetic"].append(pictures.summed(base, weights, [1 / TASKS]))
        for name, (rule, options) in RULES.items():
            scale = 1.0 if rule == "ties" else 1 / TASKS  # TIES averages already
            models[name].append(pictures.edited(base, scale * combine(vectors, rule, **options)))
    models["iterated"], start = [], base
    for _ in range(epochs):  # the same budget: an epoch for each task, then the mean
        weights = pictures.train(pictures.copies(start, TASKS), data, 1, generator, "iterated merging")
        start = [weight.mean(dim=0, keepdim=True) for weight in weights]
        models["iterated"].append(start)
    final = {
        name: pictures.on_all_tasks(pictures.losses, found[-1], tests).mean().item() for name, found in models.items()
    }
    points = {name: torch.cat([pictures.flat(base), *map(pictures.flat, path)]) for name, path in models.items()}
    last = {name: path[-1] for name, path in points.items()}
    apart = {name: (last[name] - last["TIES"]).norm().item() for name in ("breadcrumbs", "DARE")}
    return accuracies, shares, cosines, _projected(points), final, apart


def _projected(points: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two principal components of all points."""
    every = torch.cat(list(points.values())).double()
    mean = every.mean(dim=0)
    _, _, directions = torch.linalg.svd(every - mean, full_matrices=False)
    return {name: (path.double() - mean) @ directions[:2].T for name, path in points.items()}


def _claims(
    merged: dict[str, torch.Tensor],
    shares: torch.Tensor,
    cosines: torch.Tensor,
    final: dict[str, float],
    apart: dict[str, float],
) -> list[Claim]:
    mean = {key: value.mean().item() for key, value in merged.items()}
    later = cosines[:, 1:5]
    return [
        Claim(
            PAPER,
            "merging models of one epoch is competitive with merging converged ones",
            "figure 2",
            f"accuracy at most {t.COMPETITIVE:g} points lower",
            f"{mean['one epoch']:.1f} after one epoch, {mean['all epochs']:.1f} after all (alone: "
            f"{mean['one epoch alone']:.1f}, {mean['all epochs alone']:.1f}; θ_0: {mean['untouched']:.1f})",
            mean["one epoch"] >= mean["all epochs"] - t.COMPETITIVE,
        ),
        Claim(
            PAPER,
            "better models alone do not merge better",
            "section 3.3",
            "merged after all epochs at most as good as after one, though alone better",
            f"{mean['all epochs'] - mean['one epoch']:+.1f} points merged, "
            f"{mean['all epochs alone'] - mean['one epoch alone']:+.1f} alone",
            mean["all epochs"] <= mean["one epoch"] and mean["all epochs alone"] > mean["one epoch alone"],
        ),
        Claim(
            PAPER,
            "the first epoch's gradient has the largest norm (SGD, constant learning rate)",
            "figure 3a",
            "the largest share, for every task",
            f"shares of epochs 1 to 5: {', '.join(f'{value:.1%}' for value in shares.mean(dim=0)[:5].tolist())}",
            bool((shares.argmax(dim=1) == 0).all()),
        ),
        Claim(
            PAPER,
            "the gradients of the first five epochs point along the first's",
            "figure 3b",
            f"cosines above {t.STAYS_ALONG} for every task",
            f"means of epochs 2 to 5: {', '.join(f'{value:.2f}' for value in later.mean(dim=0).tolist())}; "
            f"the least of a task {later.min():.2f}",
            bool((later > t.STAYS_ALONG).all()),
        ),
        Claim(
            PAPER,
            "short rounds of tuning and merging reach a lower loss than one merge of the same budget",
            "figure 4, section 3.1",
            "lower than task arithmetic, TIES, breadcrumbs and DARE",
            ", ".join(f"{name} {value:.3f}" for name, value in final.items()),
            all(final["iterated"] < value for name, value in final.items() if name != "iterated"),
        ),
        Claim(
            PAPER,
            "TIES and breadcrumbs end near each other, DARE elsewhere",
            "figure 4",
            "DARE is further from TIES than breadcrumbs are",
            f"{apart['DARE']:.2f} and {apart['breadcrumbs']:.2f}",
            apart["DARE"] > apart["breadcrumbs"],
        ),
    ]
