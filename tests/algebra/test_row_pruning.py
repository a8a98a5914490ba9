"""Row pruning against dense fp64."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import TinyModels

from hf_taskvec import TaskVector, TaskVectorError, combine
from hf_taskvec.algebra.column_changes import Columns
from hf_taskvec.algebra.deltas import Dense
from hf_taskvec.algebra.row_pruning import is_first_of_mlp
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.analysis import large_rows

FC1, FC2 = "model.layers.0.mlp.fc1.weight", "model.layers.1.mlp.fc2.weight"
C_FC = "transformer.h.0.mlp.c_fc.weight"  # which GPT-2 stores transposed: (inputs, neurons)


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
        want = expected(dense, fraction) if is_first_of_mlp(name) else dense
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


@pytest.mark.parametrize("architecture", ["phi", "gpt2", "opt", "gpt_neox", "phi3", "llama"])
def test_what_is_kept_is_what_large_rows_finds_large(models: TinyModels, architecture: str) -> None:
    vector = models.pair(architecture).vector()
    pruned = vector.prune_rows(0.25)
    for found in large_rows(vector):
        name, count = found.name, -(-len(found.norms) // 4)
        largest = found.norms.topk(count).indices.sort().values
        transposed = architecture == "gpt2"
        dense = pruned.dense(name, torch.float64)
        kept = dense.any(dim=0 if transposed else 1).nonzero().flatten()
        assert torch.equal(kept, largest), name
        whole = vector.dense(name, torch.float64)
        assert torch.equal(*((each[:, kept] if transposed else each[kept]) for each in (dense, whole)))


def planted(kind: str) -> tuple[TaskVector, torch.Tensor]:
    """A change of GPT-2's whose neurons 1 and 6 of eight hold nearly all of it, and the change."""
    generator = torch.Generator().manual_seed(0)
    size = torch.full((8,), 1e-3)
    size[[1, 6]] = 1.0
    left, right = torch.randn(4, 2, generator=generator), torch.randn(2, 8, generator=generator) * size
    if kind == "factors":
        return TaskVector.from_tensors({C_FC: (left, right)}), left.double() @ right.double()
    change = torch.randn(4, 8, generator=generator) * size
    return TaskVector.from_tensors({C_FC: change}), change.double()


@pytest.mark.parametrize("kind", ["dense", "factors"])
def test_the_neurons_of_a_transposed_matrix_are_its_columns(kind: str, tmp_path) -> None:
    vector, change = planted(kind)
    pruned = vector.prune_rows(0.25)
    want = torch.zeros_like(change)
    want[:, [1, 6]] = change[:, [1, 6]]
    assert torch.allclose(pruned.dense(C_FC, torch.float64), want, rtol=1e-14, atol=0)
    assert pruned.discarded[C_FC] < 1e-4
    assert pruned.is_low_rank == (kind == "factors")
    loaded = TaskVector.load(pruned.save(tmp_path / "v"))
    assert torch.equal(loaded.dense(C_FC, torch.float64), pruned.dense(C_FC, torch.float64))


def test_columns_of_a_fine_tune_are_applied_and_saved_bit_for_bit(models: TinyModels, tmp_path) -> None:
    pair = models.pair("gpt2")
    pruned = pair.vector().prune_rows(0.5)
    loaded = TaskVector.load(pruned.save(tmp_path / "v"))
    for number, vector in enumerate((pruned, loaded)):
        vector.apply(pair.base, tmp_path / f"model-{number}")
    first, second = (load_file(tmp_path / f"model-{number}" / "model.safetensors") for number in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    name = next(name for name in first if name.endswith(C_FC))
    base, tuned = (load_file(folder / "model.safetensors") for folder in (pair.base, pair.tuned))
    is_tuned = (first[name] == tuned[name]).all(dim=0)
    is_base = (first[name] == base[name]).all(dim=0)
    assert (is_tuned | is_base).all() and is_tuned.sum() == is_base.sum() == is_tuned.numel() // 2


def test_columns_of_what_a_rule_computes_are_those_of_the_dense_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = [TaskVector.from_tensors({C_FC: torch.randn(4, 8, generator=generator)}, name=name) for name in "ab"]
    merged = combine(vectors, "ties", density=0.5)
    pruned = merged.prune_rows(0.5).dense(C_FC, torch.float64)
    assert torch.equal(pruned, expected(merged.dense(C_FC, torch.float64).T, 0.5).T)


def test_only_first_matrices_lose_rows_unless_others_are_named(models: TinyModels) -> None:
    vector = models.pair("phi").vector()
    assert torch.equal(vector.prune_rows(0.5).dense(FC2), vector.dense(FC2))
    both = vector.prune_rows(0.5, re.compile(r"\.fc[12]\.weight$"))
    assert not torch.equal(both.dense(FC2), vector.dense(FC2))


def test_columns_that_do_not_fit_are_refused() -> None:
    change = Dense((InMemory(torch.ones(2, 2)),))
    for index in ((0, 4), (0, 0), (0,), (-1, 0)):
        with pytest.raises(TaskVectorError, match="a change to columns"):
            Columns(index, change, 4)
