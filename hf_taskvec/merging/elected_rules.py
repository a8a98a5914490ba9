"""Sparse rules whose vectors elect a sign for each element, as TIES' do: with DARE, DELLA (by rank) and SCE.

The election is TIES': of what each vector keeps, the sign of the sum wins, and those that have it are merged.
"""

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from hf_taskvec.algebra.computed_deltas import Statistic, Tiles
from hf_taskvec.algebra.measures import tiles_of
from hf_taskvec.algebra.sources import numel
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import BadValueError
from hf_taskvec.merging.option_checks import checked_below, checked_each, checked_share, checked_shares
from hf_taskvec.merging.order_statistics import order_statistics
from hf_taskvec.merging.rule_registry import Parameter, rule
from hf_taskvec.merging.sparse_rules import (
    Densities,
    Normalisation,
    breadcrumbs_bounds,
    checked_normalisation,
    checked_seed,
    elected,
    random_mask,
    random_uniform,
    within_bounds,
)

_Tiles = list[torch.Tensor]


@rule("breadcrumbs_ties", paper="https://arxiv.org/abs/2312.06795")
def breadcrumbs_ties_rule(
    parameter: Parameter, density: Densities = 0.9, gamma: Densities = 0.01, normalize: Normalisation = "count"
) -> list[Term]:
    """Breadcrumbs, then TIES' election: without the smallest and the very largest elements, those of the elected sign.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        density (`float` or `Sequence[float]`, *optional*, defaults to 0.9):
            The share of all elements to keep: one number, or one for each vector.
        gamma (`float` or `Sequence[float]`, *optional*, defaults to 0.01):
            The share of largest elements to leave out.
        normalize (`str`, *optional*, defaults to `"count"`):
            As for `ties`.

    """
    parts = checked_normalisation(parameter, normalize)
    found = breadcrumbs_bounds(parameter, density, gamma)
    return parameter.elementwise(elected(parameter, within_bounds, parts), found)


@rule("dare_ties", paper="https://arxiv.org/abs/2311.03099")
def dare_ties_rule(
    parameter: Parameter,
    density: Densities = 0.5,
    seed: int = 0,
    rescale: bool = True,
    normalize: Normalisation = "count",
) -> list[Term]:
    """DARE, then TIES' election: of the elements that random dropping leaves, those of the elected sign.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        density (`float` or `Sequence[float]`, *optional*, defaults to 0.5):
            The share of elements to keep, on average: one number, or one for each vector.
        seed (`int`, *optional*, defaults to 0):
            Chooses the elements, as for `dare`.
        rescale (`bool`, *optional*, defaults to `True`):
            Divide what is kept by the density.
        normalize (`str`, *optional*, defaults to `"count"`):
            As for `ties`.

    """
    parts = checked_normalisation(parameter, normalize)
    checked_seed(seed, rescale)
    densities = checked_shares("density", density, parameter.vectors)
    steps = [max(1, round(densities[change.index] * 65536)) for change in parameter.changes]

    def drop(number: int, tile: torch.Tensor, key: str) -> torch.Tensor:
        step = steps[number]
        if step == 65536:
            return tile
        return tile.mul_(random_mask(key, step, torch.empty_like(tile))).mul_(65536 / step if rescale else 1.0)

    return _merged(parameter, drop, seed, parts, elects=True)


@rule("della", paper="https://arxiv.org/abs/2406.11617", at_least=1)
def della_rule(
    parameter: Parameter, density: Densities = 0.5, epsilon: Densities = 0.1, seed: int = 0, rescale: bool = True
) -> list[Term]:
    """The weighted sum of vectors of which random elements are dropped, the smaller ones of a row more often (DELLA).

    An element is kept with a probability from `density - epsilon`, for the smallest magnitude of its row, to
    `density + epsilon`, for the largest, and divided by that probability. (What has no rows, as a bias, is one.)

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        density (`float` or `Sequence[float]`, *optional*, defaults to 0.5):
            The share of elements to keep, on average: one number, or one for each vector.
        epsilon (`float` or `Sequence[float]`, *optional*, defaults to 0.1):
            How far the probability goes below and above it.
        seed (`int`, *optional*, defaults to 0):
            Chooses the elements, as for `dare`.
        rescale (`bool`, *optional*, defaults to `True`):
            Divide what is kept by its probability, so that the expected value is the vector's.

    """
    return _merged(parameter, _by_rank(parameter, density, epsilon, seed, rescale), seed, None, elects=False)


@rule("della_ties", paper="https://arxiv.org/abs/2406.11617")
def della_ties_rule(
    parameter: Parameter,
    density: Densities = 0.5,
    epsilon: Densities = 0.1,
    seed: int = 0,
    rescale: bool = True,
    normalize: Normalisation = "count",
) -> list[Term]:
    """DELLA, then TIES' election, as the paper has it (mergekit calls this `della`, and the other `della_linear`).

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        density (`float` or `Sequence[float]`, *optional*, defaults to 0.5):
            As for `della`.
        epsilon (`float` or `Sequence[float]`, *optional*, defaults to 0.1):
            As for `della`.
        seed (`int`, *optional*, defaults to 0):
            As for `della`.
        rescale (`bool`, *optional*, defaults to `True`):
            As for `della`.
        normalize (`str`, *optional*, defaults to `"count"`):
            As for `ties`.

    """
    parts = checked_normalisation(parameter, normalize)
    return _merged(parameter, _by_rank(parameter, density, epsilon, seed, rescale), seed, parts, elects=True)


@rule("sce", paper="https://arxiv.org/abs/2408.07990")
def sce_rule(parameter: Parameter, density: float = 0.1) -> list[Term]:
    """Keep what differs most, weigh each vector by what is left of it, elect a sign for each element (SCE, FuseChat).

    Kept are the elements with the largest variance over the vectors, counted among those that have any. A vector's
    coefficient is its share of the squares of all that is kept, for each parameter by itself; what has the sign of the
    sum is averaged by these coefficients. (One vector alone has no variance, and is kept whole.)

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        density (`float`, *optional*, defaults to 0.1):
            The share of elements to keep.

    """
    spread = _Spread(parameter, checked_share("density", density))
    if spread.vectors == 1:
        return parameter.sum()

    def merge(tiles: _Tiles, energies: list[float], start: int) -> torch.Tensor:
        kept = spread.kept(tiles)
        total = torch.stack(kept).sum(0)
        shares = [energy / (sum(energies) or 1.0) for energy in energies]
        return _elected([each * share for each, share in zip(kept, shares, strict=True)], total, shares)

    return parameter.computed(merge, [spread.energy_of(number) for number in range(len(parameter.changes))])


class _Spread:
    """The variance of a parameter's elements over the vectors, and what is kept where it is large."""

    def __init__(self, parameter: Parameter, share: float) -> None:
        self._parameter, self._share = parameter, share
        self._weights = [change.weight for change in parameter.changes]
        self.vectors = sum(weight != 0.0 for weight in parameter.weights)
        self._variance = tuple(parameter.computed(lambda tiles, _, start: self._of(self._weighted(tiles))))

    def kept(self, tiles: _Tiles) -> _Tiles:
        """What is kept of each change, weighted, of tiles that may be written to."""
        changes = self._weighted(tiles)
        if self._share == 1.0:
            return changes
        mask = (self._of(changes) >= self._least).to(changes[0].dtype)
        return [change.mul_(mask) for change in changes]

    def energy_of(self, number: int) -> Statistic:
        """Finds the sum of the squares of what is kept of one change."""

        def find(_: Tiles) -> float:
            total = 0.0
            for _start, _stop, (rows, variance) in tiles_of([self._parameter.changes[number].terms, self._variance]):
                kept = rows.square() if self._share == 1.0 else rows.square() * (variance >= self._least)
                total += float(kept.sum())
            return total * self._weights[number] ** 2

        return find

    @cached_property
    def _least(self) -> float:
        """The smallest variance that is kept."""
        tiles = Tiles(self._variance)
        count = numel(tiles.shape)
        kept = int((count - int(tiles.count_magnitudes(0, 0, 1).sum())) * self._share)
        return order_statistics(tiles, [count - kept], self._parameter.name)[0] if kept else math.inf

    def _weighted(self, tiles: _Tiles) -> _Tiles:
        return [tile.mul_(weight) for tile, weight in zip(tiles, self._weights, strict=True)]

    def _of(self, changes: _Tiles) -> torch.Tensor:
        mean = torch.stack(changes).sum(0).div_(self.vectors)
        total = mean.square().mul_(self.vectors - len(changes))  # those that leave the parameter as it is
        for each in changes:
            total.add_((each - mean).square_())
        return total.div_(self.vectors).float()


# From a vector's place, its tile, which may be written to, and a key of both to what is kept of the tile.
_Drop = Callable[[int, torch.Tensor, str], torch.Tensor]


def _by_rank(parameter: Parameter, density: Densities, epsilon: Densities, seed: int, rescale: bool) -> _Drop:
    checked_seed(seed, rescale)
    shares = checked_shares("density", density, parameter.vectors)
    reaches = checked_each("epsilon", epsilon, parameter.vectors, partial(checked_below, limit=0.5))
    for share, reach in zip(shares, reaches, strict=True):
        if share < 1.0 and not reach < share < 1.0 - reach:
            raise BadValueError(
                f"density={share:g} and epsilon={reach:g}: the density must be above epsilon and below 1 - epsilon, "
                "so that every probability is between 0 and 1."
            )

    def drop(number: int, tile: torch.Tensor, key: str) -> torch.Tensor:
        index = parameter.changes[number].index
        share, reach = shares[index], reaches[index]
        if share == 1.0:
            return tile
        magnitude = tile.abs()
        order = magnitude.argsort(dim=-1, stable=True)
        ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(tile.shape[-1]).expand_as(order))
        places = ranks.to(tile.dtype).div_(max(1, tile.shape[-1] - 1))
        kept = places.mul_(2.0 * reach).add_(share - reach)
        tile.mul_(random_uniform(key, torch.empty_like(tile)) < kept)
        return tile.div_(kept) if rescale else tile

    return drop


def _merged(parameter: Parameter, drop: _Drop, seed: int, parts: list[float] | None, elects: bool) -> list[Term]:
    """The changes without what is dropped, merged: by their weighted sum, or by the election."""
    weights = [change.weight for change in parameter.changes]
    keys = [f"{int(seed)}|{change.label}|{parameter.name}" for change in parameter.changes]

    def merge(tiles: _Tiles, _: list[Any], start: int) -> torch.Tensor:
        kept = [
            drop(number, tile, f"{keys[number]}|{start}").mul_(weights[number]) for number, tile in enumerate(tiles)
        ]
        total = torch.stack(kept).sum(0) if len(kept) > 1 else kept[0]
        return _elected(kept, total, parts) if elects else total

    return parameter.computed(merge)


def _elected(kept: _Tiles, total: torch.Tensor, parts: list[float] | None) -> torch.Tensor:
    """What agrees with the sign of the sum: added up, or averaged by each vector's part."""
    merged, votes = torch.zeros_like(total), torch.zeros_like(total)
    for number, each in enumerate(kept):
        agrees = (each * total) > 0
        merged.add_(each * agrees)
        if parts is not None:
            votes.add_(agrees, alpha=parts[number])
    merged.add_(total - total)  # NaN and infinities stay to be refused
    return merged if parts is None else merged.div_(torch.where(votes > 0, votes, torch.ones_like(votes)))
