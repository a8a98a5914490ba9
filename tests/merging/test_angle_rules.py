"""Rules by angles against the formulas of their papers, written out in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from support.example_vectors import assert_close, some_adapters, some_vectors, stacked

from hf_taskvec import TaskVector, combine
from hf_taskvec.errors import BadValueError


def angle(a: torch.Tensor, b: torch.Tensor) -> float:
    return math.acos(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item())


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_slerp_goes_along_the_arc(t: float) -> None:
    vectors = some_vectors(2)
    expected = {}
    for name in vectors[0]:
        a, b = stacked(vectors, name) * torch.tensor([1.0, -0.5]).reshape(-1, *[1] * len(vectors[0].shape(name)))
        whole = angle(a, b)
        expected[name] = (math.sin((1 - t) * whole) * a + math.sin(t * whole) * b) / math.sin(whole)
    assert_close(combine(vectors, "slerp", [1.0, -0.5], t=t), expected)


def test_slerp_between_vectors_of_one_direction_is_interpolation() -> None:
    (vector,) = some_vectors(1)
    for factor in (1.0, 3.0, -1.0):
        other = (factor * vector).named("other")
        found = combine([vector, other], "slerp", t=0.25)
        expected = combine([vector, other], "interpolate", t=0.25)
        assert all(torch.equal(found.dense(name), expected.dense(name)) for name in vector)


def test_model_stock_is_the_mean_times_the_papers_ratio() -> None:
    vectors = some_vectors(3)
    shared = some_vectors(1, seed=5)[0].named("shared")  # so that they agree in part
    vectors = [(vector + shared).named(f"v{number}") for number, vector in enumerate(vectors)]
    expected = {}
    for name in vectors[0]:
        changes = stacked(vectors, name)
        cosines = [math.cos(angle(changes[i], changes[j])) for i, j in ((0, 1), (0, 2), (1, 2))]
        mean = sum(cosines) / 3
        assert 0.2 < mean < 0.8
        expected[name] = 3 * mean / (1 + 2 * mean) * changes.mean(0)
    assert_close(combine(vectors, "model_stock"), expected)


def test_model_stock_of_equal_vectors_is_that_vector_and_of_orthogonal_ones_nothing() -> None:
    a = TaskVector.from_tensors({"w": torch.tensor([2.0, 0.0])}, name="a")
    b = TaskVector.from_tensors({"w": torch.tensor([0.0, 3.0])}, name="b")
    assert torch.allclose(combine([a, a.named("again")], "model_stock").dense("w"), a.dense("w"))
    assert combine([a, b], "model_stock").norm() == 0.0
    assert combine([a, (-1 * a).named("minus")], "model_stock").norm() == 0.0  # where the ratio has no value
    both = TaskVector.from_tensors({"w": torch.tensor([0.0, 1.0]), "u": torch.ones(2)}, name="both")
    assert combine([a, both], "model_stock").norm() == 0.0  # a leaves u alone, which is orthogonal, too


@pytest.mark.parametrize("rule", ["slerp", "model_stock"])
def test_factors_stay_factors(rule: str) -> None:
    vectors = some_adapters(2)
    merged = combine(vectors, rule)
    assert all(change.is_low_rank for change in merged.values())
    dense = [TaskVector.from_tensors({n: v.dense(n, "float64") for n in v}, name=v.expression) for v in vectors]
    assert_close(merged, {name: combine(dense, rule).dense(name, "float64") for name in merged})


def test_bad_input_is_refused() -> None:
    vectors = some_vectors(3)
    with pytest.raises(BadValueError, match="'slerp' is between two vectors, not 3"):
        combine(vectors, "slerp")
    with pytest.raises(BadValueError, match="t=2 must be at least 0 and at most 1"):
        combine(vectors[:2], "slerp", t=2)
