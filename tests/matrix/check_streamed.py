"""Folders in, folder out: bf16 weights with buffers in fp32, as real mixtures of experts are stored."""

from __future__ import annotations

import torch
from matrix.outcomes import Tally
from matrix.subjects import Subject, assert_loads_alike, assert_same_bits, stored
from support.tiny_models import nearest

from hf_taskvec import TaskVector

SCALE = -0.6


def check(subject: Subject, tally: Tally) -> None:
    """λ = 1 gives the fine-tune bit for bit, and transformers loads it; λ = −0.6 the fp64 result, rounded once."""
    for model in (subject.base, subject.tuned):
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    base, tuned = stored(subject.base_folder), stored(subject.tuned_folder)
    vector = TaskVector.from_finetuned(subject.base_folder, subject.tuned_folder)
    one = vector.apply(subject.base_folder, subject.folder / "one")
    assert_same_bits(stored(one), tuned, "λ = 1")
    assert_loads_alike(one, subject.tuned_folder)
    other = vector.apply(subject.base_folder, subject.folder / "other", scale=SCALE)
    expected = {name: _moved(tensor, tuned[name]) for name, tensor in base.items()}
    assert_same_bits(stored(other), expected, f"λ = {SCALE}")
    tally.exact = len(base)


def _moved(base: torch.Tensor, tuned: torch.Tensor) -> torch.Tensor:
    if not base.is_floating_point():
        return base
    return nearest(base.double() + SCALE * (tuned.double() - base.double()), base.dtype)
