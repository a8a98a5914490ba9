"""Row pruning against dense fp64."""

from __future__ import annotations

import re

import pytest
import torch
from support.tiny_models import TinyModels

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.algebra.row_pruning import MLP

FC1, FC2 = "model.layers.0.mlp.fc1.weight", "model.layers.1.mlp.fc2.weight"


def expected(change: torch.Tensor, fraction: float) -> torch.Tensor:
    """By other means than the library's: a threshold at the last norm that is kept."""
    norms = change.double().norm(dim=1)
    count = -(-int(fraction * 1000) * len(norms) // 1000)
    least = norms.sort(descending=True).values[count - 1]
    return change * (norms >= least)[:, None]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_largest_rows_of_each_mlp_matrix_stay_bit_for_bit(models: TinyModels, fraction: float) -> None:
    vector = models.pair("phi").vector()
    pruned = vector.prune_rows(fraction)
    assert set(pruned) == set(vector)
    for name in vector:
        dense = vector.dense(name, torch.float64)
        want = expected(dense, fraction) if MLP.search(name) else dense
        assert torch.equal(pruned.dense(name, torch.float64), want), name


def test_a_sum_is_pruned_by_the_norms_of_the_whole_change() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, 4, generator=generator) for _ in range(2))
    vector = TaskVector.from_tensors({FC1: a}, name="a") - 2 * TaskVector.from_tensors({FC1: b}, name="b")
    whole = a.double() - 2 * b.double()
    assert torch.equal(vector.prune_rows(0.5).dense(FC1, torch.float64), expected(whole, 0.5))


def test_factors_stay_factors(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(8, 2, generator=generator), torch.randn(2, 6, generator=generator)
    pruned = TaskVector.from_tensors({FC1: (left, right)}).prune_rows(0.25)
    assert pruned.is_low_rank and pruned.rank(FC1) == 2
    dense = left.double() @ right.double()
    assert torch.allclose(pruned.dense(FC1, torch.float64), expected(dense, 0.25), rtol=1e-14, atol=0)
    kept = 1 - pruned.discarded[FC1]
    assert kept == pytest.approx(float(expected(dense, 0.25).square().sum() / dense.square().sum()))


def test_a_pruned_vector_is_saved_and_applied_as_any_other(models: TinyModels, tmp_path) -> None:
    pair = models.pair("phi")
    pruned = pair.vector().prune_rows(0.3)
    pruned.save(tmp_path / "v")
    loaded = TaskVector.load(tmp_path / "v")
    assert torch.equal(loaded.dense(FC2), pruned.dense(FC2))
    loaded.apply(pair.base, tmp_path / "model", scale=-0.5)
    assert "prune_rows" in pruned.expression


def test_pruned_twice_is_pruned_once_at_the_smaller_share(models: TinyModels) -> None:
    vector = models.pair("phi").vector()
    twice = vector.prune_rows(0.5).prune_rows(0.25)
    assert torch.equal(twice.dense(FC1), vector.prune_rows(0.25).dense(FC1))


def test_everything_is_kept_at_one(models: TinyModels) -> None:
    vector = models.pair("llama").vector()
    assert vector.prune_rows(1.0) == vector


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_that_makes_no_sense_is_refused(models: TinyModels, fraction: float) -> None:
    with pytest.raises(TaskVectorError, match="share of rows"):
        models.pair("phi").vector().prune_rows(fraction)


def test_a_vector_without_an_mlp_is_refused_unless_matrices_are_named() -> None:
    vector = TaskVector.from_tensors({"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)})
    with pytest.raises(TaskVectorError, match="no row to prune"):
        vector.prune_rows(0.5)
    assert len(vector.prune_rows(0.5, re.compile("q_proj"))) == 1


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "gpt_neox", "phi3", "mixtral"])
def test_every_architecture_has_rows_to_prune(models: TinyModels, architecture: str) -> None:
    vector = models.pair(architecture).vector()
    assert vector.prune_rows(0.5).norm() < vector.norm()
