"""Noise of a vector's size: norms against fp64, and the same bits however it is computed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.kinds_of_change import KINDS, SHAPE
from support.random_vectors import random_vector
from support.tiny_models import TinyModels

from hf_taskvec import TaskVector
from hf_taskvec.algebra.noise import standard_normal
from hf_taskvec.algebra.provenance import Origin, Provenance
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.publishing.notation import as_code, evaluate_expression

LARGE = "model.layers.0.mlp.fc1.weight"


def norm64(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum().sqrt())


@pytest.mark.parametrize("kind", ["dense", "low-rank", "mixed"])
def test_every_parameter_has_the_norm_of_the_vector_and_another_direction(kind: str) -> None:
    vector = random_vector(1, kind) * -0.3
    noise = vector.noise(seed=5)
    assert list(noise) == list(vector)
    for name in vector:
        assert norm64(noise.dense(name)) == pytest.approx(norm64(vector.dense(name, torch.float64)), rel=1e-6)
        assert noise.shape(name) == vector.shape(name)
        assert vector[name].is_low_rank == noise[name].is_low_rank
    assert abs(noise.cosine(vector)) < 0.3
    assert abs(noise.cosine(vector.noise(seed=6))) < 0.3
    assert noise.norm() == pytest.approx(vector.norm(), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_every_kind_of_change_has_its_norm_and_its_rows(kind: str) -> None:
    delta, value = KINDS[kind](torch.Generator().manual_seed(3))
    vector = TaskVector({"w": [Term(-2.0, delta)]}, Provenance.of(Origin("v", "made for a test")))
    noise = vector.noise()
    dense = noise.dense("w", torch.float64)
    assert dense.shape == SHAPE and norm64(dense) == pytest.approx(2 * norm64(value), rel=1e-6)
    assert torch.equal(dense.abs().sum(dim=1) > 0, value.abs().sum(dim=1) > 0)
    assert noise["w"].terms[0].delta.is_partial == delta.is_partial
    assert noise["w"].rank == vector["w"].rank


def test_noise_in_two_sets_of_rows_is_in_the_rows_of_both() -> None:
    one, value = KINDS["scattered rows"](torch.Generator().manual_seed(3))
    other, second = KINDS["a range of rows"](torch.Generator().manual_seed(4))
    vector = TaskVector({"w": [Term(1.0, one), Term(0.5, other)]}, Provenance.of(Origin("v", "made for a test")))
    dense = vector.noise().dense("w", torch.float64)
    assert norm64(dense) == pytest.approx(norm64(value + 0.5 * second), rel=1e-6)
    assert torch.equal(dense.abs().sum(dim=1) > 0, (value + second).abs().sum(dim=1) > 0)


def test_the_numbers_are_gaussian_and_no_two_parameters_share_them() -> None:
    tensors = {name: torch.ones(200, 300) for name in ("a.weight", "b.weight")}
    noise = TaskVector.from_tensors(tensors).noise()
    a, b = (noise.dense(name, torch.float64).flatten() for name in tensors)
    assert abs(a.mean()) < 0.02 and a.std().item() == pytest.approx(1.0, abs=0.01)
    assert (a.abs() < 1.959964).double().mean().item() == pytest.approx(0.95, abs=0.005)
    assert (a**4).mean().item() == pytest.approx(3.0, abs=0.1)
    assert abs(torch.dot(a, b)) / (a.norm() * b.norm()) < 0.02


def test_any_run_of_rows_has_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    vector = TaskVector.from_tensors({LARGE: torch.randn(700, 1100, generator=generator)})  # several tiles and blocks
    noise = vector.noise(seed=2)
    whole = noise.dense(LARGE)
    for start, stop in ((0, 700), (0, 1), (333, 334), (29, 611), (699, 700)):
        rows = Sum((700, 1100), vector.noise(seed=2)[LARGE].terms).rows(start, stop)  # computed from nothing
        assert torch.equal(rows.float(), whole[start:stop])
    assert norm64(whole) == pytest.approx(norm64(vector.dense(LARGE)), rel=1e-7)


def test_an_endless_row_is_the_same_wherever_it_is_entered() -> None:
    row = standard_normal(b"key", 0, 100_000)
    for start, stop in ((0, 5), (32_767, 32_769), (32_768, 65_536), (70_000, 99_999), (12, 12)):
        assert torch.equal(standard_normal(b"key", start, stop), row[start:stop])
    assert not torch.equal(standard_normal(b"other", 0, 100), row[:100])


@pytest.mark.parametrize("kind", ["dense", "low-rank"])
def test_it_is_saved_with_where_it_comes_from_and_gives_the_same_numbers(tmp_path, kind: str) -> None:
    vector = random_vector(2, kind)
    noise = 0.5 * vector.noise(seed=11)
    noise.save(tmp_path / "noise")
    loaded = TaskVector.load(tmp_path / "noise")
    label = vector.expression
    assert loaded.expression == noise.expression == f"0.5*noise({label}, seed=11)"
    assert loaded.provenance.origins[0].label == label
    for name in noise:
        assert torch.equal(loaded.dense(name, torch.float64), noise.dense(name, torch.float64))
    again = evaluate_expression(loaded.expression, {label: vector})
    assert again == noise and again.fingerprint == noise.fingerprint
    assert "noise(seed=11)" in as_code(loaded.provenance)
    with pytest.raises(UnsupportedError, match="reference=True"):
        vector.noise().save(tmp_path / "reference", reference=True)


def test_it_is_applied_streamed_and_live_as_any_other_vector(models: TinyModels, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    pair = models.pair("phi")
    noise = pair.vector().noise(seed=3)
    noise.apply(pair.base, tmp_path / "streamed", scale=-0.5)
    streamed = AutoModelForCausalLM.from_pretrained(tmp_path / "streamed").state_dict()
    live = AutoModelForCausalLM.from_pretrained(pair.base)
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    with noise.applied_to(live, -0.5):
        edited = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    assert all(torch.equal(edited[name], streamed[name]) for name in edited)
    assert all(torch.equal(tensor, before[name]) for name, tensor in live.state_dict().items())
    for name in noise:
        change = edited[name].double() - before[name].double()
        assert norm64(change) == pytest.approx(0.5 * pair.vector().norm(name), rel=1e-3), name


def test_factors_are_exported_as_an_adapter(tmp_path, models: TinyModels) -> None:
    pair = models.pair("phi")
    noise = pair.vector().filter(include="*.fc1.weight").compress(rank=2).noise()
    assert noise.is_low_rank
    noise.to_adapter(tmp_path / "adapter", pair.base)
    back = TaskVector.from_adapter(tmp_path / "adapter")
    for name in noise:
        assert torch.allclose(back.dense(name), noise.dense(name), rtol=1e-5, atol=1e-7)


def test_equal_noise_is_equal_and_its_weights_add_up() -> None:
    vector = random_vector(1, "dense")
    noise = vector.noise()
    assert noise == vector.noise(0) and noise != vector.noise(1) and noise != random_vector(2, "dense").noise()
    assert len(noise - vector.noise()) == 0
    assert noise.fingerprint == vector.noise().fingerprint != vector.noise(1).fingerprint
    assert pickle.loads(pickle.dumps(noise)).dense(LARGE).equal(copy.deepcopy(noise).dense(LARGE))


def test_noise_of_nothing_is_nothing() -> None:
    vector = TaskVector.from_tensors({"w": torch.zeros(3, 3), "scalar": torch.tensor(-2.0), "left": torch.ones(0, 4)})
    noise = vector.noise()
    assert not noise.dense("w").any() and noise.dense("left").shape == (0, 4)
    assert abs(noise.dense("scalar")) == 2.0


@pytest.mark.parametrize("seed", [0.5, "1", True, None])
def test_a_seed_is_a_whole_number(seed) -> None:
    with pytest.raises(BadValueError, match="whole number"):
        random_vector(1, "dense").noise(seed)
