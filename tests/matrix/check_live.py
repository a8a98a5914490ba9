"""Live models: the same vector as from their folders, and edits that are the streamed results."""

from __future__ import annotations

import copy

import torch
from matrix.outcomes import ImpossibleError, Tally, WrongError
from matrix.subjects import Subject, assert_same_bits, loaded

from hf_taskvec import TaskVector, TaskVectorError


def check(subject: Subject, tally: Tally) -> None:
    """The live vector is the streamed one; merged edits at λ = 1 and −0.6 are what `apply` writes, and are undone.

    Parameters that a live edit refuses by name (fused experts) are left out of the vector, and the rest is checked.
    """
    streamed = TaskVector.from_finetuned(subject.base_folder, subject.tuned_folder)
    vector = TaskVector.from_finetuned(subject.base, subject.tuned)
    # A live vector leaves out what did not change; a streamed one has not looked yet.
    changes = [{n: change for n in each if (change := each.dense(n, "float64")).any()} for each in (vector, streamed)]
    assert_same_bits(*changes, "live and streamed vectors")
    if abs(vector.cosine(streamed) - 1) > 1e-12:
        raise WrongError(f"the cosine of live and streamed vectors is {vector.cosine(streamed)}")
    model = loaded(subject.base_folder)
    before = copy.deepcopy(model.state_dict())
    while True:
        try:
            vector.edit(model).restore()
            break
        except TaskVectorError as error:
            named = [name for name in vector if name in str(error)]
            if not named:
                raise
            tally.refused += [str(error)] * len(named)
            vector = vector.filter(exclude=named)
    for scale in (1.0, -0.6):
        folder = vector.apply(subject.base_folder, subject.folder / f"at {scale}", scale=scale)
        expected = loaded(folder).state_dict()
        with vector.applied_to(model, scale):
            try:
                assert_same_bits(model.state_dict(), expected, f"edited at {scale}")
            except WrongError:
                if gives_back(subject):
                    raise
                raise ImpossibleError("loading by transformers: it gives other weights than were saved") from None
        assert_same_bits(model.state_dict(), before, "restored")
    tally.exact = len(vector)
    if not set(streamed) >= set(vector):
        raise WrongError("the live vector has names that the stored one does not have")


def gives_back(subject: Subject) -> bool:
    """Whether transformers loads what it saved, before anything is edited."""
    saved, found = subject.base.state_dict(), loaded(subject.base_folder).state_dict()
    return all(torch.equal(each, found[name]) for name, each in saved.items() if name in found)
