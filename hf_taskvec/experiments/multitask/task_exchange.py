"""Weights that meet over processes: by all-reduce, not by disk."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_taskvec.distributed import processes


def owner(task: int) -> int:
    """The process that a task belongs to."""
    return task % processes().num_processes


def is_mine(task: int) -> bool:
    return owner(task) == processes().process_index


def meet(mine: Mapping[int, torch.Tensor], tasks: int, like: torch.Tensor) -> torch.Tensor:
    """One tensor of every task, stacked, from the processes that each have some: `mine` by the task's number.

    What a process does not have it holds as zeros. So each element is the sum of one number and zeros, which is exact in
    any order: every number of processes gives the same bits. (A plain all-reduce of the average would move fewer bytes,
    but round in the order in which processes happen to add, and leave no task's weights to compare or to merge by
    another rule.)
    """
    state = processes()
    stacked = torch.zeros(tasks, *like.shape, dtype=like.dtype)
    for number, tensor in mine.items():
        stacked[number] = tensor
    if state.num_processes > 1:
        there = stacked.to(state.device)
        torch.distributed.all_reduce(there)
        stacked = there.cpu()
    return stacked


def gather(values: Any) -> list[Any]:
    """A small object of every process, in the order of processes."""
    from accelerate.utils import gather_object

    return gather_object([values])


def gather_by_task(mine: Mapping[int, Any], tasks: int) -> list[Any]:
    """A small value of every task, from the processes that each have some."""
    found: dict[int, Any] = {}
    for part in gather(dict(mine)):
        found.update(part)
    return [found[number] for number in range(tasks)]


def same_everywhere(values: Sequence[str]) -> bool:
    """Whether all processes have the same."""
    return len({tuple(each) for each in gather(list(values))}) == 1
