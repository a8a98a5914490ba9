"""Row pruning: of each MLP matrix's change, only the rows with the largest norms are kept.

Corollary 2 of Li et al. 2025 (*When is task vector provably effective for model editing?*): only some rows of what
fine-tuning changes in an MLP are large, those of the neurons that learnt something; the others can be left out without
losing the vector's guarantees. A row is a row of the stored matrix: one output of a `Linear` layer, one input of GPT-2's
`Conv1D`, which stores its weight transposed.
"""

import math
import re

import torch

from hf_taskvec.algebra.deltas import Delta, Dense, Difference, LowRank, Rows
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.sources import InMemory, RowsOf
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError, some

#: the matrices of an MLP: `mlp.fc1`, OPT's bare `fc1`, the experts of a mixture
MLP = re.compile(r"(\.mlp\.|\.fc[12]\.|\.experts\.).*weight$")


def prune_rows(vector: TaskVector, fraction: float, include: re.Pattern[str] = MLP) -> TaskVector:
    """The vector with only the share `fraction` of the rows kept in each MLP matrix: those whose change is largest.

    Biases and all other parameters stay as they are. Low-rank changes stay low-rank: the left factor's rows are set to
    zero, so the result can still be exported as an adapter. `discarded` tells the share of the squared norm that was
    lost, for each matrix.

    Args:
        vector (`TaskVector`): any vector.
        fraction (`float`): how many of the rows to keep, above 0 and at most 1; at least one row is kept.
        include (`re.Pattern`): which matrices; by default the MLPs'.

    >>> v = TaskVector.from_tensors({"h.mlp.fc1.weight": torch.diag(torch.tensor([1.0, 3.0, 2.0]))})
    >>> prune_rows(v, 0.5).dense("h.mlp.fc1.weight").diagonal()
    tensor([0., 3., 2.])
    """
    if not 0.0 < fraction <= 1.0:
        raise BadValueError(f"fraction={fraction}: the share of rows to keep must be above 0 and at most 1.")
    chosen = [name for name in vector if include.search(name) and len(vector.shape(name)) == 2]
    if not chosen:
        raise MissingNameError(
            f"the vector changes no matrix that {include.pattern!r} matches ({some(vector, 2)}), so there is no row to "
            "prune. Name the matrices with include=."
        )
    terms = {name: vector[name] for name in vector}
    discarded = dict(vector.discarded)
    for name in chosen:
        squares = _squared_norms(name, vector)
        count = math.ceil(fraction * len(squares))
        # Stable, so that equal norms keep the earlier rows on every machine.
        kept = tuple(sorted(squares.argsort(descending=True, stable=True)[:count].tolist()))
        if count < len(squares):
            terms[name] = tuple(Term(term.weight, _keep(term.delta, kept)) for term in vector[name])
            total = squares.sum().item()
            lost = 1.0 - squares[list(kept)].sum().item() / total if total else 0.0
            discarded[name] = 1.0 - (1.0 - discarded.get(name, 0.0)) * (1.0 - max(lost, 0.0))
    return TaskVector(terms, vector.provenance.through("prune_rows", fraction=fraction), discarded)


def _squared_norms(name: str, vector: TaskVector) -> torch.Tensor:
    change = Sum(vector.shape(name), vector[name])
    squares = torch.cat([change.rows(start, stop).square().sum(dim=1) for start, stop in change.tiles()])
    if not squares.isfinite().all():
        raise not_finite(name)
    return squares


def _keep(delta: Delta, kept: tuple[int, ...]) -> Delta:
    """The change to the rows `kept` alone."""
    rows = delta.shape[0]
    if isinstance(delta, LowRank):
        left = delta.left.read()
        only = torch.zeros_like(left)
        only[list(kept)] = left[list(kept)]
        return LowRank(InMemory(only), delta.right, delta.scaling)
    if isinstance(delta, Difference):
        return Rows(kept, Difference(RowsOf(delta.base, kept), RowsOf(delta.tuned, kept)), rows)
    if isinstance(delta, Dense):
        return Rows(kept, Dense(tuple(RowsOf(part, kept) for part in delta.tensors)), rows)
    # DoRA, or rows already: there is nothing to be gained from staying lazy.
    change = torch.zeros(delta.shape, dtype=torch.float64)
    delta.add_rows(change, 0, rows, 1.0)
    return Rows(kept, Dense((InMemory(change[list(kept)]),)), rows)
