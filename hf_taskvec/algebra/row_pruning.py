"""Row pruning: of the change of each MLP's first matrices, only the neurons with the largest norms are kept.

Corollary 2 of Li et al. 2025 (*When is task vector provably effective for model editing?*): only some rows of what
fine-tuning changes in the first matrix of an MLP are large, those of the neurons that learnt something; the others can
be left out without losing the vector's guarantees. A row is an output of the layer, however its weight is stored: a
column of GPT-2's `Conv1D`, which stores it transposed.
"""

import math
import re
from collections.abc import Collection, Mapping

from hf_taskvec.algebra.column_changes import only_columns
from hf_taskvec.algebra.matrix_kinds import is_transposed, place_of, transposed_among
from hf_taskvec.algebra.measures import row_norms
from hf_taskvec.algebra.parameter_change import ParameterChange
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import BadValueError, MissingNameError, some
from hf_taskvec.progress import progress_bar


def pruned_rows(
    changes: Mapping[str, ParameterChange],
    fraction: float,
    include: re.Pattern[str] | None,
    architectures: Collection[str],
    progress: bool | None = None,
) -> dict[str, tuple[tuple[Term, ...], float]]:
    """The terms of each matrix that loses rows, and the share of its squared norm that is lost with them.

    See `TaskVector.prune_rows`; the architectures tell which weights are stored transposed.
    """
    if not 0.0 < fraction <= 1.0:
        raise BadValueError(f"fraction={fraction}: the share of rows to keep must be above 0 and at most 1.")
    chosen = [each for each in changes.values() if len(each.shape) == 2 and _is_included(each.name, include)]
    if not chosen:
        wanted = "is the first of an MLP" if include is None else f"{include.pattern!r} matches"
        raise MissingNameError(
            f"the vector changes no matrix that {wanted} ({some(changes, 2)}), so there is no row to prune. Name the "
            "matrices with include=."
        )
    conv1d = transposed_among(changes, architectures)
    result = {}
    for change in progress_bar(chosen, "Pruning", progress):
        transposed = is_transposed(change.name, change.shape, conv1d)
        squares = row_norms(change.name, change.terms, axis=int(transposed)).square_()
        count = math.ceil(fraction * len(squares))
        # Stable, so that equal norms keep the earlier rows on every machine.
        kept = tuple(sorted(squares.argsort(descending=True, stable=True)[:count].tolist()))
        if count < len(squares):
            total = squares.sum().item()
            lost = 1.0 - squares[list(kept)].sum().item() / total if total else 0.0
            result[change.name] = tuple(_only(term, kept, transposed) for term in change.terms), max(lost, 0.0)
    return result


def is_first_of_mlp(name: str) -> bool:
    """Whether a matrix is the first of an MLP, whose outputs are its neurons.

    >>> is_first_of_mlp("model.layers.0.mlp.fc1.weight"), is_first_of_mlp("model.layers.0.mlp.fc2.weight")
    (True, False)
    """
    place = place_of(name)
    return place is not None and place.kind == "MLP-1"


def _only(term: Term, kept: tuple[int, ...], transposed: bool) -> Term:
    """The change of some outputs alone."""
    return Term(term.weight, only_columns(term.delta, kept) if transposed else term.delta.only_rows(kept))


def _is_included(name: str, include: re.Pattern[str] | None) -> bool:
    return is_first_of_mlp(name) if include is None else bool(include.search(name))
