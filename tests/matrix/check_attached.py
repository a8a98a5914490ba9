"""Edits beside the weights, against merged edits: one parameter at a time, of other classes all of them at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from matrix.class_inputs import Inputs, inputs_of_class, outputs
from matrix.other_classes import CLASSES
from matrix.outcomes import ImpossibleError, Tally, WrongError, others
from matrix.subjects import Subject, assert_same_bits, loaded, logits, stored
from transformers import PreTrainedModel

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.models.live_model import live_weights


def check(subject: Subject, tally: Tally) -> None:
    """A low-rank change of each matrix, a change of each bias: the merged edit's logits, or refused by name."""
    if subject.model_type in CLASSES:
        _check_together(subject, tally)
        return
    model = loaded(subject.base_folder)
    with others("a forward pass"):
        plain = logits(model)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in stored(subject.base_folder).items():
        if not can_be_attached(name, tensor):
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


def _check_together(subject: Subject, tally: Tally) -> None:
    """The same changes in one vector, without those that are refused by name: every number of the merged edit."""
    model = loaded(subject.base_folder)
    given = inputs_of_class(model)
    plain, before = outputs(model, given), {name: each.clone() for name, each in model.state_dict().items()}
    generator = torch.Generator().manual_seed(4)
    tensors = {name: each for name, each in stored(subject.base_folder).items() if can_be_attached(name, each)}
    # Of a size that does not drive what follows into saturation, where all changes would look alike.
    vector = TaskVector.from_tensors({n: random_change(each, generator, 0.1) for n, each in tensors.items()})
    while vector:
        try:
            with vector.applied_to(model, 0.7, merge=False):
                found = outputs(model, given)
            break
        except TaskVectorError as error:
            named = [name for name in vector if name in str(error)]
            if not named:
                raise
            tally.refused += [f"{name}: {error}" for name in named]
            vector = vector.filter(exclude=named)
    if vector:
        off, effect = _off(model, given, vector, plain, found)
        if off > 1e-3 * effect:  # some models carry rounding far, which in fp64 is no more than rounding
            wide = {name: each.double() if each.is_floating_point() else each for name, each in given.items()}
            off, effect = _off(loaded(subject.base_folder).double(), wide, vector)
        if not off <= 1e-3 * effect:
            raise WrongError(f"attached is {off:.2g} off, where the merged edit moves what it gives by {effect:.2g}")
        tally.exact = len(_that_show(model, given, vector))
        tally.unseen = len(vector) - tally.exact
    assert_same_bits(model.state_dict(), before, "after the edits")
    if not torch.equal(outputs(model, given), plain):
        raise WrongError("the edits left something behind")


def _off(
    model: PreTrainedModel,
    given: Inputs,
    vector: TaskVector,
    plain: torch.Tensor | None = None,
    found: torch.Tensor | None = None,
) -> tuple[float, float]:
    """How far the attached edit is off, beyond rounding, and how far the merged one moves what the model gives."""
    if plain is None or found is None:
        plain = outputs(model, given)
        with vector.applied_to(model, 0.7, merge=False):
            found = outputs(model, given)
    with vector.applied_to(model, 0.7):
        expected = outputs(model, given)
    if not found.shape == expected.shape == plain.shape:
        raise ImpossibleError("a forward pass: how many numbers it gives hangs on its weights")
    largest = expected.abs().max().item()
    return (found - expected).abs().max().item() - 1e-5 * largest, (expected - plain).abs().max().item()


def _that_show(model: PreTrainedModel, given: Inputs, names: Iterable[str]) -> list[str]:
    """Those of the parameters on which some number hangs that the model gives: which have a gradient."""
    numbers = outputs(model, given, with_gradients=True)
    drawn = torch.randn(numbers.shape, generator=torch.Generator().manual_seed(5), dtype=numbers.dtype)
    with others("a backward pass"):
        (numbers * drawn).sum().backward()
    parameters = {name: weight.parameter for name, weight in live_weights(model).items()}
    found = [name for name in names if (each := parameters[name]) is not None and each.grad is not None]
    return [name for name in found if parameters[name].grad.any()]


def can_be_attached(name: str, tensor: torch.Tensor) -> bool:
    """Whether it is a matrix or a bias."""
    return (tensor.ndim == 2 or (tensor.ndim == 1 and name.endswith("bias"))) and tensor.is_floating_point()


def random_change(
    tensor: torch.Tensor, generator: torch.Generator, size: float = 0.3
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Two factors for a matrix, a whole change for a bias."""
    if tensor.ndim == 1:
        return torch.randn(tensor.shape, generator=generator) * size
    rows, columns = tensor.shape
    return torch.randn(rows, 2, generator=generator) * size, torch.randn(2, columns, generator=generator) * size
