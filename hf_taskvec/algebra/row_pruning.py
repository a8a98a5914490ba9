"""Row pruning: of each MLP matrix's change, only the rows with the largest norms are kept.

Corollary 2 of Li et al. 2025 (*When is task vector provably effective for model editing?*): only some rows of what
fine-tuning changes in an MLP are large, those of the neurons that learnt something; the others can be left out without
losing the vector's guarantees. A row is a row of the stored matrix: one output of a `Linear` layer, one input of
GPT-2's `Conv1D`, which stores its weight transposed.
"""

import math
import re
from collections.abc import Mapping

import torch

from hf_taskvec.algebra.parameter_change import ParameterChange
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.subnormals import kept_subnormals
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.errors import BadValueError, MissingNameError, some
from hf_taskvec.progress import progress_bar

#: the matrices of an MLP: `mlp.fc1`, OPT's bare `fc1`, the experts of a mixture
MLP = re.compile(r"(\.mlp\.|\.fc[12]\.|\.experts\.).*weight$")


@kept_subnormals()
def pruned_rows(
    changes: Mapping[str, ParameterChange], fraction: float, include: re.Pattern[str], progress: bool | None = None
) -> dict[str, tuple[tuple[Term, ...], float]]:
    """The terms of each matrix that loses rows, and the share of its squared norm that is lost with them.

    See `TaskVector.prune_rows`.
    """
    if not 0.0 < fraction <= 1.0:
        raise BadValueError(f"fraction={fraction}: the share of rows to keep must be above 0 and at most 1.")
    chosen = [each for name, each in changes.items() if include.search(name) and len(each.shape) == 2]
    if not chosen:
        raise MissingNameError(
            f"the vector changes no matrix that {include.pattern!r} matches ({some(changes, 2)}), so there is no row "
            "to prune. Name the matrices with include=."
        )
    result = {}
    for change in progress_bar(chosen, "Pruning", progress):
        squares = _squared_norms(change)
        count = math.ceil(fraction * len(squares))
        # Stable, so that equal norms keep the earlier rows on every machine.
        kept = tuple(sorted(squares.argsort(descending=True, stable=True)[:count].tolist()))
        if count < len(squares):
            total = squares.sum().item()
            lost = 1.0 - squares[list(kept)].sum().item() / total if total else 0.0
            terms = tuple(Term(term.weight, term.delta.only_rows(kept)) for term in change.terms)
            result[change.name] = terms, max(lost, 0.0)
    return result


def _squared_norms(change: ParameterChange) -> torch.Tensor:
    whole = Sum(change.shape, change.terms)
    squares = torch.cat([whole.rows(start, stop).square().sum(dim=1) for start, stop in whole.tiles()])
    if not squares.isfinite().all():
        raise not_finite(change.name)
    return squares
