"""Learning coefficients for `accelerate launch`: prints them, and the losses, as JSON in the main process."""

from __future__ import annotations

import json

import torch
from support.launch import leave_processes
from support.launched_training import make_blocks
from support.tiny_models import low_rank, make, tuned_copy

from hf_taskvec import TaskVector
from hf_taskvec.distributed import processes
from hf_taskvec.training import FittedScales, ForgetObjective, fit_scales


def fitted() -> FittedScales:
    """7 blocks in batches of 3: the last batch of an epoch has one block, so a second process has none for it."""
    model = make("llama", tie_word_embeddings=True)
    dense = TaskVector.from_finetuned(model, tuned_copy(model, 0.2))
    objective = ForgetObjective(make_blocks(7), make_blocks(9, seed=1), target=3.3)
    return fit_scales(model, {"dense": dense, "factors": low_rank(model)}, objective, by="kind", steps=8, batch_size=3)


if __name__ == "__main__":
    fit = fitted()
    found = [fit.coefficients, fit.losses, fit.validation]
    assert all(each == found for each in processes().gather(found))
    if processes().is_main_process:
        print(json.dumps(found))
    if torch.distributed.is_initialized():
        leave_processes()
