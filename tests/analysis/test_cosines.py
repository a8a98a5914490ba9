"""Cosines against dense fp64, for dense, low-rank and mixed vectors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.random_vectors import SHAPES, random_vector
from support.tiny_models import TinyModels

from hf_taskvec import TaskVector
from hf_taskvec.analysis import cosine_matrix
from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError


def flat(vector: TaskVector, names: list[str]) -> torch.Tensor:
    parts = [vector.dense(n, torch.float64) if n in vector else torch.zeros(SHAPES[n]) for n in names]
    return torch.cat([part.flatten().double() for part in parts])


@given(st.lists(st.sampled_from(["dense", "low-rank", "mixed"]), min_size=2, max_size=4), st.integers(0, 100))
def test_cosines_are_those_of_the_dense_vectors(kinds: list[str], seed: int) -> None:
    vectors = [random_vector(seed + i, kind) for i, kind in enumerate(kinds)]
    matrix = cosine_matrix(vectors)
    groups = {
        None: list(SHAPES),
        "0": [n for n in SHAPES if ".0." in n],
        "1": [n for n in SHAPES if ".1." in n],
        "outside": ["model.norm.weight"],
    }
    for layer, names in groups.items():
        rows = torch.stack([flat(v, names) for v in vectors])
        norms = rows.norm(dim=1)
        expected = (rows @ rows.T) / (norms[:, None] * norms)
        if layer in (None, *matrix.by_layer):
            found = matrix.total if layer is None else matrix.by_layer[layer]
            torch.testing.assert_close(
                torch.tensor(found, dtype=torch.float64), expected, atol=1e-12, rtol=0, equal_nan=True
            )
            own = matrix.norms if layer is None else matrix.layer_norms[layer]
            torch.testing.assert_close(torch.tensor(own, dtype=torch.float64), norms, atol=1e-12, rtol=1e-12)
    assert vectors[0].cosine(vectors[1]) == pytest.approx(matrix.total[0][1], abs=1e-12)
    for name, found in matrix.by_parameter.items():
        rows = torch.stack([flat(v, [name]) for v in vectors])
        expected = torch.nn.functional.cosine_similarity(rows[:, None], rows, dim=2)
        expected[(rows == 0).all(dim=1)] = expected[:, (rows == 0).all(dim=1)] = math.nan
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), expected, atol=1e-12, rtol=0, equal_nan=True
        )


@given(st.floats(0.01, 100), st.integers(0, 20))
def test_cosines_do_not_depend_on_scales(scale: float, seed: int) -> None:
    a, b = random_vector(seed, "mixed"), random_vector(seed + 1, "dense")
    before = cosine_matrix({"a": a, "b": b})
    after = cosine_matrix({"a": scale * a, "b": -b})
    assert after["a", "b"] == after["b", "a"] == pytest.approx(-before["a", "b"], abs=1e-9)
    assert after.norms[0] == pytest.approx(scale * before.norms[0])
    assert after["a", "a"] == 1 and abs(after["a", "b"]) <= 1


def test_vectors_of_one_base_are_named_by_their_expressions(models: TinyModels) -> None:
    pair = models.pair("phi")
    one = pair.vector(name="one")
    matrix = cosine_matrix([one, -2 * one, one])
    assert matrix.names == ("one", "-2*one", "one (2)")
    assert matrix["one", "-2*one"] == pytest.approx(-1, abs=1e-12) and matrix["one", "one (2)"] == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_go_through_fp32(models: TinyModels, dtype: torch.dtype) -> None:
    """Small differences of larger weights."""
    vector = models.pair("phi", dtype).vector(name="one")
    other = vector.filter(exclude="*bias") * 0.3
    part = torch.cat([vector.dense(n, torch.float64).flatten() * (n in other) for n in vector])
    whole = torch.cat([vector.dense(n, torch.float64).flatten() for n in vector])
    matrix = cosine_matrix([vector, other])
    assert matrix.total[0][1] == pytest.approx((part.norm() / whole.norm()).item(), abs=1e-6)
    assert matrix.norms == pytest.approx([whole.norm().item(), 0.3 * part.norm().item()], rel=1e-6)


def test_vectors_without_a_direction_or_of_other_sizes_are_refused() -> None:
    one = random_vector(0, "dense")
    with pytest.raises(BadValueError, match="two vectors or more, not 1"):
        cosine_matrix([one])
    with pytest.raises(BadValueError, match="two vectors or more"):
        cosine_matrix(one)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="changes nothing"):
        cosine_matrix({"a": one, "b": one - one})
    zeros = TaskVector.from_tensors({name: torch.zeros(shape) for name, shape in SHAPES.items()}, name="zeros")
    with pytest.raises(BadValueError, match="zeros changes nothing"):
        cosine_matrix([one, zeros])
    with pytest.raises(BadValueError, match="is not a task vector"):
        cosine_matrix(["one", "other"])  # type: ignore[list-item]
    other = TaskVector.from_tensors({"model.norm.weight": torch.ones(7)})
    with pytest.raises(MismatchError, match="different sizes"):
        cosine_matrix([one, other])
    with pytest.raises(MissingNameError, match="Did you mean 'abc'"):
        cosine_matrix({"abc": one, "b": random_vector(1, "dense")})["abd", "b"]


def test_vectors_of_different_architectures_are_refused(models: TinyModels) -> None:
    with pytest.raises(MismatchError, match="different architectures"):
        cosine_matrix([models.pair("phi").vector(), models.pair("gpt2").vector()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_and_cosines_are_those_of_fp64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(300, 500, generator=generator).to(dtype) for _ in range(2)]
    gains = [torch.tensor(number, dtype=dtype) for number in (1.5, -2.5)]
    vectors = [
        TaskVector.from_tensors({"w": value, "gain": gain}) * 0.3 for value, gain in zip(values, gains, strict=True)
    ]
    found = cosine_matrix({"a": vectors[0], "b": vectors[1]})
    flat = [0.3 * torch.cat([v.double().flatten(), g.double()[None]]) for v, g in zip(values, gains, strict=True)]
    for number, (vector, exact) in enumerate(zip(vectors, flat, strict=True)):
        assert found.norms[number] == pytest.approx(exact.norm().item(), rel=1e-13)
        assert vector.norm() == pytest.approx(exact.norm().item(), rel=1e-13)
    assert found["a", "b"] == pytest.approx(torch.nn.functional.cosine_similarity(*flat, dim=0).item(), abs=1e-13)
