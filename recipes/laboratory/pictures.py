"""Made-up pictures, tasks that are rotations of them, and small ReLU networks, many trained at once.

A picture is a smooth function of a hidden point, and its class is that of the prototype around which the point was
drawn (three for each of ten classes). A task shows the same pictures turned by a rotation of its own in the space of
pixels, as Rotated MNIST does; pretraining shows them as they are. The labels are the same, so tasks can share a head.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from hf_taskvec import TaskVector

SIZES = (32, 64, 64, 64, 10)
Weights = list[torch.Tensor]  # of each layer: (…, out, in)
Data = tuple[torch.Tensor, torch.Tensor]  # inputs (…, n, size), labels (…, n)


@dataclass(frozen=True)
class World:
    """Pretraining and some tasks."""

    prototypes: torch.Tensor  # (classes, 3, hidden)
    show: torch.Tensor  # (hidden, pixels)
    rotations: tuple[torch.Tensor, ...]

    def draw(self, task: int | None, count: int, generator: torch.Generator) -> Data:
        """Pictures of a task (None: of pretraining) and their classes."""
        classes, kinds, hidden = self.prototypes.shape
        y = torch.randint(0, classes, (count,), generator=generator)
        kind = torch.randint(0, kinds, (count,), generator=generator)
        points = self.prototypes[y, kind] + 0.35 * torch.randn(count, hidden, generator=generator)
        x = (points @ self.show).tanh()
        return (x if task is None else x @ self.rotations[task]), y

    def drawn(self, count: int, generator: torch.Generator) -> Data:
        """So many pictures of each task: (tasks, count, …)."""
        sets = [self.draw(task, count, generator) for task in range(len(self.rotations))]
        x, y = zip(*sets, strict=True)
        return torch.stack(x), torch.stack(y)


def make_world(seed: int, tasks: int, turn: float = 0.12) -> World:
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(SIZES[-1], 3, 8, generator=generator)
    show = torch.randn(8, SIZES[0], generator=generator) / math.sqrt(8)
    skew = [torch.randn(SIZES[0], SIZES[0], generator=generator) for _ in range(tasks)]
    return World(prototypes, show, tuple(torch.matrix_exp(turn * (each - each.T)) for each in skew))


def initial(generator: torch.Generator, count: int = 1) -> Weights:
    layers = itertools.pairwise(SIZES)
    return [torch.randn(count, high, wide, generator=generator) * math.sqrt(2 / wide) for wide, high in layers]


def features(weights: Weights, x: torch.Tensor) -> list[torch.Tensor]:
    """The output of every layer: after the ReLU, and the logits last."""
    found = []
    for number, weight in enumerate(weights):
        x = x @ weight.transpose(-1, -2)
        x = x.relu() if number < len(weights) - 1 else x
        found.append(x)
    return found


def logits(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    return features(weights, x)[-1]


def losses(weights: Weights, data: Data) -> torch.Tensor:
    """The mean cross-entropy of each network."""
    found, y = logits(weights, data[0]), data[1]
    return torch.nn.functional.cross_entropy(found.movedim(-1, 1), y, reduction="none").mean(dim=-1)


def accuracies(weights: Weights, data: Data) -> torch.Tensor:
    """In points, of each network."""
    return 100 * (logits(weights, data[0]).argmax(dim=-1) == data[1]).double().mean(dim=-1)


def gradients(weights: Weights, data: Data) -> Weights:
    """Of each network's own loss."""
    weights = [weight.detach().requires_grad_() for weight in weights]
    return list(torch.autograd.grad(losses(weights, data).sum(), weights))


def train(
    weights: Weights,
    data: Data,
    epochs: int,
    generator: torch.Generator,
    what: str,
    *,
    rate: float = 0.1,
    batch: int = 128,
    after: Callable[[int, Weights], None] | None = None,
) -> Weights:
    """SGD of a constant learning rate, each network on its own data; `after` is told the weights after each epoch."""
    for epoch in tqdm(range(1, epochs + 1), desc=what, disable=None, leave=False):
        for rows in torch.randperm(data[1].shape[-1], generator=generator).split(batch):
            found = gradients(weights, (data[0][:, rows], data[1][:, rows]))
            weights = [weight - rate * gradient for weight, gradient in zip(weights, found, strict=True)]
        if after is not None:
            after(epoch, weights)
    return weights


def pretrained(world: World, seed: int, epochs: int, shuffled: bool = False) -> Weights:
    """θ_0; with shuffled labels it learns nothing that tasks have in common (figure 12 of Zhou et al. 2024)."""
    generator = torch.Generator().manual_seed(seed)
    x, y = world.draw(None, 4096, generator)
    y = y[torch.randperm(len(y), generator=generator)] if shuffled else y
    return train(initial(generator), (x[None], y[None]), epochs, generator, "pretraining")


def copies(weights: Weights, count: int) -> Weights:
    return [weight.expand(count, -1, -1) for weight in weights]


def one(weights: Weights, n: int) -> Weights:
    """The n-th network alone, still (1, out, in)."""
    return [weight[n : n + 1] for weight in weights]


def vectors(base: Weights, tuned: Weights) -> list[TaskVector]:
    """The task vector of each network."""
    return [
        TaskVector.from_tensors({f"layer{k}": w[n] - b[0] for k, (w, b) in enumerate(zip(tuned, base, strict=True))})
        for n in range(len(tuned[0]))
    ]


def edited(base: Weights, vector: TaskVector) -> Weights:
    """θ_0 + vector."""
    return [weight + vector.dense(f"layer{k}") for k, weight in enumerate(base)]


def summed(base: Weights, tuned: Weights, scales: Sequence[float]) -> Weights:
    """θ_0 + λ Σ τ for each λ: (λ, out, in)."""
    at = torch.tensor(scales)[:, None, None]
    return [b + at * (w - b).sum(dim=0) for w, b in zip(tuned, base, strict=True)]


def flat(weights: Weights) -> torch.Tensor:
    """(networks, parameters)."""
    return torch.cat([weight.flatten(1) for weight in weights], dim=1)


def on_all_tasks(measure: Callable[[Weights, Data], torch.Tensor], weights: Weights, data: Data) -> torch.Tensor:
    """A measure of each network on each task: (networks, tasks)."""
    return torch.stack(
        [measure(weights, (x[None], y.expand(len(weights[0]), -1))) for x, y in zip(*data, strict=True)], 1
    )
