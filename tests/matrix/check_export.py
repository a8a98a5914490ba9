"""A vector as a PEFT adapter: what PEFT makes of it, merged and unmerged, is the vector."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from matrix.check_attached import random_change
from matrix.check_lora import merged_by_peft
from matrix.outcomes import Tally, WrongError, others
from matrix.subjects import Subject, assert_close, loaded, logits, stored
from peft import PeftModel

from hf_taskvec import TaskVector, TaskVectorError


def check(subject: Subject, tally: Tally) -> None:
    """Low-rank changes of all matrices. Those that are refused by name are left out, as the refusal advises."""
    base = stored(subject.base_folder)
    generator = torch.Generator().manual_seed(6)
    matrices = {name: tensor for name, tensor in base.items() if tensor.ndim == 2 and tensor.is_floating_point()}
    factors: dict[str, Any] = {name: random_change(tensor, generator) for name, tensor in matrices.items()}
    vector = TaskVector.from_tensors(factors)
    while True:
        try:
            adapter = vector.to_adapter(subject.folder / "adapter", base=subject.base_folder)
            break
        except TaskVectorError as error:
            named = [name for name in vector if name in str(error)]
            if not named:
                raise
            tally.refused += [str(error)] * len(named)
            vector = vector.filter(exclude=named)
            if not len(vector):
                return
    plain = loaded(subject.base_folder)
    try:
        merged = merged_by_peft(subject.base_folder, adapter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            unmerged = PeftModel.from_pretrained(plain, adapter).eval()
    except Exception as error:  # whatever PEFT raises
        raise WrongError(f"PEFT does not take the adapter: {type(error).__name__}: {error}") from error
    changes = {name: factors[name][0].double() @ factors[name][1].double() for name in vector}
    expected = {name: tensor.double() + changes.get(name, 0.0) for name, tensor in base.items()}
    found = stored(subject.saved(merged, "merged"))
    assert_close({name: tensor.float() for name, tensor in found.items()}, expected, "PEFT's merge")
    with others("a forward pass"):
        whole = logits(merged.float())
    try:
        off = (logits(unmerged) - whole).abs().max().item()
    except Exception as error:  # whatever PEFT raises
        raise WrongError(f"PEFT cannot run the adapter unmerged: {type(error).__name__}: {error}") from error
    if not off <= 1e-4 * max(1.0, whole.abs().max().item()):
        raise WrongError(f"the unmerged adapter's logits are {off:.2g} off")
    tally.exact = len(vector)
