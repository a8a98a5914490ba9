"""Rounds of tasks for `accelerate launch`: launched_rounds.py BASE OUTPUT.

A process has the data of its own tasks only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
from support.launch import leave_processes
from support.launched_training import make_blocks

from hf_taskvec.distributed import processes
from hf_taskvec.errors import TaskVectorError
from hf_taskvec.experiments.multitask import Merge, Task, run_rounds
from hf_taskvec.training import TrainingSettings

FULL = TrainingSettings(batch_size=4, learning_rate=1e-3)
LORA = TrainingSettings(method="lora", rank=4, batch_size=4, learning_rate=1e-2)
NAMES = ("a", "b", "c")
MERGES = {"mima": Merge(), "atm": Merge("sum", 0.4), "ties": Merge("ties", 1.0, {"density": 0.5})}


def make_task_blocks(task: int) -> datasets.Dataset:
    return make_blocks(6, seed=task)


def make_tasks() -> list[Task]:
    state = processes()
    mine = range(state.process_index, len(NAMES), state.num_processes)
    return [Task(name, make_task_blocks(number) if number in mine else None) for number, name in enumerate(NAMES)]


def main(base: str, output: str) -> None:
    for name, merge in MERGES.items():
        run_rounds(base, make_tasks(), FULL, Path(output) / name, rounds=3, steps_per_round=2, merge=merge)
    run_rounds(base, make_tasks(), LORA, Path(output) / "lora", rounds=3, steps_per_round=2)
    try:  # what one process cannot do, all refuse
        tasks = [Task("a", make_task_blocks(0)), Task("b")]
        run_rounds(base, tasks, FULL, Path(output) / "refused", rounds=1, steps_per_round=1)
    except TaskVectorError as error:
        (Path(output) / f"refused-{processes().process_index}.txt").write_text(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave_processes()
