"""Linear rules give expressions."""

from __future__ import annotations

import torch
from support.example_vectors import some_adapters, some_vectors

from hf_taskvec import TaskVector, combine


def test_linear_rules_are_expressions() -> None:
    a, b, c = some_vectors()
    weights = [1.0, -2.0, 0.5]
    assert combine([a, b, c], "sum", weights) == a - 2 * b + 0.5 * c
    assert combine([a, b, c], "mean", weights) == weights[0] / 3 * a + weights[1] / 3 * b + weights[2] / 3 * c
    assert combine([a, b, c], "weighted", weights) == 1 / 3.5 * a - 2 / 3.5 * b + 0.5 / 3.5 * c
    assert combine([a, b], "interpolate", t=0.25) == 0.75 * a + 0.25 * b
    assert combine([a, b], "sum", [1.0, -2.0]).expression == "v0 - 2*v1"


def test_linear_rules_keep_factors() -> None:
    merged = combine(some_adapters(), "mean")
    assert merged.is_low_rank and {merged.rank(name) for name in merged} == {12}


def test_layers_are_scaled_along_their_schedule() -> None:
    layers = {f"model.layers.{n}.w": torch.ones(2) for n in range(5)} | {"model.embed_tokens.weight": torch.ones(3, 2)}
    a, b = (TaskVector.from_tensors(layers, name=name) for name in "ab")
    merged = combine([a, b], "layers", [1.0, -1.0], schedule=[[0.0, 1.0], [2.0]], outside=0.5)
    assert [merged.dense(f"model.layers.{n}.w")[0].item() for n in range(4)] == [-2.0, -1.75, -1.5, -1.25]
    assert "model.embed_tokens.weight" not in [n for n in merged if merged.norm(n)]
    assert combine([a, b], "layers", schedule=[0.0, 1.0]).dense("model.layers.4.w").tolist() == [2.0, 2.0]
