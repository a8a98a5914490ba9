"""A new book: what it has in common with the others, the λ that follow by Theorem 3, and the models that are compared.

Theorem 3 wants the new task's correlation γ_i with each task that has a vector. Eq. (11) measures it between two
fine-tuned models, and of the new book there is none. In its place stands one step of gradient descent on a sample of
its text, as long as lowers the sample's loss most: one epoch of fine-tuning is about such a step (Zhou et al. 2025).
Half of the sample makes the step, the other half is what the models are compared on.

Such a step is noisy, which makes every correlation with it smaller than that with a fine-tune would be. By how much,
the known books tell: of each of them there are both. So γ̂ is divided by the mean correlation of a known book's step
with its own fine-tune, and cut off at 1. (The literal form is left as eq. (11) has it.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

import datasets
import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis import EditedModel, correlation_matrix, recommend_scales, task_correlation
from hf_taskvec.analysis.scale_theorems import TransferScales
from hf_taskvec.analysis.token_batches import mean_loss, row_losses
from hf_taskvec.analysis.token_rows import TokenRows
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.statistics import Bootstrap
from hf_taskvec.experiments.transfer.transfer_config import TransferConfig
from hf_taskvec.experiments.transfer.transfer_inputs import BookRows
from hf_taskvec.experiments.transfer.transfer_results import THEORY, Compared, Correlations, NewBook
from hf_taskvec.training import MergeObjective, fit_scales

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The new book in a matrix of correlations; no book is called so.
_NEW = "\0new"
# Lengths of the gradient step that are tried, in mean lengths of the vectors.
_LENGTHS = [2.0**-power for power in range(8)]
# Correlations below this are noise, and nothing can be divided by them.
_LEAST_SHARE = 0.02


@dataclass(frozen=True)
class Case:
    """One new book, and all that is known.

    Args:
        model (`PreTrainedModel`):
            θ_0, live; left as it is.
        name (`str`):
            The new book's.
        vectors (`dict`):
            Of the other books, by their names.
        rows (`dict`):
            The text of all of them, by name.
        config (`TransferConfig`):
            The settings.
        shown (`dict`):
            How much a gradient step on each of the other books shows of its fine-tune, by name: `step_shows`.
        own (`TaskVector`, *optional*):
            The new book's own vector, if there is one: nothing is combined from it, but it shows what fine-tuning
            would reach.
    """

    model: "PreTrainedModel"
    name: str
    vectors: Mapping[str, TaskVector]
    rows: Mapping[str, BookRows]
    config: TransferConfig
    shown: Mapping[str, float]
    own: TaskVector | None = None

    @property
    def sample(self) -> TokenRows:
        """What is looked at of the new book."""
        return self.rows[self.name].sample

    @property
    def share(self) -> float:
        """What γ̂ with a gradient step is divided by."""
        return fmean(self.shown[name] for name in self.vectors)


def reach(case: Case) -> tuple[NewBook, TaskVector | None]:
    """Compare all models on the held-out text of the new book.

    Args:
        case (`Case`):
            The new book.

    Returns:
        `NewBook` and `TaskVector`: What is reported, and the combination by theory, relative to θ_0, if there is one.
    """
    length = fmean(vector.norm() for vector in case.vectors.values())
    step = gradient_step(case.model, case.sample[::2], length)
    stand_ins = {"relative": (step, True, case.share), "literal": (step, False, 1.0)}
    if case.own is not None:
        stand_ins["own"] = (case.own, True, 1.0)
    correlations, transfers = [], {}
    for form, (stand_in, relative, share) in stand_ins.items():
        found, transfers[form] = theory(case, stand_in, relative, share)
        correlations.append(found)
        if form == "relative" and transfers[form] is not None:
            transfers["whole"] = scales_of(found, case.config, 1.0)

    names = list(case.vectors)
    candidates: dict[str, dict[str, float]] = {"θ_0": {}}
    candidates |= {f"{name} alone": {name: 1.0} for name in names}
    candidates["the mean"] = {name: 1 / len(names) for name in names}
    titles = {"relative": THEORY, "whole": f"{THEORY}, margin 1", "literal": f"{THEORY}, literal γ̂"}
    titles["own"] = f"{THEORY}, γ̂ from its fine-tune"
    for form, transfer in transfers.items():
        if transfer is not None and transfer.scales:
            candidates[titles[form]] = dict(zip(names, transfer.scales, strict=True))
    if case.config.fit_steps:
        candidates["learned λ"] = fitted(case)
    losses = {title: losses_of(case, combined(case.vectors, scales)) for title, scales in candidates.items()}
    chosen = best_single(case)
    boot = Bootstrap(len(losses["θ_0"]), seed=case.config.seed)
    if case.own is not None:
        candidates["fine-tuned on it"] = {}
        losses["fine-tuned on it"] = losses_of(case, case.own)
    compared = tuple(
        Compared(
            title,
            candidates[title],
            boot.mean(each),
            boot.difference(losses["θ_0"], each),
            boot.difference(losses[f"{chosen} alone"], each),
        )
        for title, each in losses.items()
    )
    relative_scales = candidates.get(THEORY)
    vector = None if relative_scales is None else combined(case.vectors, relative_scales)
    return NewBook(case.name, chosen, tuple(correlations), compared), vector


def gradient_step(model: "PreTrainedModel", rows: TokenRows, length: float) -> TaskVector:
    """One step of gradient descent on some rows, as long as lowers their loss most: at most `length`."""
    step = TaskVector.from_gradient(model, rows, 1.0, name="new", batch_size=8, progress=False)
    unit, tried = length / step.norm(), {}
    for part in _LENGTHS:
        with step.applied_to(model, part * unit):
            tried[part] = mean_loss(model, rows, 8)
    return min(tried, key=lambda part: tried[part]) * unit * step


def step_shows(model: "PreTrainedModel", vector: TaskVector, rows: BookRows, most: int) -> float:
    """The correlation of a known book's fine-tune with a gradient step on it, on text that neither was trained on.

    Args:
        model (`PreTrainedModel`):
            θ_0, live; left as it is.
        vector (`TaskVector`):
            The book's.
        rows (`BookRows`):
            The book's text.
        most (`int`):
            At most so many rows are used.

    Returns:
        `float`: α̂, relative to θ_0.
    """
    unseen = rows.test[:most]
    step = gradient_step(model, unseen[::2], vector.norm())
    data = unseen[1::2]
    pair = EditedModel(model, step), EditedModel(model, vector)
    return task_correlation(*pair, data, data, relative_to=model, pooling="sample", progress=False).value


def theory(
    case: Case, stand_in: TaskVector, relative: bool, share: float
) -> tuple[Correlations, TransferScales | None]:
    """γ̂ of the new book with the others and α̂ between these, what Theorem 3 says of them, and its λ."""
    models = {name: EditedModel(case.model, vector) for name, vector in case.vectors.items()}
    models[_NEW] = EditedModel(case.model, stand_in)
    data = {name: case.rows[name].test[: case.config.rows // 2] for name in case.vectors} | {_NEW: case.sample[1::2]}
    found = correlation_matrix(
        models, data, relative_to=case.model if relative else None, pooling="sample", progress=False
    )
    names, config = list(case.vectors), case.config
    between = {f"{one}, {other}": found[one, other] for one, other in combinations(names, 2)}
    measured = Correlations(
        "relative" if relative else "literal",
        "its fine-tune" if stand_in is case.own else "a gradient step",
        {name: found[_NEW, name] for name in names},
        share,
        between,
        "",
    )
    if share < _LEAST_SHARE:
        why = f"no λ: a gradient step shows too little of a fine-tune here (α̂ = {share:.3f} for the known books)"
        return replace(measured, why=why), None
    try:
        transfer = scales_of(measured, config, config.margin)
    except BadValueError as error:
        return replace(measured, why=f"no λ: {error}"), None
    return replace(measured, why=f"{transfer.verdict}: {transfer.why}"), transfer


def scales_of(measured: Correlations, config: TransferConfig, margin: float) -> TransferScales:
    """The λ of Theorem 3 for these correlations."""
    found = recommend_scales(
        gammas=list(measured.corrected.values()),
        between=list(measured.between.values()),
        margin=margin,
        beta=config.beta,
        c=config.slack,
    ).transfer
    assert found is not None
    return found


def fitted(case: Case) -> dict[str, float]:
    """One λ for each vector, learned by gradient descent on the sample: what text can tell without the theorem."""
    blocks = datasets.Dataset.from_dict({"input_ids": case.sample})
    found = fit_scales(
        case.model,
        case.vectors,
        MergeObjective({case.name: blocks}),
        by="vector",
        steps=case.config.fit_steps,
        seed=case.config.seed,
        progress=False,
    )
    return {name: table[next(iter(table))] for name, table in found.coefficients.items()}


def best_single(case: Case) -> str:
    """The book whose vector lowers the loss on the sample most."""
    tried = {}
    for name, vector in case.vectors.items():
        with vector.applied_to(case.model):
            tried[name] = mean_loss(case.model, case.sample, 8)
    return min(tried, key=lambda name: tried[name])


def combined(vectors: Mapping[str, TaskVector], scales: Mapping[str, float]) -> TaskVector | None:
    """Σ λ_i τ_i; None for nothing."""
    terms: Sequence[TaskVector] = [scale * vectors[name] for name, scale in scales.items() if scale]
    if not terms:
        return None
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def losses_of(case: Case, vector: TaskVector | None) -> torch.Tensor:
    """The loss of each row of the new book's held-out text, with a vector applied."""
    rows: Any = case.rows[case.name].test
    if vector is None:
        return row_losses(case.model, rows, 8)
    with vector.applied_to(case.model):
        return row_losses(case.model, rows, 8)
