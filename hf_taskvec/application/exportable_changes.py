"""What keeps a vector from being a PEFT adapter: all of it at once, with the one call that leaves what can be exported.

A change that is stored but zero everywhere, as of norms that two fine-tunes left alone, is no change, and left out.
"""

import fnmatch
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hf_taskvec.algebra.low_rank import stacked_factors
from hf_taskvec.algebra.parameter_change import ParameterChange
from hf_taskvec.algebra.parameter_names import perhaps_conv1d, perhaps_tied
from hf_taskvec.algebra.sums import Sum
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.peft_loading import refused_layers
from hf_taskvec.errors import MissingFileError, UnsupportedError, some
from hf_taskvec.models.layout import Layout

_RANK = 32  # what the remedy names; any other serves


@dataclass(frozen=True)
class Obstacle:
    """Changes that an adapter cannot hold as they are.

    Args:
        names (`tuple` of `str`):
            The parameters.
        reason (`str`):
            Why, as the end of a sentence that begins with them.
        remedy (`str`):
            What helps: `"compress"`, `"drop"`, `"exclude"` or `"base"`.
    """

    names: tuple[str, ...]
    reason: str
    remedy: str


def without_zeros(vector: TaskVector) -> TaskVector:
    """A vector without those of its dense changes that are zero everywhere.

    Each is read up to its first element that is not.
    """
    zeros = [name for name, change in vector.items() if not change.is_low_rank and _is_zero(vector, name)]
    if len(zeros) == len(vector):
        raise UnsupportedError("the vector changes nothing, so there is nothing that an adapter could hold.")
    return vector.filter(exclude=zeros) if zeros else vector


def held_as_factors(vector: TaskVector) -> list[str]:
    """The changes that an adapter holds as factors: low-rank ones, and matrices of no higher rank than those can have.

    Compressing leaves such a small matrix (a router, the head of a classifier) as it is: factors would not be smaller.
    """
    highest = max((change.rank for change in vector.values() if change.is_low_rank), default=1)
    return [
        name
        for name, change in vector.items()
        if change.is_low_rank or (len(change.shape) == 2 and min(change.shape) <= highest)
    ]


def factors_of(change: ParameterChange) -> tuple[torch.Tensor, torch.Tensor]:
    """A change's factors in fp64; of a small dense matrix the matrix itself and the identity."""
    if change.is_low_rank:
        return stacked_factors(change.terms)
    matrix = change.dense(torch.float64)
    identity = torch.eye(min(matrix.shape), dtype=matrix.dtype)
    return (matrix, identity) if matrix.shape[0] > matrix.shape[1] else (identity, matrix)


def _is_zero(vector: TaskVector, name: str) -> bool:
    change = vector[name]
    whole = Sum(change.shape, change.terms)
    return not any(bool(whole.rows(start, stop).any()) for start, stop in whole.tiles())


def check_exportable(vector: TaskVector, dense: str, layout: Layout, model: Any) -> None:
    """Refuse a vector that an adapter cannot hold, naming every obstacle and the call that gets past all of them.

    Args:
        vector (`TaskVector`):
            What is to be exported.
        dense (`str`):
            What becomes of changes that are not low-rank: `"refuse"`, `"save"` or `"drop"`.
        layout (`Layout`):
            Of the base; empty if it is not known.
        model (`torch.nn.Module`, *optional*):
            The base on the meta device; `None` if it is not known.

    Raises:
        `UnsupportedError`: If anything stands in the way.
        `MissingFileError`: If nothing does but that the base's architecture is not known.
    """
    low_rank = held_as_factors(vector)
    rest = [name for name in vector if name not in set(low_rank)]
    # What compressing makes low-rank meets the same obstacles afterwards, so they are told now.
    matrices = [name for name in rest if len(vector.shape(name)) == 2 and dense == "refuse"]
    found = list(_tied(vector, vector if dense == "save" else [*low_rank, *matrices], layout))
    excluded = {name for obstacle in found for name in obstacle.names}
    unknown = [n for n in (*low_rank, *matrices) if n not in excluded and (perhaps_conv1d(n) or perhaps_tied(n))]
    if unknown and not layout.shapes:
        why = "held by an adapter in a way that depends on the base's architecture, which is not known"
        found.append(Obstacle(tuple(unknown), why, "base"))
    taken = set(excluded)
    layers = {layout.live(n).removesuffix(".weight"): n for n in (*low_rank, *matrices) if n not in taken}
    if model is not None:
        for names, reason in refused_layers(model, layers):
            found.append(Obstacle(tuple(names), reason, "exclude"))
            taken.update(names)
    if dense == "refuse":
        left = [name for name in matrices if name not in taken]
        others = [name for name in rest if name not in taken and name not in set(left)]
        if left:
            found.append(
                Obstacle(tuple(left), "not low-rank, and a PEFT adapter holds matrices as factors", "compress")
            )
        if others:
            why = "not low-rank and no matrices (norms, biases), which PEFT holds as whole values or not at all"
            found.append(Obstacle(tuple(others), why, "drop"))
    elif not low_rank:
        matrices = [name for name in rest if len(vector.shape(name)) == 2]
        why = "not low-rank, and without a low-rank change there is nothing to adapt"
        found.append(Obstacle(tuple(matrices or rest), why, "compress" if matrices else "drop"))
    if found and {each.remedy for each in found} == {"base"}:
        raise MissingFileError(
            f"{some(unknown)}: how an adapter must hold it depends on the base's architecture, which is not known. "
            "Pass base=."
        )
    if found:
        raise UnsupportedError(_told(found, vector, dense))


def _tied(vector: TaskVector, names: Iterable[str], layout: Layout) -> Iterable[Obstacle]:
    """Embeddings that are heads as well: by the base's layout, or where it is not at hand by what is recorded of it."""
    tied = layout.tied or {a: o for each in vector.provenance.origins if each.base for a, o in each.base.tied}
    # PEFT's ensure_weight_tying does not help: it misses GPT-2's head, and merges the change twice for others.
    if shared := [name for name in names if name in tied.values()]:
        aliases = [alias for alias, owner in tied.items() if owner in shared]
        architecture = layout.architecture or some(sorted(vector.provenance.architectures)) or "the base"
        reason = (
            f"also {some(aliases)} of {architecture}, and an adapter that PEFT does not merge would change one of them "
            "alone (an untied base has two)"
        )
        yield Obstacle(tuple(shared), reason, "exclude")


def _told(found: list[Obstacle], every: TaskVector, dense: str) -> str:
    held = len({name for each in found for name in each.names})
    lines = [
        f"{held} of {len(every)} changes cannot be in a PEFT adapter as they are:",
        "; ".join(f"{some(each.names)} {'is' if len(each.names) == 1 else 'are'} {each.reason}" for each in found)
        + ".",
    ]
    remedies = {each.remedy for each in found}
    excluded = _patterns([name for each in found if each.remedy == "exclude" for name in each.names], every)
    choice = "drop" if "drop" in remedies else dense
    calls = [f"filter(exclude={excluded})"] if excluded else []
    # Below the full rank of the largest: then it is compressed, and smaller ones are factors of that rank as they are.
    dense_matrices = [min(every.shape(name)) for each in found if each.remedy == "compress" for name in each.names]
    rank = max(1, min(_RANK, max(dense_matrices, default=_RANK) - 1))
    calls += [f"compress(rank={rank})"] if dense_matrices else []
    options = [f"--exclude '{pattern}'" for pattern in excluded]
    options += [f"--rank {rank}"] if dense_matrices else []
    given = ["output"]
    if choice != "refuse":
        options.append(f"--dense {choice}")
        given.append(f"dense={choice!r}")
    if "base" in remedies:
        options.append("--base BASE")
        given.append("base=BASE")
    export = f"to_adapter({', '.join(given)})"
    lines.append(
        f"All of this is solved by vector.{'.'.join([*calls, export])}, or by "
        f"`taskvec adapter VECTOR {' '.join(options)} -o OUTPUT`."
    )
    if "drop" in remedies:
        lines.append("dense='drop' leaves norms and biases out, dense='save' stores their whole values.")
    lines.append("A whole model, with every change in it, is written by apply().")
    return " ".join(lines)


def _patterns(names: Collection[str], every: Collection[str]) -> list[str]:
    """Patterns of these names and of no others: one for all layers where all of them are meant.

    >>> _patterns(["h.0.a", "h.1.a", "h.1.b"], ["h.0.a", "h.1.a", "h.0.b", "h.1.b"])
    ['h.*.a', 'h.1.b']
    """
    found: list[str] = []
    for name in names:
        pattern = re.sub(r"\b\d+\b", "*", name)
        exact = set(fnmatch.filter(every, pattern)) <= set(names)
        found.append(pattern if exact else name)
    return list(dict.fromkeys(found))
