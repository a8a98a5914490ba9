"""Repairs for several processes, or for one that is killed: launched_repair.py BASE TUNED OUTPUT JOB [JOB ...]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from support.launched_training import LORA, SETTINGS, Killed, make_blocks

from hf_taskvec import TaskVector
from hf_taskvec.training import Guard, Repaired, Teacher, repair, repairing

JOBS = ["full", "lora"]


def run(job: str, base: Path, tuned: Path, folder: Path) -> Repaired:
    edit = -1.2 * TaskVector.from_finetuned(base, tuned, name="forget")
    settings = LORA if job == "lora" else SETTINGS
    more: dict[str, Any] = {}
    if job != "killed":  # 5 blocks to guard: the second process has none in the last batch of them
        more = {"teacher": Teacher(base, 0.5), "guard": Guard(make_blocks(5, seed=7), tuned, 0.5)}
    return repair(base, edit, make_blocks(), settings, folder, checkpoint_every=3, **more)


if __name__ == "__main__":
    if sys.argv[4] == "killed":
        repairing.make_accelerator = lambda: Killed(cpu=True)
    for name in sys.argv[4:]:
        run(name, Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) / name)
