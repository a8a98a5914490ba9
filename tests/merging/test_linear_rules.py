"""Linear rules give expressions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.example_vectors import some_adapters, some_vectors
from support.tiny_models import TinyModels

from hf_taskvec import TaskVector, combine
from hf_taskvec.errors import MismatchError, TaskVectorError


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


TABLES = [{"mlp.fc1": 0.3, "mlp.fc1.bias": -0.5}, {"mlp.fc1": 2.0, "mlp.fc1.bias": 0.0}]


def test_learned_coefficients_multiply_each_group_of_each_vector() -> None:
    a, b = some_vectors(2)
    merged = combine([a, b], "learned", [1.0, -1.0], scales=TABLES, by="kind")
    weight, bias = "model.layers.0.mlp.fc1.weight", "model.layers.1.mlp.fc1.bias"
    expected = 0.3 * a.dense(weight, "float64") - 2.0 * b.dense(weight, "float64")
    torch.testing.assert_close(merged.dense(weight, "float64"), expected)
    assert torch.equal(merged.dense(bias, "float64"), -0.5 * a.dense(bias, "float64"))
    assert combine([a], "learned", scales={weight: 1.0, bias: 1.0}) == a
    assert combine([a, b], "learned", scales=[{"all": 0.5}, {"all": -2.0}], by="vector") == 0.5 * a - 2.0 * b
    assert combine([a], "learned", scales={"layer 0": 1.0, "layer 1": 0.0}, by="layer") == a.filter(weight)


def test_learned_coefficients_keep_factors() -> None:
    vectors = some_adapters(2)
    merged = combine(vectors, "learned", scales=[{"all": 0.25}, {"all": -3.0}], by="vector")
    assert merged.is_low_rank and {merged.rank(name) for name in merged} == {8}


def test_the_expression_of_a_table_is_evaluated_again() -> None:
    from hf_taskvec.publishing.notation import evaluate_expression

    a, b = some_vectors(2)
    merged = combine([a, b], "learned", scales=TABLES, by="kind")
    assert merged.provenance.rules == (("learned", "https://arxiv.org/abs/2407.02880"),)
    again = evaluate_expression(merged.expression, {"v0": a, "v1": b})
    assert again == merged and again.expression == merged.expression


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": TABLES, "by": "kinds"}, "no grouping by='kinds'. Did you mean 'kind'"),
        ({"scales": TABLES[:1], "by": "kind"}, "1 tables of scales for 2 vectors"),
        ({"scales": 0.5}, "must be a table"),
        ({"scales": [0.5, 0.5]}, "must be a table"),
        ({"scales": {"mlp.fc": 1.0}, "by": "kind"}, "no number for 'mlp.fc1'.* Did you mean 'mlp.fc'"),
        ({"scales": {"all": float("nan")}, "by": "vector"}, "finite number"),
        ({"scales": {"all": True}, "by": "vector"}, "finite number"),
        ({}, "needs scales="),
    ],
)
def test_a_table_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskVectorError, match=message):
        combine(some_vectors(2), "learned", **options)


def test_vectors_of_other_parts_of_one_architecture_are_combined(models: TinyModels) -> None:
    """LoRA on the attention and LoRA on the MLPs, for example. Where the architecture is not known it is refused."""
    vector = models.pair("phi").vector()
    attention, mlp = vector.filter("*.self_attn.*"), vector.filter("*.mlp.*")
    assert set(combine([attention, mlp])) == {*attention, *mlp}
    unknown = [TaskVector.from_tensors({name: torch.ones(2)}) for name in ("a", "b")]
    with pytest.raises(MismatchError, match="none of the parameters"):
        combine(unknown)
