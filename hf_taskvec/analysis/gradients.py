"""Task vectors and gradients (Zhou et al. 2025): one epoch of full-batch gradient descent gives `τ = −η ∇L(θ_0)`.

Gradients also tell how much each parameter matters for a text.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.deltas import Dense
from hf_taskvec.algebra.expressions import check_label
from hf_taskvec.algebra.provenance import Origin, Provenance
from hf_taskvec.algebra.rounding import FLOATS
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.algebra.vector_constructors import Model
from hf_taskvec.analysis.argument_checks import check_batch_size, check_model, check_vectors, is_finite_number
from hf_taskvec.analysis.cosines import check_alike
from hf_taskvec.analysis.token_batches import batches, summed_loss
from hf_taskvec.analysis.token_rows import Data, check_predictable, check_rows, token_rows
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean, some
from hf_taskvec.extraction.from_any import open_vector
from hf_taskvec.figures import Plottable
from hf_taskvec.models.folder_contents import kind_of
from hf_taskvec.models.layout import is_peft_model, layout_of_model
from hf_taskvec.models.live_model import live_checkpoint, live_weights
from hf_taskvec.models.model_facts import evaluation_mode
from hf_taskvec.progress import progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def from_gradient(
    model: torch.nn.Module,
    data: Data,
    learning_rate: float,
    *,
    name: str = "gradient",
    batch_size: int = 8,
    max_length: int | None = None,
    tokenizer: Any = None,
    progress: bool | None = None,
) -> TaskVector:
    """See `TaskVector.from_gradient`."""
    if not is_finite_number(learning_rate) or learning_rate <= 0:
        raise BadValueError(f"learning_rate={learning_rate!r}: the learning rate must be a positive number.")
    check_model(model)
    check_batch_size(batch_size)
    rows = token_rows(data, tokenizer, max_length)
    check_rows(rows, model)
    check_predictable(rows)
    parameters = _trained(model)
    state = processes()
    own = rows[state.process_index :: state.num_processes]
    with evaluation_mode(model), torch.inference_mode(False), torch.enable_grad():
        totals = {n: torch.zeros_like(p, dtype=_wide(p), requires_grad=False) for n, p in parameters.items()}
        count = torch.zeros((), dtype=torch.float64)
        for batch in progress_bar(list(batches(own, batch_size)), "Gradient", progress):
            loss, tokens = summed_loss(model, batch)
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for total, gradient in zip(totals.values(), gradients, strict=True):
                if gradient is not None:
                    total += gradient
            count += tokens
    count = state.all_reduce(count)
    totals = {n: state.all_reduce(total) for n, total in totals.items()}
    changed = {n: total.cpu() / count.item() for n, total in totals.items() if bool(total.any())}
    _check_finite(changed)
    if not changed:
        raise BadValueError("the gradient is zero everywhere, so the vector would be zero.")
    how = f"one step of full-batch gradient descent, lr={learning_rate:g}, {int(count.item())} tokens"
    base = live_checkpoint(model)
    origin = Origin(name, how, replace(base.record(), sha256=base.full_digest))
    terms = {n: [Term(-float(learning_rate), Dense((InMemory(gradient),)))] for n, gradient in changed.items()}
    return TaskVector(terms, Provenance.of(origin))


#: what is averaged over rows of text
ImportanceMeasure = Literal["absolute", "squared"]


def gradient_importance(
    model: torch.nn.Module,
    data: Data,
    *,
    measure: ImportanceMeasure = "absolute",
    name: str = "importance",
    max_length: int | None = None,
    tokenizer: Any = None,
    progress: bool | None = None,
) -> TaskVector:
    """How much every element of a model's parameters matters for a text: the size of its gradient, on average.

    One number, 0 or more, for each element, in the form of a task vector: it can be saved, loaded, scaled and filtered,
    and the merging rule `importance` takes two of them, `combine([v, forget, keep], "importance")`. By itself it is no
    change that a model should get.

    Each row gives one gradient, that of its next tokens' mean loss, without dropout, so there are as many backward
    passes as rows; rows of one token predict nothing and do not count. What is averaged over the rows is added up in
    fp32 or better. Beside the model this takes the memory of one gradient and of the result. Under `accelerate launch`
    the processes share the rows. The model and its `.grad` stay as they are.

    Args:
        model (`torch.nn.Module`):
            A live causal language model; parameters that require no gradient are left out.
        data (`datasets.Dataset`, sequences of token ids, or texts):
            A data set needs a column `input_ids`.
        measure (`str`, *optional*, defaults to `"absolute"`):
            `"absolute"` averages the gradients' magnitudes, `"squared"` their squares: the diagonal of the empirical
            Fisher information, with a row as one observation.
        name (`str`, *optional*, defaults to `"importance"`):
            The label in expressions, a name such as a variable has.
        max_length (`int`, *optional*):
            Cut rows to this many tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For texts.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `TaskVector`: The importances by canonical parameter names, a tied weight once, also those that are all 0. Its
            record names the model, but not as a base: a vector that it weighs keeps its own.

    Raises:
        `MissingNameError`: If there is no such measure.
        `BadValueError`: If all gradients are zero or one is not finite, or the data cannot be predicted.
        `UnsupportedError`: If the model is wrapped by PEFT, or holds fused experts.
    """
    if measure not in get_args(ImportanceMeasure):
        known = get_args(ImportanceMeasure)
        raise MissingNameError(
            f"no measure={measure!r}.{did_you_mean(str(measure), known)} It is one of {', '.join(known)}."
        )
    check_label(name)
    check_model(model)
    rows = token_rows(data, tokenizer, max_length)
    check_rows(rows, model)
    check_predictable(rows)
    rows = [row for row in rows if len(row) > 1]
    parameters = _trained(model)
    state = processes()
    own = rows[state.process_index :: state.num_processes]
    with evaluation_mode(model), torch.inference_mode(False), torch.enable_grad():
        totals = {n: torch.zeros_like(p, dtype=_wide(p), requires_grad=False) for n, p in parameters.items()}
        for batch in progress_bar(list(batches(own, 1)), "Importance", progress):
            loss, tokens = summed_loss(model, batch)
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for total, gradient in zip(totals.values(), gradients, strict=True):
                if gradient is not None:
                    # Divided here and not before: the gradient of a mean would vanish in fp16 more often.
                    mean = gradient.to(total.dtype) / tokens
                    total += mean.abs_() if measure == "absolute" else mean.square_()
    importances = {n: state.all_reduce(total).cpu().div_(len(rows)) for n, total in totals.items()}
    _check_finite(importances)
    if not any(bool(each.any()) for each in importances.values()):
        raise BadValueError("the gradient is zero everywhere, so nothing has an importance for this text.")
    how = f"mean {measure} gradient over {len(rows)} rows of text, at {live_checkpoint(model).record()}"
    terms = {n: [Term(1.0, Dense((InMemory(each),)))] for n, each in importances.items()}
    return TaskVector(terms, Provenance.of(Origin(name, how)))


def _check_finite(gradients: Mapping[str, torch.Tensor]) -> None:
    broken = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    if broken:
        raise BadValueError(
            f"{some(broken)}: the gradient is NaN or infinite. Use a wider dtype, or check the weights."
        )


def _wide(parameter: torch.Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training would change, under canonical names."""
    if is_peft_model(model):
        raise UnsupportedError("the model is wrapped by PEFT: train the adapter, or call merge_and_unload() first.")
    restructured = layout_of_model(model).restructured
    if restructured:
        raise UnsupportedError(
            f"{some(sorted(restructured))}: transformers stores such parameters (fused experts, for example) in "
            "another form than the live model has, so their gradient has no name in a task vector."
        )
    weights = live_weights(model)
    parameters = {name: weight.parameter for name, weight in weights.items()}
    found = {name: p for name, p in parameters.items() if p is not None and p.requires_grad}
    if not found:
        raise BadValueError("no parameter of the model requires a gradient. Call model.requires_grad_(True) first.")
    strange = [name for name, p in found.items() if p.dtype not in FLOATS or p.is_meta]
    if strange:
        raise UnsupportedError(
            f"{some(strange)}: quantised or offloaded weights have no gradient here. Load the model whole."
        )
    return found


@dataclass(frozen=True)
class GradientAlignment(Plottable):
    """Epoch by epoch: how the updates and the vectors point; made by `gradient_alignment`.

    Args:
        update_shares (`tuple[float, ...]`):
            ‖update‖ over the sum of all epochs'. Figure 3 of the paper is about gradients, which `epoch_gradients`
            measures: under full-batch gradient descent of a constant learning rate that is the same; a schedule, or
            AdamW, which evens out their lengths, makes it another.
        with_first (`tuple[float, ...]`):
            The cosine of each epoch's update with the first's.
        update_with_gradient (`tuple[float, ...]`, *optional*):
            The cosine of each update with the negative gradient at the base; None if no gradient was given.
        vector_with_gradient (`tuple[float, ...]`, *optional*):
            The same for the vector after each epoch.

    """

    update_shares: tuple[float, ...]
    with_first: tuple[float, ...]
    update_with_gradient: tuple[float, ...] | None
    vector_with_gradient: tuple[float, ...] | None

    def figure(self) -> "Figure":
        """Shares and cosines by epoch.

        Returns:
            `matplotlib.figure.Figure`: The figure.

        Raises:
            `UnsupportedError`: If matplotlib is not installed.

        """
        from hf_taskvec.analysis.result_figures import alignment_figure

        return alignment_figure(self)


def gradient_alignment(
    epochs: Sequence[TaskVector | Model],
    gradient: TaskVector | None = None,
    *,
    base: Model | None = None,
    progress: bool | None = None,
) -> GradientAlignment:
    """How far fine-tuning is one gradient step: each epoch's share and direction, beside the gradient at the start.

    One pass over all files. The update of an epoch is the difference of two checkpoints; under SGD it is −η times the
    gradients that the epoch saw, under Adam only about along them.

    Args:
        epochs (`Sequence` of `TaskVector`, `str`, `Path` or `torch.nn.Module`):
            What each epoch ended with, in order: task vectors from one base, or where they are saved (folders, Hub
            ids); or models (Hub ids, folders, live), with `base`.
        gradient (`TaskVector`, *optional*):
            The vector of a gradient step at the base (`TaskVector.from_gradient`); it points along the negative
            gradient.
        base (`str`, `Path` or `torch.nn.Module`, *optional*):
            The model that fine-tuning started from.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `GradientAlignment`: Shares and cosines by epoch.

    Raises:
        `BadValueError`: If an epoch changed nothing, or a model is given without `base`.
        `MismatchError`: If the epochs or the gradient are of different models.

    Example:
        >>> import torch
        >>> first = TaskVector.from_tensors({"w": torch.tensor([3.0, 0.0])})
        >>> second = TaskVector.from_tensors({"w": torch.tensor([3.0, 1.0])})
        >>> found = gradient_alignment([first, second])
        >>> found.update_shares, found.with_first
        ((0.75, 0.25), (1.0, 0.0))

    """
    if isinstance(epochs, TaskVector | str | Path | torch.nn.Module):
        raise BadValueError("give a list of epochs, in order; [one] for one.")
    if not epochs:
        raise BadValueError("gradient_alignment() needs the vector or model of one epoch at least.")
    vectors = []
    stored = base if isinstance(base, str | Path) else None
    for number, each in enumerate(epochs, 1):
        if isinstance(each, TaskVector):
            vectors.append(each)
        elif isinstance(each, str | Path) and kind_of(each, stored)[0] != "model":
            vectors.append(open_vector(each, stored, name=f"epoch_{number}"))
        elif base is None:
            raise BadValueError("epochs given as models need base=, the model that fine-tuning started from.")
        else:
            vectors.append(TaskVector.from_finetuned(base, each, name=f"epoch_{number}"))
    updates = [vectors[0], *(later - earlier for earlier, later in itertools.pairwise(vectors))]
    check_alike({f"epoch {number}": vector for number, vector in enumerate(vectors, 1)})
    named = {f"epoch {number}": update for number, update in enumerate(updates, 1)}
    count = len(updates)
    if gradient is not None:
        check_vectors(gradient)
        # The first vector is the first update. The others are measured themselves: as sums of long updates that lead
        # back to the base they would be all rounding.
        named |= {f"all up to epoch {number}": vector for number, vector in enumerate(vectors[1:], 2)}
        named["the gradient"] = gradient
    check_alike(named)
    gram = torch.zeros(len(named), len(named), dtype=torch.float64, device="cpu")
    parameters = list(dict.fromkeys(name for vector in named.values() for name in vector))
    for name in progress_bar(parameters, "Aligning", progress):
        owners = torch.tensor([i for i, vector in enumerate(named.values()) if name in vector], device="cpu")
        gram[owners[:, None], owners] += measures.gram(name, [v[name].terms for v in named.values() if name in v])
    norms = gram.diagonal().clamp_min(0).sqrt()
    _check_directions(norms.tolist(), count)
    cosines = (gram / (norms[:, None] * norms)).clamp(-1, 1).tolist()
    shares = norms[:count] / norms[:count].sum()
    against, so_far = None, None
    if gradient is not None:
        against = tuple(cosines[-1][:count])
        so_far = (cosines[-1][0], *cosines[-1][count:-1])
    return GradientAlignment(tuple(shares.tolist()), tuple(cosines[0][:count]), against, so_far)


def _check_directions(norms: list[float], count: int) -> None:
    """Refuse what points nowhere: of `count` updates, then of the vectors from the second on, then of the gradient."""
    if 0 not in norms:
        return
    first = norms.index(0)
    if first < count:
        raise BadValueError(f"epoch {first + 1} changed nothing: its vector equals the one before.")
    if first < len(norms) - 1:
        raise BadValueError(
            f"after epoch {first - count + 2} the weights are those of the base again, so the vector has no direction "
            "to compare with the gradient. Leave out the gradient, or that epoch and the later ones."
        )
    raise BadValueError("the gradient is zero, so it has no direction. Give one that TaskVector.from_gradient made.")
