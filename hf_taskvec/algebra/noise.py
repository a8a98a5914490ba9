"""Noise: a random change that is as large as a vector's own, parameter by parameter. The control of an experiment.

What noise of the same size does to a model is not the vector's doing. The numbers hang on the seed, the parameter's
name and their place in it alone, so whoever computes whichever rows gets the same bits. Nothing is stored: they are
drawn whenever they are used, block by block.
"""

import hashlib
import math
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.computed_deltas import Factored
from hf_taskvec.algebra.deltas import Delta, DeltaWriter, Dense, LowRank, Rows
from hf_taskvec.algebra.parameter_change import ParameterChange
from hf_taskvec.algebra.sources import Source, numel
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.tiles import tiles_of_shape
from hf_taskvec.errors import UnsupportedError

# Numbers that are drawn by one generator. Rows that begin within a block cost the drawing of what is before them.
_BLOCK = 1 << 15


def standard_normal(key: bytes, start: int, stop: int) -> torch.Tensor:
    """The numbers `start:stop` of an endless row of Gaussian fp32 ones (mean 0, variance 1), of which each key has one.

    >>> row = standard_normal(b"key", 0, 100_000)
    >>> bool((standard_normal(b"key", 70_000, 70_003) == row[70_000:70_003]).all())
    True
    """
    out = np.empty(stop - start, dtype=np.float32)
    philox = int.from_bytes(hashlib.sha256(key).digest()[:16], "little")
    for block in range(start // _BLOCK, -(-stop // _BLOCK)):
        first = block * _BLOCK
        last = min(first + _BLOCK, stop)
        generator = np.random.Generator(np.random.Philox(key=philox, counter=[0, 0, block, 0]))
        low = max(first, start)
        out[low - start : last - start] = generator.standard_normal(last - first, dtype=np.float32)[low - first :]
    return torch.from_numpy(out)


def noise_like(change: ParameterChange, seed: int) -> Term:
    """Noise of the norm of a parameter's change: in factors if that is in factors, in some rows if it changes these."""
    if change.is_low_rank:
        return Term(1.0, _random_factors(change, seed))
    partial = [term.delta for term in change.terms if isinstance(term.delta, Rows)]
    if len(partial) < len(change.terms):
        return Term(1.0, Noise(change.name, change.terms, seed, change.shape[0] if change.shape else 1))
    index = partial[0].index if len(partial) == 1 else tuple(sorted({row for each in partial for row in each.index}))
    return Term(1.0, Rows(index, Noise(change.name, change.terms, seed, len(index)), change.shape[0]))


@dataclass(frozen=True)
class Noise(Delta):
    """Gaussian numbers, scaled to the norm of other changes. They are fp32, wherever they are used.

    Args:
        name (`str`):
            The parameter's.
        like (`tuple[Term, ...]`):
            The changes whose sum has the norm; they are read for it once, when the noise is first used.
        seed (`int`):
            Of the numbers.
        rows (`int`):
            How many rows of the parameter are changed; 1 for a scalar.
    """

    name: str
    like: tuple[Term, ...]
    seed: int
    rows: int
    _scale: list[float] = field(default_factory=list, compare=False, repr=False, init=False)
    _lock: Any = field(default_factory=threading.Lock, compare=False, repr=False, init=False)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        shape = self.like[0].delta.shape
        return (self.rows, *shape[1:]) if shape else ()

    @property
    @override
    def sources(self) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(source for term in self.like for source in term.delta.sources))

    @property
    @override
    def is_single(self) -> bool:
        return True

    @override
    def add_rows(self, out: torch.Tensor, start: int, stop: int, weight: float) -> None:
        rows = self._drawn(start, stop).double().mul_(self._scaling()).float().view(out.shape)
        if out.dtype == torch.float32:  # `Sum` asks for it with whole weights only, which keep all bits
            out.add_(rows.to(out.device), alpha=weight)
        else:  # the product rounded first, as for a stored change: the same bits
            out.add_(rows.to(out).mul_(weight))

    def _drawn(self, start: int, stop: int) -> torch.Tensor:
        width = numel(self.shape[1:])
        return standard_normal(_key(self.name, self.seed, "dense"), start * width, stop * width)

    @kept_subnormals()
    def _scaling(self) -> float:
        """What the numbers are multiplied by: one pass over the changes and one over the numbers, the first time."""
        with self._lock:
            if not self._scale:
                tiles = tiles_of_shape(self.shape)
                square = math.fsum(self._drawn(*tile).double().square_().sum().item() for tile in tiles)
                self._scale.append(_ratio(measures.norm(self.name, self.like), math.sqrt(square)))
            return self._scale[0]

    @override
    def to_record(self, key: str, name: str, writer: DeltaWriter) -> dict[str, Any]:
        if writer.reference:
            raise UnsupportedError(
                f"{name} is noise, so no file can be referred to. Save the vector without reference=True."
            )
        return {"kind": Dense.kind, "parts": writer.rounded(key, name, self)}

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.like, self.seed, self.rows)


def _random_factors(change: ParameterChange, seed: int) -> LowRank:
    (rows, columns), rank = change.shape, change.rank

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        left = standard_normal(_key(change.name, seed, "left"), 0, rows * rank).double().view(rows, rank)
        right = standard_normal(_key(change.name, seed, "right"), 0, rank * columns).double().view(rank, columns)
        norm = math.sqrt(max(0.0, ((left.T @ left) * (right @ right.T)).sum().item()))
        share = math.sqrt(
            _ratio(change.norm, norm)
        )  # half of it for each, so that neither leaves a small dtype's range
        return left.mul_(share), right.mul_(share)

    shapes = ((rows, rank), (rank, columns))
    return LowRank(*Factored((change.terms,), f"noise({change.name!r}, seed={seed})", shapes, draw).factors)


def _key(name: str, seed: int, part: str) -> bytes:
    return f"hf_taskvec noise|{seed}|{part}|{name}".encode()


def _ratio(norm: float, of: float) -> float:
    return norm / of if of else 0.0
