"""MIMA: rounds of tuning and averaging with a fixed budget, on made-up pictures (`pictures.py`).

N rounds of S/N epochs for each task, each round from the mean of the last one's models; then one of three merges.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from laboratory import pictures
from laboratory import thresholds as t
from laboratory.claims import Claim
from laboratory.pictures import Data, Weights

from hf_taskvec import combine

PAPER = "MIMA: iterative model averaging and fine-tuning for multi-task learning"
TASKS = 4
ROUNDS = (1, 2, 4, 10, 20)
EPOCHS = 20  # S, for each task
ARITHMETIC = tuple(round(0.05 * n, 2) for n in range(21))  # the paper's grids
TIES = tuple(round(0.8 + 0.05 * n, 2) for n in range(21))
FIXED = {"task arithmetic": 0.4, "TIES": 1.0}  # without validation


@dataclass(frozen=True)
class Outcome:
    """What N rounds come to: accuracies in points, means over tasks."""

    own: float
    average: float
    tasks: list[float]  # the average's accuracy on each task
    relative: float
    best: dict[str, tuple[float, float]]  # by rule: λ chosen on other pictures, accuracy
    fixed: dict[str, float]  # by rule, with the λ that needs no validation
    vectors: float  # mean cosine between tasks' vectors
    updates: float  # mean |cosine| between tasks' updates in the last round
    by_round: tuple[list[float], list[float]]  # cosines of vectors and of updates after each round


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    outcomes: dict[int, list[Outcome]]
    landscapes: dict[int, "Landscape"]


@dataclass(frozen=True)
class Landscape:
    """Errors (%) of two tasks on the plane through θ_0 and both models, y down, x across."""

    x: list[float]
    y: list[float]
    errors: tuple[torch.Tensor, torch.Tensor]
    points: dict[str, tuple[float, float]]
    degrees: float


def run(quick: bool) -> Result:
    counts = (1, 2, 4) if quick else ROUNDS
    epochs = 4 if quick else EPOCHS
    outcomes: dict[int, list[Outcome]] = {count: [] for count in counts}
    landscapes, updates = {}, []
    for seed in range(1 if quick else 3):
        world, generator = pictures.make_world(seed, TASKS), torch.Generator().manual_seed(200 + seed)
        base = pictures.pretrained(world, seed, 2 if quick else 20)
        data, chosen_on, tests = (world.drawn(count, generator) for count in (1024, 512, 1024))
        for count in counts:
            weights, deltas = rounds(base, data, count, epochs // count, generator)
            outcomes[count].append(outcome(base, weights, deltas, chosen_on, tests))
            if seed == 0 and count in (counts[0], counts[2], counts[-1]):
                landscapes[count] = landscape(base, weights, tests, 9 if quick else 25)
            if len(deltas) > 1:
                updates.append(deltas)
    return Result(claims(outcomes, updates), outcomes, landscapes)


def rounds(
    base: Weights, data: Data, count: int, epochs: int, generator: torch.Generator
) -> tuple[Weights, list[torch.Tensor]]:
    """The tasks' models after N rounds, and the updates δ of each round: (tasks, parameters), in fp64."""
    start, deltas = base, []
    for number in range(count):
        before = pictures.copies(start, TASKS)
        weights = pictures.train(before, data, epochs, generator, f"round {number + 1} of {count}")
        deltas.append(pictures.flat(weights).double() - pictures.flat(before).double())
        start = [weight.mean(dim=0, keepdim=True) for weight in weights]
    return weights, deltas


def cosines(vectors: torch.Tensor) -> torch.Tensor:
    """Of all pairs of rows."""
    unit = torch.nn.functional.normalize(vectors, dim=1)
    return (unit @ unit.T)[tuple(torch.triu_indices(len(unit), len(unit), 1))]


def accumulated(deltas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Eq. (8): the task vectors after each round, from the updates: the mean of earlier ones, and the last one."""
    shared = torch.zeros_like(deltas[0][0])
    found = []
    for delta in deltas:
        found.append(shared + delta)
        shared = shared + delta.mean(dim=0)
    return found


def outcome(base: Weights, weights: Weights, deltas: list[torch.Tensor], chosen_on: Data, tests: Data) -> Outcome:
    def on(models: Weights, data: Data) -> torch.Tensor:
        return pictures.on_all_tasks(pictures.accuracies, models, data)

    own = pictures.accuracies(weights, tests)
    average = on([weight.mean(dim=0, keepdim=True) for weight in weights], tests)[0]
    ties = pictures.edited(base, combine(pictures.vectors(base, weights), "ties"))
    scaled = {
        "task arithmetic": (ARITHMETIC, pictures.summed(base, weights, ARITHMETIC)),
        "TIES": (TIES, pictures.summed(base, ties, TIES)),
    }
    best, fixed = {}, {}
    for rule, (scales, models) in scaled.items():
        place = int(on(models, chosen_on).mean(dim=1).argmax())
        found = on(models, tests).mean(dim=1)
        best[rule] = (scales[place], found[place].item())
        fixed[rule] = found[scales.index(FIXED[rule])].item()
    vectors = [cosines(each) for each in accumulated(deltas)]
    updates = [cosines(each).abs() for each in deltas]
    return Outcome(
        own.mean().item(),
        average.mean().item(),
        average.tolist(),
        (average / own).mean().item(),
        best,
        fixed,
        vectors[-1].mean().item(),
        updates[-1].mean().item(),
        ([each.mean().item() for each in vectors], [each.mean().item() for each in updates]),
    )


def landscape(base: Weights, weights: Weights, tests: Data, size: int) -> Landscape:
    """Figures 7, 12: `P = θ_0 + x u + y v`, with u, v orthonormal and spanning the first two tasks' vectors."""
    start, flat = pictures.flat(base)[0].double(), pictures.flat(weights).double()
    one, other = flat[0] - start, flat[1] - start
    u = one / one.norm()
    across = other - (other @ u) * u
    v = across / across.norm()
    at = {"θ₀": (0.0, 0.0), "task 1": (one.norm().item(), 0.0), "task 2": ((other @ u).item(), (other @ v).item())}
    at["mean"] = tuple((a + b) / 2 for a, b in zip(at["task 1"], at["task 2"], strict=True))
    ends = [(min(p[n] for p in at.values()), max(p[n] for p in at.values())) for n in (0, 1)]
    room = 0.35 * max(high - low for low, high in ends)
    x, y = (torch.linspace(low - room, high + room, size, dtype=torch.float64) for low, high in ends)
    points = start + (x[None, :, None] * u + y[:, None, None] * v)
    shapes = [weight.shape[1:] for weight in base]
    parts = points.flatten(0, 1).float().split([shape.numel() for shape in shapes], dim=1)
    models = [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]
    small = (tests[0][:2, :300], tests[1][:2, :300])
    errors = 100 - pictures.on_all_tasks(pictures.accuracies, models, small).view(size, size, 2)
    angle = torch.rad2deg(torch.acos((other @ u) / other.norm())).item()
    return Landscape(x.tolist(), y.tolist(), (errors[..., 0], errors[..., 1]), at, angle)


def claims(outcomes: dict[int, list[Outcome]], updates: list[list[torch.Tensor]]) -> list[Claim]:
    def mean(count: int, what: str) -> float:
        return sum(getattr(each, what) for each in outcomes[count]) / len(outcomes[count])

    def chosen(count: int, rule: str, n: int) -> float:
        return sum(each.best[rule][n] for each in outcomes[count]) / len(outcomes[count])

    def fixed(count: int, rule: str) -> float:
        return sum(each.fixed[rule] for each in outcomes[count]) / len(outcomes[count])

    counts = tuple(outcomes)
    first, last = counts[0], counts[-1]

    def over(values: Sequence[float], form: str = ".1f") -> str:
        return ", ".join(f"{value:{form}}" for value in values)

    average = [mean(count, "average") for count in counts]
    gaps = [mean(count, "own") - mean(count, "average") for count in counts]
    own = [mean(count, "own") for count in counts]
    tuned = {rule: [chosen(count, rule, 1) for count in counts] for rule in FIXED}
    ahead = [max(tuned[rule][n] for rule in FIXED) - average[n] for n in range(len(counts))]
    rounds_ = ", ".join(map(str, counts))
    firsts = torch.stack([cosines(each[0]).abs().mean() for each in updates]).mean().item()
    across = torch.stack([_across(each) for each in updates]).mean().item()
    within = torch.stack([torch.stack([(each[0] * each[1]).sum(dim=1)]) for each in updates])
    pairs = [(cosines(each[0]), cosines(accumulated(each)[1])) for each in updates]
    by_task = torch.tensor([[each.tasks for each in outcomes[count]] for count in counts]).mean(dim=1)  # (N, tasks)
    rises = all(bool((after >= before).all()) for before, after in pairs)
    return [
        Claim(
            PAPER,
            f"the uniform average gets better with N = {rounds_}",
            "Table 1, figures 4a, 9",
            "rises at every step",
            f"{over(average)}; fine-tuned alone {over(own)}",
            all(b > a for a, b in itertools.pairwise(average)),
        ),
        Claim(
            PAPER,
            "… on every task",
            "figure 9",
            "rises at every step, for each task",
            f"{'; '.join(over(row.tolist()) for row in by_task.T)}",
            bool((by_task.diff(dim=0) > 0).all()),
        ),
        Claim(
            PAPER,
            "with λ from validation data task arithmetic and TIES get better with N",
            "Table 1, figure 4a",
            "both rise at every step",
            f"{over(tuned['task arithmetic'])}; TIES {over(tuned['TIES'])}",
            all(b > a for values in tuned.values() for a, b in itertools.pairwise(values)),
        ),
        Claim(
            PAPER,
            "at the largest N the average is nearly as good as the tasks' own models",
            "Table 1",
            f"relative accuracy ≥ {t.NEARLY_ALL:.0%} (the paper has 99.8 %; 73.3 % at N = 1)",
            f"{mean(last, 'relative'):.1%}; {mean(first, 'relative'):.1%} at N = {first}",
            mean(last, "relative") >= t.NEARLY_ALL,
        ),
        Claim(
            PAPER,
            "the single-task gap goes to nearly zero",
            "figure 6",
            f"≤ {t.NO_GAP:g} point at N = {last}",
            f"{over(gaps)} points",
            gaps[-1] <= t.NO_GAP,
        ),
        Claim(
            PAPER,
            "more rounds cost the tasks' own models nothing",
            "figure 8",
            f"within {t.KEPT_POINTS:g} points of N = 1",
            over(own),
            min(own) >= own[0] - t.KEPT_POINTS,
        ),
        Claim(
            PAPER,
            "task vectors align",
            "figures 1b, 5, 11",
            f"the mean cosine rises with N, to ≥ {t.ALIGNED}",
            over([mean(count, "vectors") for count in counts], ".2f"),
            mean(last, "vectors") >= t.ALIGNED
            and all(mean(b, "vectors") > mean(a, "vectors") for a, b in itertools.pairwise(counts)),
        ),
        Claim(
            PAPER,
            "a round's updates stay near-orthogonal between tasks",
            "eq. (6), figures 10, 11",
            f"mean |cosine| ≤ {t.ORTHOGONAL} in the last round, for every N",
            over([mean(count, "updates") for count in counts], ".2f"),
            max(mean(count, "updates") for count in counts) <= t.ORTHOGONAL,
        ),
        Claim(
            PAPER,
            "tuned rules lose their advantage over the average",
            "figure 4a, Table 1",
            f"smaller at N = {last} than at N = {first}",
            f"the better of both is ahead by {over(ahead)} points",
            ahead[-1] < ahead[0],
        ),
        Claim(
            PAPER,
            "without validation (λ = 0.4) task arithmetic gets worse with N, below the average",
            "figure 4b",
            f"below the average and below N = {first} at N = {last}",
            over([fixed(count, "task arithmetic") for count in counts]),
            fixed(last, "task arithmetic") < min(average[-1], fixed(first, "task arithmetic")),
        ),
        Claim(
            PAPER,
            "without validation (λ = 1) TIES does not stay ahead of the average",
            "figure 4b",
            f"not above it at N = {last} by {t.NO_GAP:g} point or more",
            f"{over([fixed(count, 'TIES') for count in counts])} against {over(average)}",
            fixed(last, "TIES") < average[-1] + t.NO_GAP,
        ),
        Claim(
            PAPER,
            f"task arithmetic's best λ falls with N, towards 1/T or less (T = {TASKS})",
            "Table 2",
            "smaller at the largest N (the paper, T = 8: 0.25 → 0.15)",
            over([chosen(count, "task arithmetic", 0) for count in counts], ".2f"),
            chosen(last, "task arithmetic", 0) < chosen(first, "task arithmetic", 0),
        ),
        Claim(
            PAPER,
            "TIES' best λ rises with N",
            "Table 3",
            "larger at the largest N (the paper: 0.85 → 1.5; its 0.45 at N = 16 is outside its own grid)",
            over([chosen(count, "TIES", 0) for count in counts], ".2f"),
            chosen(last, "TIES", 0) > chosen(first, "TIES", 0),
        ),
        Claim(
            PAPER,
            "Proposition 1's assumptions: updates of different tasks orthogonal, of the same task not opposed",
            "appendix E",
            f"mean |cosine| ≤ {t.ORTHOGONAL} in round 1 and across rounds; every inner product ≥ 0",
            f"{firsts:.2f} and {across:.2f}; {int((within >= 0).sum())} of {within.numel()} inner products",
            max(firsts, across) <= t.ORTHOGONAL and bool((within >= 0).all()),
        ),
        Claim(
            PAPER,
            "two rounds align every pair of task vectors more than one",
            "Proposition 1",
            "cos(τ_i, τ_j) after round 2 ≥ after round 1, for each pair",
            f"means {torch.cat([a for a, _ in pairs]).mean():.2f} → {torch.cat([b for _, b in pairs]).mean():.2f}",
            rises,
        ),
    ]


def _across(deltas: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean |cosine| of one task's first update and another's second."""
    one, other = (torch.nn.functional.normalize(each, dim=1) for each in deltas[:2])
    found = (one @ other.T).abs()
    return found[~torch.eye(len(found), dtype=torch.bool)].mean()
