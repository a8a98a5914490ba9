"""Objectives: their values worked out by other means, bounded, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.launched_training import make_blocks
from support.tiny_models import make

from hf_taskvec.errors import TaskVectorError
from hf_taskvec.training import ForgetObjective, MergeObjective, TextBatch, block_losses

BLOCKS = make_blocks(4)
IDS = torch.tensor(BLOCKS["input_ids"][:])
MODEL = make("llama")


def plain_losses(labels: torch.Tensor) -> list[float]:
    """The mean loss of each block, as transformers computes it."""
    with torch.no_grad():
        return [
            MODEL(input_ids=ids[None], labels=label[None]).loss.item() for ids, label in zip(IDS, labels, strict=True)
        ]


def batch(text: str, labels: torch.Tensor = IDS, untouched: torch.Tensor | None = None) -> TextBatch:
    return TextBatch(text, torch.arange(4), IDS, labels, untouched)


def test_merging_makes_the_mean_loss_of_the_tasks_small() -> None:
    labels = IDS.clone()
    labels[1, 3:9] = -100
    found = MergeObjective({"one": BLOCKS, "two": BLOCKS})(MODEL, batch("one", labels))
    assert found.tolist() == pytest.approx([loss / 2 for loss in plain_losses(labels)], rel=1e-5)


def test_the_losses_of_blocks_are_those_of_their_tokens() -> None:
    model = make("llama").train()
    found = block_losses(model, BLOCKS, batch_size=3)
    assert found.shape == (4, 15) and model.training
    assert found.mean(dim=1).tolist() == pytest.approx(plain_losses(IDS), rel=1e-5)


def test_a_block_counts_by_how_far_it_is_below_the_target() -> None:
    losses = plain_losses(IDS)
    target = sorted(losses)[1] + 1e-3
    values = ForgetObjective(BLOCKS, BLOCKS, target)(MODEL, batch("forget"))
    assert values.tolist() == pytest.approx([max(0.0, target - loss) for loss in losses], abs=1e-5)
    assert (values == 0).sum() == 2  # above it there is nothing to gain


def test_each_token_has_a_target_of_its_own() -> None:
    losses = block_losses(MODEL, BLOCKS)
    target = losses.clone()
    target[2, :5] += 0.3
    target[1] -= 1.0
    values = ForgetObjective(BLOCKS, BLOCKS, target)(MODEL, batch("forget"))
    assert values.tolist() == pytest.approx([0.0, 0.0, 5 * 0.3 / 15, 0.0], abs=1e-5)


def test_kept_text_counts_only_where_its_loss_has_risen() -> None:
    untouched = block_losses(MODEL, BLOCKS)
    untouched[0] -= 0.5
    untouched[1] += 0.5
    objective = ForgetObjective(BLOCKS, BLOCKS, 3.0, slack=0.1, keep_weight=2.0)
    assert set(objective.compared) == {"keep"} and set(objective.texts) == {"forget", "keep"}
    values = objective(MODEL, batch("keep", untouched=untouched))
    assert values.tolist() == pytest.approx([2 * 0.4, 0.0, 0.0, 0.0], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": math.nan}, "target=nan"),
        ({"target": -1.0}, "target=-1.0"),
        ({"target": "high"}, "target='high'"),
        ({"target": torch.ones(4, 16)}, r"shape \[4, 16\].*\[4, 15\].*block_losses"),
        ({"target": torch.full((4, 15), math.inf)}, "not finite"),
        ({"slack": -0.1}, "slack=-0.1"),
        ({"keep_weight": True}, "keep_weight=True"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskVectorError, match=message):
        ForgetObjective(BLOCKS, BLOCKS, **{"target": 3.0, **options})
