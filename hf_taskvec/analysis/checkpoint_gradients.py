"""The gradients that the epochs of one fine-tune began with: figure 3 of Zhou et al. (2025).

What a checkpoint moved tells them only under gradient descent of a constant learning rate (`gradient_alignment`):
a schedule and AdamW give the updates other lengths, AdamW other directions too. Here they are measured.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.argument_checks import check_batch_size, check_model, check_vectors
from hf_taskvec.analysis.token_rows import Data
from hf_taskvec.errors import BadValueError
from hf_taskvec.figures import Plottable
from hf_taskvec.progress import progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class EpochGradients(Plottable):
    """Epoch by epoch, the gradient where the epoch began; made by `epoch_gradients`.

    Args:
        norms (`tuple[float, ...]`):
            ‖∇L‖ at the base, then after each epoch but the last.
        with_first (`tuple[float, ...]`):
            The cosine of each gradient with the one at the base (figure 3b).

    """

    norms: tuple[float, ...]
    with_first: tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Each norm over their sum (figure 3a)."""
        total = sum(self.norms)
        return tuple(norm / total for norm in self.norms)

    def figure(self) -> "Figure":
        """Shares and cosines by epoch.

        Returns:
            `matplotlib.figure.Figure`: The figure.

        Raises:
            `UnsupportedError`: If matplotlib is not installed.

        """
        from hf_taskvec.analysis.result_figures import epoch_gradients_figure

        return epoch_gradients_figure(self)


def epoch_gradients(
    model: torch.nn.Module,
    epochs: Sequence[TaskVector],
    data: Data,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    tokenizer: Any = None,
    progress: bool | None = None,
) -> EpochGradients:
    """How long each epoch's gradient is, and how far it points along the first epoch's.

    K vectors give K gradients of the full data, at θ_0 and after each epoch but the last. Two gradients are held at a
    time, beside the model.

    Args:
        model (`torch.nn.Module`):
            The live base θ_0. It is edited in place, and is as before, bit for bit, when this returns or raises.
        epochs (`Sequence` of `TaskVector`):
            The task vectors after each epoch, in order, all from θ_0.
        data (`datasets.Dataset`, sequences of token ids, or texts):
            The text of the fine-tune.
        batch_size (`int`, *optional*, defaults to 8):
            Rows in a pass.
        max_length (`int`, *optional*):
            Cut rows to this many tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For texts.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `EpochGradients`: Norms and cosines by epoch.

    Raises:
        `BadValueError`: If there is no epoch, or a gradient is zero.
        `MismatchError`: If a vector is of another model.

    Example:
        >>> found = epoch_gradients(model, [after_1, after_2, after_3], texts, tokenizer=tokenizer)  # doctest: +SKIP
        >>> found.shares, found.with_first  # doctest: +SKIP

    """
    check_model(model)
    check_batch_size(batch_size)
    if isinstance(epochs, TaskVector) or not isinstance(epochs, Sequence):
        raise BadValueError("give a list of task vectors, one for each epoch, in order; [one] for one.")
    if not epochs:
        raise BadValueError("epoch_gradients() needs the task vector of one epoch at least.")
    check_vectors(*epochs)
    options: dict[str, Any] = {"batch_size": batch_size, "max_length": max_length, "tokenizer": tokenizer}
    norms, cosines = [], []
    first = None
    for epoch, vector in enumerate(progress_bar([None, *epochs[:-1]], "Gradients", progress), 1):
        with vector.applied_to(model) if vector is not None else nullcontext():
            gradient = TaskVector.from_gradient(model, data, 1.0, name=f"epoch_{epoch}", progress=False, **options)
        first = first or gradient
        norms.append(gradient.norm())
        cosines.append(1.0 if gradient is first else gradient.cosine(first))
    return EpochGradients(tuple(norms), tuple(cosines))
