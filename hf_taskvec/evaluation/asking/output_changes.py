"""How far an edit moves a model's output: the size for noise that shall damage it as much."""

import math
from collections.abc import Sequence
from typing import Any

from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage, tokenize_passages
from hf_taskvec.evaluation.asking.generation import Generator
from hf_taskvec.evaluation.asking.scalable_edits import ScalableEdit, starting_at_zero
from hf_taskvec.evaluation.texts.passages import Passage
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.models.model_facts import rows_per_pass
from hf_taskvec.progress import progress_bar


def output_change(
    model: Any,
    edit: ScalableEdit,
    scale: float,
    passages: Sequence[Passage],
    *,
    protocol: Protocol,
    tokenizer: Any,
    progress: bool | None = None,
) -> float:
    """The root mean square of what an edit changes in the logits, where the passages' true answers are predicted.

    Of each position's change the mean over the vocabulary is taken away: a constant that is added to all logits changes
    no probability. Under `accelerate launch` the processes share the passages; the result is the same on all of them,
    and for any number of them.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The model that the edit is on.
        edit (`ScalableEdit`):
            Sets λ; at 0 afterwards.
        scale (`float`):
            λ, compared with 0.
        passages (`Sequence[Passage]`):
            Whose answers' positions count.
        protocol (`Protocol`):
            How long prompts and answers are.
        tokenizer (`PreTrainedTokenizerBase`):
            Of the model.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `float`: The root mean square over all these positions and all tokens of the vocabulary.

    Raises:
        `BadValueError`: If there is no passage, or a logit is not finite.
    """
    if not passages:
        raise BadValueError("there is no passage on which a change of the output could be measured.")
    tokenized = tokenize_passages(passages, protocol, tokenizer, model.config)
    longest = max(len(passage.prompt_ids) + len(passage.answer_ids) for passage in tokenized)
    # An edit may rewrite all weights for each λ: as many passages as memory allows go through between.
    step = rows_per_pass(model.config, longest)
    groups = [tokenized[first : first + step] for first in range(0, len(tokenized), step)]
    generator, state = Generator(model, tokenizer, protocol.decoding, protocol.seed), processes()
    mine = range(state.process_index, len(groups), state.num_processes)

    def measured() -> dict[int, tuple[float, int]]:
        with generator.prepared(), starting_at_zero(edit):
            bar = progress_bar(mine, "Comparing outputs", progress)
            return {number: _squares(generator, edit, scale, groups[number]) for number in bar}

    found: dict[int, tuple[float, int]] = {}
    for part in state.gather(state.together(measured)):
        found.update(part)
    # In the order of the groups, whoever measured them.
    squares, counts = zip(*(found[number] for number in range(len(groups))), strict=True)
    return math.sqrt(math.fsum(squares) / sum(counts))


def _squares(
    generator: Generator, edit: ScalableEdit, scale: float, passages: Sequence[TokenizedPassage]
) -> tuple[float, int]:
    """The sum of squares of the change, and of how many numbers."""
    edit.set_scale(0.0)
    before = generator.answer_logits(passages)
    edit.set_scale(scale)
    after = generator.answer_logits(passages)
    squares, count = [], 0
    for one, other in zip(before, after, strict=True):
        change = other.double() - one.double()
        change -= change.mean(dim=-1, keepdim=True)
        squares.append(change.square().sum().item())
        count += change.numel()
    total = math.fsum(squares)
    if not math.isfinite(total):
        raise BadValueError(
            f"the model's logits are NaN or infinite at λ=0 or λ={scale}, so the change between them has no size: its "
            "weights are broken there (an overflow of float16, or a |λ| that is too large)"
        )
    return total, count
