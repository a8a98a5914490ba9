"""How strong a negation has to be: as strong as the level asks, and hardly stronger."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.forgetting_world import World
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.forgetting.negation_strength import chance_level, mean_block_loss, strength_for


@pytest.fixture(scope="module")
def given(world: World) -> tuple[Any, TaskVector, Any]:
    """The model that knows the books, what it learnt of all of them, and blocks of the first."""
    model: Any = AutoModelForCausalLM.from_pretrained(world.joint)
    vector = TaskVector.from_finetuned(world.base, world.joint, name="all")
    return model.eval(), vector, world.books[0].training_blocks(world.tokenizer, 32)


def test_the_level_is_reached_and_not_long_before(given: tuple[Any, TaskVector, Any]) -> None:
    model, vector, blocks = given
    before = [parameter.clone() for parameter in model.parameters()]
    level = 3.0
    found = strength_for(model, lambda strength: -strength * vector, blocks, level)
    with (-found * vector).applied_to(model):
        assert mean_block_loss(model, blocks) >= level
    with (-0.94 * found * vector).applied_to(model):
        assert mean_block_loss(model, blocks) < level
    assert all(map(torch.equal, before, model.parameters()))


def test_the_loss_is_the_mean_over_all_predicted_tokens(given: tuple[Any, TaskVector, Any]) -> None:
    model, _, blocks = given
    ids = torch.tensor(blocks["input_ids"])[:32]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].double()
    by_hand = -torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).mean()
    assert mean_block_loss(model, blocks) == pytest.approx(float(by_hand), rel=1e-5)
    assert mean_block_loss(model, blocks, batch_size=3) == pytest.approx(float(by_hand), rel=1e-5)


def test_of_a_long_text_some_blocks_of_every_part_are_read(given: tuple[Any, TaskVector, Any]) -> None:
    from datasets import Dataset

    model, _, blocks = given
    known, noise = blocks["input_ids"][0], torch.randint(0, 400, (32,), generator=torch.Generator().manual_seed(0))
    rows = [known] * 50 + [noise.tolist()] * 50  # two books, the second unknown
    long = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 32] * 100, "labels": rows})
    each = [mean_block_loss(model, long.select([number])) for number in (0, 99)]
    assert each[1] > each[0] + 1
    assert mean_block_loss(model, long) == pytest.approx(sum(each) / 2, rel=1e-4)


def test_chance_is_the_loss_of_equal_probabilities(given: tuple[Any, TaskVector, Any]) -> None:
    assert chance_level(given[0]) == math.log(400)


def test_a_level_that_is_met_already_is_refused(given: tuple[Any, TaskVector, Any]) -> None:
    model, vector, blocks = given
    with pytest.raises(BadValueError, match="nothing to forget"):
        strength_for(model, lambda strength: -strength * vector, blocks, 0.001)


def test_a_vector_that_does_nothing_to_the_text_is_refused(given: tuple[Any, TaskVector, Any]) -> None:
    model, vector, blocks = given
    with pytest.raises(BadValueError, match="not even 8 times the vector"):
        strength_for(model, lambda strength: -1e-6 * strength * vector, blocks, 3.0)
