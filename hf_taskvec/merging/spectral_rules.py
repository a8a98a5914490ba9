"""Spectral rules: merging by singular vectors. What is held as factors is decomposed from its factors."""

import torch

from hf_taskvec.algebra.low_rank import Target, singular_triples
from hf_taskvec.algebra.sources import numel
from hf_taskvec.algebra.sums import Term
from hf_taskvec.merging.rule_registry import Parameter, rule


@rule("low_rank", paper="https://arxiv.org/abs/2504.10957", at_least=1)
def low_rank_rule(parameter: Parameter, rank: int = 1) -> list[Term]:
    """The weighted sum of vectors of which each matrix is cut to a low rank.

    Corollary 1 of Li et al. 2025. Biases and norms stay whole.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        rank (`int`, *optional*, defaults to 1):
            The rank to keep of each matrix.

    """
    Target(rank=rank)  # refuses what is no rank
    if len(parameter.shape) != 2 or not numel(parameter.shape):
        return parameter.sum()
    ranks = [min(rank, _rank(change.terms), *parameter.shape) for change in parameter.changes]

    def factors() -> tuple[torch.Tensor, torch.Tensor]:
        lefts, rights = [], []
        for change, kept in zip(parameter.changes, ranks, strict=True):
            left, values, right = singular_triples(parameter.name, change.terms, kept)
            lefts.append(left * (values * change.weight))
            rights.append(right)
        return torch.cat(lefts, dim=1), torch.cat(rights)

    return parameter.factored(sum(ranks), factors)


@rule("tsv", paper="https://arxiv.org/abs/2412.00081")
def tsv_rule(parameter: Parameter, rank: int | None = None) -> list[Term]:
    """The leading singular vectors of all vectors side by side, made orthogonal: they no longer interfere (TSV-Merge).

    The left singular vectors of all vectors are replaced by the orthonormal ones that are nearest to them (Procrustes),
    and so are the right ones. A weight multiplies the singular values, with its sign. What is not a matrix is averaged.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        rank (`int`, *optional*):
            How many singular triples each matrix keeps of each vector. The default is also the most that
            there can be: the smaller side divided by the number of vectors.

    """
    if rank is not None:
        Target(rank=rank)  # refuses what is no rank
    if len(parameter.shape) != 2 or not numel(parameter.shape):
        return parameter.sum([change.weight / parameter.vectors for change in parameter.changes])
    largest = max(1, min(parameter.shape) // parameter.vectors)
    most = largest if rank is None else min(rank, largest)
    ranks = [min(most, _rank(change.terms)) for change in parameter.changes]

    def factors() -> tuple[torch.Tensor, torch.Tensor]:
        lefts, rights, scales = [], [], []
        for change, kept in zip(parameter.changes, ranks, strict=True):
            left, values, right = singular_triples(parameter.name, change.terms, kept)
            lefts.append(left)
            rights.append(right.T)
            scales.append(values * change.weight)
        left, right = (_orthonormal(torch.cat(each, dim=1)) for each in (lefts, rights))
        return left * torch.cat(scales), right.T

    return parameter.factored(sum(ranks), factors)


def _orthonormal(vectors: torch.Tensor) -> torch.Tensor:
    """The orthonormal columns nearest to the given ones: `P Q'` of their singular value decomposition `P D Q'`."""
    u, _, v = torch.linalg.svd(vectors, full_matrices=False)
    return u @ v


def _rank(terms: tuple[Term, ...]) -> int:
    return sum(term.delta.rank for term in terms)
