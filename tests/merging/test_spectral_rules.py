"""Spectral rules, against plain references in fp64."""

from __future__ import annotations

import pytest
import torch
from support.example_vectors import assert_close, some_adapters, some_vectors, stacked

from hf_taskvec import combine
from hf_taskvec.algebra.sums import Sum


def plain_tsv(changes: torch.Tensor, weights: list[float], rank: int) -> torch.Tensor:
    """Gargiulo et al. 2025, algorithm 1: truncate, concatenate, whiten by Procrustes, multiply out."""
    lefts, values, rights = [], [], []
    for change, weight in zip(changes, weights, strict=True):
        u, s, v = torch.linalg.svd(change, full_matrices=False)
        lefts.append(u[:, :rank])
        values.append(weight * s[:rank])
        rights.append(v[:rank].T)

    def whitened(matrix: torch.Tensor) -> torch.Tensor:
        p, _, q = torch.linalg.svd(matrix, full_matrices=False)
        return p @ q

    return whitened(torch.cat(lefts, 1)) @ torch.diag(torch.cat(values)) @ whitened(torch.cat(rights, 1)).T


@pytest.mark.parametrize("rank", [None, 3])
def test_tsv_of_dense_changes_is_the_plain_reference(rank: int | None) -> None:
    vectors, weights = some_vectors(), [1.0, -0.5, 2.0]
    merged = combine(vectors, "tsv", weights, rank=rank)
    matrix, bias = vectors[0]
    expected = {
        matrix: plain_tsv(stacked(vectors, matrix), weights, rank or 10),
        bias: (stacked(vectors, bias) * torch.tensor(weights).view(3, 1)).sum(0) / 3,
    }
    assert_close(merged, expected)
    assert merged.rank(matrix) == 3 * (rank or 10)


def test_spectral_rules_never_see_the_dense_matrix_of_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, weights = some_adapters(), [1.0, -0.5, 2.0]
    dense = {name: stacked(adapters, name) for name in adapters[0]}

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a dense matrix was formed")

    with monkeypatch.context() as patch:
        patch.setattr(Sum, "rows", refuse)
        merged = {rule: combine(adapters, rule, weights, rank=3) for rule in ("tsv", "low_rank")}
        for vector in merged.values():
            assert vector.is_low_rank and {vector.rank(name) for name in vector} == {9}
            vector.norm()
    assert_close(merged["tsv"], {n: plain_tsv(d, weights, 3) for n, d in dense.items()})
    cut = {n: sum(w * plain_tsv(c[None], [1.0], 3) for c, w in zip(d, weights, strict=True)) for n, d in dense.items()}
    assert_close(merged["low_rank"], cut)
