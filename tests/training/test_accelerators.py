"""The accelerator of a process that trains by itself."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from hf_taskvec.training.accelerators import SingleProcess, TrainingAccelerator
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.token_blocks import TokenBlocks
from hf_taskvec.training.training_loop import TrainingLoop, make_optimizer


def losses(accelerator: TrainingAccelerator) -> list[float]:
    from support.tiny_models import make

    settings = TrainingSettings(epochs=1, batch_size=4, micro_batch_size=2, learning_rate=1e-3, max_grad_norm=0.1)
    ids = torch.randint(3, 20, (9, 16), generator=torch.Generator().manual_seed(0))
    model = make("phi")
    loop = TrainingLoop(accelerator, model, make_optimizer(model, settings), TokenBlocks(ids, ids), settings, "fp32")
    loop.run(False, lambda done: None)
    return loop.losses


def test_a_single_process_trains_as_an_accelerator_of_one_process_does() -> None:
    found = losses(SingleProcess())
    assert len(found) == 3 and found == losses(Accelerator(cpu=True))
