"""A model that learned some passages by heart, and the one that it was made from."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from support.tiny_models import make
from support.token_rows import token_passages

from hf_taskvec.analysis.token_batches import make_batch
from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage


@dataclass(frozen=True)
class Memorised:
    """What never saw the passages, what knows them, and what was taught half way; other passages that none saw."""

    reference: torch.nn.Module
    untouched: torch.nn.Module
    halfway: torch.nn.Module
    seen: tuple[TokenizedPassage, ...]
    held_out: tuple[TokenizedPassage, ...]


@pytest.fixture(scope="package")
def memorised() -> Memorised:
    reference = make("phi", hidden_size=32, num_hidden_layers=3)
    seen, held_out = token_passages(1, 12), token_passages(2, 12)
    batch = make_batch([[*passage.prompt_ids, *passage.answer_ids] for passage in seen])
    model = copy.deepcopy(reference)
    halfway = model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(100):
        if step == 12:
            halfway = copy.deepcopy(model)
        model(batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return Memorised(reference, model, halfway, seen, held_out)
