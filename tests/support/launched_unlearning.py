"""Unlearning for several processes, or for one that is killed: launched_unlearning.py MODEL OUTPUT JOB [JOB ...]."""

from __future__ import annotations

import sys
from pathlib import Path

from support.launched_training import LORA, SETTINGS, Killed, make_blocks

from hf_taskvec.training import Unlearned, finetuning, unlearn

#: method and how it is trained
JOBS = ["grad_diff-full", "npo-full", "simnpo-lora", "rmu-full"]


def run(job: str, model: Path, folder: Path) -> Unlearned:
    # 5 blocks to keep: the second process has none in the last batch of them.
    method, _, how = job.partition("-")
    settings = LORA if how == "lora" else SETTINGS
    return unlearn(
        model, make_blocks(), folder, method=method, keep_blocks=make_blocks(5, seed=7), settings=settings,
        checkpoint_every=3,
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[3] == "killed":
        finetuning.make_accelerator = lambda: Killed(cpu=True)
        run("npo-full", Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        for name in sys.argv[3:]:
            run(name, Path(sys.argv[1]), Path(sys.argv[2]) / name)
