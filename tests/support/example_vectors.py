"""Small task vectors for tests of merging, and how to compare what becomes of them."""

from typing import Any

import torch

from hf_taskvec import TaskVector

LARGE = (1100, 1024)  # more than two tiles
OPTIONS: dict[str, dict[str, Any]] = {
    "layers": {"schedule": [0.5, 1.0]},
    "learned": {"scales": {"all": 0.75}, "by": "vector"},
    "low_rank": {"rank": 2},
    "mergekit": {
        "method": "ties",
        "slices": [{"layers": [0, 24], "sources": [{"vector": number} for number in range(2)]}],
        "parameters": {"weight": 0.5, "density": [0.3, 0.6]},
    },
}


def some_vectors(count: int = 3, shape: tuple[int, ...] = (40, 30), seed: int = 0) -> list[TaskVector]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TaskVector.from_tensors(
            {
                "model.layers.0.mlp.fc1.weight": torch.randn(shape, generator=generator),
                "model.layers.1.mlp.fc1.bias": torch.randn(shape[:1], generator=generator),
            },
            name=f"v{number}",
        )
        for number in range(count)
    ]


def some_adapters(count: int = 3, rank: int = 4) -> list[TaskVector]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"model.layers.0.mlp.fc1.weight": (40, 30), "model.layers.1.mlp.fc2.weight": (30, 40)}

    def factor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        TaskVector.from_tensors({n: (factor(s[0], rank), factor(rank, s[1])) for n, s in shapes.items()}, name=f"v{i}")
        for i in range(count)
    ]


def suited(
    rule: str, vectors: list[TaskVector], weights: list[float] | None = None
) -> tuple[list[TaskVector], list[float] | None]:
    """Vectors and weights as a rule takes them: for `importance` the first vector beside two importances."""
    if rule != "importance":
        return vectors, weights
    sizes = [{name: vector.dense(name).abs() for name in vector} for vector in vectors[:2]]
    importances = [TaskVector.from_tensors(size, name=f"i{number}") for number, size in enumerate(sizes)]
    return [vectors[0], *importances], None if weights is None else [weights[0], 1.0, abs(weights[1])]


def stacked(vectors: list[TaskVector], name: str) -> torch.Tensor:
    return torch.stack([vector.dense(name, "float64") for vector in vectors])


def assert_close(merged: TaskVector, expected: dict[str, torch.Tensor]) -> None:
    assert set(merged) == set(expected)
    for name, value in expected.items():
        found = merged.dense(name, "float64")
        assert torch.allclose(found, value, rtol=1e-6, atol=1e-6 * value.abs().max().item()), name


def trimmed(change: torch.Tensor, density: float) -> torch.Tensor:
    kept = max(1, int(density * change.numel()))
    cut = change.abs().flatten().sort(descending=True).values[kept - 1]
    return change * (change.abs() >= cut)
