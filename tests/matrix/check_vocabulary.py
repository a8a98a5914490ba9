"""A fine-tune with more tokens than its base."""

from __future__ import annotations

import copy

import torch
from matrix.outcomes import ImpossibleError, Tally, others
from matrix.subjects import Subject, assert_loads_alike, assert_same_bits, loaded, shaken, stored

from hf_taskvec import TaskVector


def check(subject: Subject, tally: Tally) -> None:
    """Carried to the base with its rows, so that the result is the fine-tune, and transformers loads it."""
    tuned = copy.deepcopy(subject.base)
    with others("resize_token_embeddings"):
        torch.manual_seed(0)
        tuned.resize_token_embeddings(tuned.get_input_embeddings().weight.shape[0] + 7)
        folder = subject.saved(shaken(tuned, 0.01, seed=5), "grown")
        loaded(folder)
    base, grown = stored(subject.base_folder), stored(folder)
    if {name: each.shape for name, each in base.items()} == {name: each.shape for name, each in grown.items()}:
        raise ImpossibleError("resize_token_embeddings changes no stored tensor")
    vector = TaskVector.from_finetuned(subject.base_folder, folder, vocabulary="extend")
    output = vector.apply(subject.base_folder, subject.folder / "extended")
    assert_same_bits(stored(output), grown, "extended")
    assert_loads_alike(output, folder)
    tally.exact = len(vector)
