"""An adapter of one `LoraConfig` against what PEFT computes with it, unmerged and merged, in fp64."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from matrix.check_lora import trained
from matrix.lora_cases import Case
from matrix.outcomes import Tally, WrongError, others
from matrix.subjects import Subject, assert_close, loaded, logits, stored
from peft import PeftModel

from hf_taskvec import TaskVector

#: a refusal for the sake of tied weights names these, not a field
_TIED = ["ties it to", "tied"]


def check(case: Case, folder: Path, tally: Tally) -> None:
    """The vector, merged into the base, has PEFT's logits; and its weights, where PEFT's merge agrees with PEFT."""
    subject = Subject(case.model_type, folder)
    adapter = folder / "adapter"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with others("PEFT"):
            trained(loaded(subject.base_folder), case.config()).save_pretrained(adapter)
        with tally.part("", names=[*case.settings, *_TIED]):
            vector = TaskVector.from_adapter(adapter, base=subject.base_folder)
            _compare(subject, adapter, vector)
            tally.exact += 1


def _compare(subject: Subject, adapter: Path, vector: TaskVector) -> None:
    with others("PEFT"):
        try:
            dtype = torch.float64
            reference = PeftModel.from_pretrained(loaded(subject.base_folder, dtype=dtype), adapter).eval()
        except TypeError:  # some initialisations refuse fp64
            dtype = torch.float32
            reference = PeftModel.from_pretrained(loaded(subject.base_folder, dtype=dtype), adapter).eval()
        unmerged = logits(reference)
    model = loaded(subject.base_folder, dtype=dtype)
    with vector.applied_to(model):
        found = logits(model)
    tolerance = 1e-6 if dtype == torch.float64 else 1e-4
    if not _near(found, unmerged, tolerance):
        raise WrongError(f"logits are {(found - unmerged).abs().max().item():.2g} away from PEFT's")
    merged = reference.merge_and_unload()
    if not _near(logits(merged), unmerged, tolerance):
        return  # PEFT's merge is another function than PEFT's adapter
    base, truth = stored(subject.base_folder), stored(subject.saved(merged, "merged"))
    for scale in (1.0, -0.6):
        expected = {
            name: tensor.double() + scale * (truth[name].double() - tensor.double()) for name, tensor in base.items()
        }
        output = vector.apply(subject.base_folder, subject.folder / f"at {scale}", scale=scale)
        assert_close(stored(output), expected, f"λ = {scale}")


def _near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return (found - expected).abs().max().item() <= tolerance * max(1.0, expected.abs().max().item())
