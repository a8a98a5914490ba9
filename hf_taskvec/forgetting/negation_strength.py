"""How strong a negation has to be: the smallest λ at which a text's loss reaches a level."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.models.model_facts import vocabulary_size
from hf_taskvec.progress import progress_line
from hf_taskvec.training.objectives import block_losses

if TYPE_CHECKING:
    import datasets

# Where the search begins and ends, and how exact it is: a repair or a verdict tells no smaller steps apart.
_FIRST, _LARGEST, _SHARE = 0.25, 8.0, 0.05
# A mean over so many blocks is exact enough, however long the book.
_BLOCKS = 32


def chance_level(model: Any) -> float:
    """The loss of a model that knows nothing, not even the language: the logarithm of its number of tokens."""
    return math.log(vocabulary_size(model.config))


def mean_block_loss(model: Any, blocks: "datasets.Dataset", batch_size: int = 8) -> float:
    """The mean loss of a model per token, on some blocks at equal distances: of several books, some of each."""
    count = min(_BLOCKS, len(blocks))
    read = blocks.select([number * len(blocks) // count for number in range(count)])
    return float(block_losses(model, read, batch_size=batch_size, progress=False).double().mean())


def strength_for(
    model: Any,
    edit_at: Callable[[float], TaskVector],
    blocks: "datasets.Dataset",
    level: float,
    *,
    batch_size: int = 8,
    progress: bool | None = None,
) -> float:
    """The smallest strength, within 5 %, at which an edited model's loss on a text reaches a level.

    The strength is doubled until the level is reached, then halved in between: about eight passes over at most 32
    blocks of the text. In every process of a launch the answer is the same.

    Args:
        model (`PreTrainedModel`):
            The model; it is as before afterwards, bit for bit.
        edit_at (`Callable`):
            From a strength above 0 to the edit, such as `lambda strength: -strength * vector`.
        blocks (`datasets.Dataset`):
            Packed blocks of the text.
        level (`float`):
            The loss to be reached, in nats per token.
        batch_size (`int`, *optional*, defaults to 8):
            How many blocks are read at once.
        progress (`bool`, *optional*):
            Tell what is found; by default on a terminal only.

    Returns:
        `float`: The strength.

    Raises:
        `BadValueError`: If the model is there already without the edit, or no strength gets there.

    Example:
        >>> strength_for(model, lambda s: -s * vector, blocks, chance_level(model))  # doctest: +SKIP
        1.25

    """

    def reaches(strength: float) -> bool:
        with edit_at(strength).applied_to(model):
            loss = mean_block_loss(model, blocks, batch_size)
        progress_line(f"strength {strength:.3g}: the loss of the text to forget is {loss:.2f}", progress)
        # Weights that overflow give no loss at all: that is beyond any level.
        return not math.isfinite(loss) or loss >= level

    if (before := mean_block_loss(model, blocks, batch_size)) >= level:
        raise BadValueError(
            f"the untouched model's loss on the text is {before:.2f}, and {level:.2f} is what never having seen it "
            "means: there is nothing to forget."
        )
    low, high = 0.0, _FIRST
    while not reaches(high):
        low, high = high, 2 * high
        if high > _LARGEST:
            raise BadValueError(
                f"not even {low:g} times the vector brings the loss of the text to forget to {level:.2f}: the vector "
                "has little to do with that text. Was it made from this book, on this architecture's base?"
            )
    while high - low > _SHARE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
