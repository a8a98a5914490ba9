"""Edits beside the weights, one parameter at a time, against merged edits."""

from __future__ import annotations

import torch
from matrix.outcomes import Tally, WrongError, others
from matrix.subjects import Subject, loaded, logits, stored

from hf_taskvec import TaskVector


def check(subject: Subject, tally: Tally) -> None:
    """A low-rank change of each matrix, a change of each bias: the merged edit's logits, or refused by name."""
    model = loaded(subject.base_folder)
    with others("a forward pass"):
        plain = logits(model)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in stored(subject.base_folder).items():
        if not (tensor.ndim == 2 or (tensor.ndim == 1 and name.endswith("bias"))) or not tensor.is_floating_point():
            continue
        vector = TaskVector.from_tensors({name: random_change(tensor, generator)})
        with tally.part(name, names=[name]):
            with vector.applied_to(model, 0.7, merge=False):
                found = logits(model)
            with vector.applied_to(model, 0.7):
                expected = logits(model)
            effect = (expected - plain).abs().max().item()
            off = (found - expected).abs().max().item()
            if not off <= 1e-3 * effect + 1e-5 * expected.abs().max().item():
                raise WrongError(f"attached is {off:.2g} off, where the merged edit moves logits by {effect:.2g}")
            if effect:
                tally.exact += 1
            else:
                tally.unseen += 1
    if not torch.equal(logits(model), plain):
        raise WrongError("the edits left something behind")


def random_change(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Two factors for a matrix, a whole change for a bias."""
    if tensor.ndim == 1:
        return torch.randn(tensor.shape, generator=generator) * 0.3
    rows, columns = tensor.shape
    return torch.randn(rows, 2, generator=generator) * 0.3, torch.randn(2, columns, generator=generator) * 0.3
