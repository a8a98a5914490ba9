"""Fine-tuning for `accelerate launch`: launched_training.py BASE OUTPUT JOB [JOB ...].

Each job is a run of its own into OUTPUT/JOB: `full`, `lora`, `sharded` (weights split over the processes by FSDP's
`fully_shard`), `killed` (by SIGKILL in its eighth step, after checkpoints), `nan`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator

from hf_taskvec.errors import DivergedError
from hf_taskvec.training import TrainingSettings, finetune

# 21 blocks in batches of 4: the last batch of an epoch has one block, so the second process has none for it.
SETTINGS = TrainingSettings(epochs=2, batch_size=4, learning_rate=1e-3, micro_batch_size=1)
LORA = TrainingSettings(method="lora", rank=4, epochs=2, batch_size=4, learning_rate=1e-3)


def make_blocks(count: int = 21, length: int = 16, vocabulary: int = 20, seed: int = 0) -> datasets.Dataset:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (count, length), generator=draw)
    return datasets.Dataset.from_dict({"input_ids": ids.tolist()})


class Sharding(Accelerator):
    """What accelerate does for FSDP2 on GPUs, on the CPUs that it does not do it for."""

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, optimizer = args
        mesh = init_device_mesh("cpu", (self.num_processes,))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded = dict(model.named_parameters())
        groups = [{**group, "params": [sharded[name] for name in group["params"]]} for group in groups]
        return model, torch.optim.AdamW(groups, fused=True)


class Killed(Accelerator):
    """No exception, no clean-up: the process is gone."""

    steps = 0

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.steps == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().clip_grad_norm_(*args, **kwargs)


class Broken(Accelerator):
    """Gradients that are not numbers, in one process only, from the third step on."""

    steps = 0

    def clip_grad_norm_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        norm = super().clip_grad_norm_(parameters, *args, **kwargs)
        return norm * float("nan") if self.steps > 2 and self.is_main_process else norm


def main(base: Path, output: Path, jobs: list[str]) -> None:
    blocks = make_blocks()
    cpu = {"cpu": True}
    for job in jobs:
        if job == "killed":
            finetune(base, blocks, SETTINGS, output / job, vectors=True, checkpoint_every=3, accelerator=Killed(**cpu))
        elif job == "nan":
            try:
                finetune(base, blocks, SETTINGS, output / job, accelerator=Broken(**cpu))
            except DivergedError as error:
                assert "step 3 of 12" in str(error), error
            else:
                raise AssertionError("no error")
        else:
            settings = LORA if job == "lora" else SETTINGS
            accelerator = Sharding(**cpu) if job == "sharded" else None
            # A checkpoint in the middle of an epoch, gathered from all processes.
            finetune(base, blocks, settings, output / job, vectors=True, checkpoint_every=4, accelerator=accelerator)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
