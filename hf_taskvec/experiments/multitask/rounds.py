"""`run_rounds`: fine-tune every task from a shared model, merge what each has learnt into it, and again.

Merging means adding a combination of the round's updates δ_t = θ_t − θ̄ to the shared model θ̄:

- MIMA: their mean, which makes θ̄ the average of the task models (eq. 4 of the MIMA paper); one round is plain
  averaging.
- ATM: their sum, times a factor (https://arxiv.org/abs/2411.03055).
- Any other rule of `combine`. One that draws at random draws anew in each round.

Tasks are spread over processes: task i belongs to process i modulo their number, which alone needs its data.
"""

import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_taskvec import atomic
from hf_taskvec.algebra import measures
from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.parameter_names import layer_count
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.distributed import make_accelerator, processes
from hf_taskvec.errors import BadValueError, CorruptFileError, OutputError
from hf_taskvec.experiments.multitask.round_trace import RoundTrace, Trace, cosines
from hf_taskvec.experiments.multitask.task_exchange import (
    gather_tensors_by_task,
    gather_values_by_task,
    is_same_in_all_processes,
    owns_task,
)
from hf_taskvec.experiments.multitask.task_trainer import TaskTrainer, Weights
from hf_taskvec.json_files import json_digest
from hf_taskvec.merging import combine
from hf_taskvec.merging.combining import combine_parameter
from hf_taskvec.merging.rule_registry import find_rule
from hf_taskvec.models.fingerprints import full_fingerprint
from hf_taskvec.training.accelerators import check_accelerator, resolve_precision
from hf_taskvec.training.memory_estimate import MemoryEstimate, check_memory, estimate_memory
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.token_blocks import TokenBlocks, mixed_seed, read_blocks
from hf_taskvec.training.trained_model import open_base

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

STATE = "rounds.safetensors"
TRACE = "trace.json"
TASKS = "tasks"


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Args:
        name (`str`):
            Of its folder, and in tables.
        blocks (`datasets.Dataset`, *optional*):
            What to train on. A process that does not own the task need not have them.
    """

    name: str
    blocks: "datasets.Dataset | None" = field(repr=False, default=None)


@dataclass(frozen=True)
class Merge:
    """How a round's updates become one.

    Args:
        rule (`str`, *optional*, defaults to `"mean"`):
            A merging rule, by its name; `hf_taskvec.rules()` lists them.
        scale (`float`, *optional*, defaults to 1.0):
            What the merged update is multiplied by.
        options (`Mapping`, *optional*):
            Of the rule.
    """

    rule: str = "mean"
    scale: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


def run_rounds(
    base: "str | Path | PreTrainedModel",
    tasks: Sequence[Task],
    settings: TrainingSettings,
    output: str | Path,
    *,
    rounds: int,
    steps_per_round: int,
    merge: Merge | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Trace:
    """Train all tasks in rounds. The folder then holds the trace, and in `tasks` the last vector of each.

    Under `accelerate launch` every process calls this. The learning rate's schedule spans all rounds, and a task's data
    goes on where the last round left it; AdamW starts anew in each. After every round the shared weights and the trace
    are saved: called again, an interrupted run continues after its last complete round, and a finished one is not
    repeated.

    Args:
        base (`str`, `Path` or `PreTrainedModel`):
            θ_0: a folder, a Hub id or a live model.
        tasks (`Sequence` of `Task`):
            Two or more, with different names. Task i belongs to process i modulo their number.
        settings (`TrainingSettings`):
            Of the training. `epochs` has no meaning here.
        output (`str` or `Path`):
            The folder to write, on a disk that all processes see.
        rounds (`int`):
            How many.
        steps_per_round (`int`):
            Steps of the optimiser in a round, for each task.
        merge (`Merge`, *optional*):
            How a round ends; by default with the mean.
        overwrite (`bool`, *optional*, defaults to `False`):
            Start anew, whatever rounds the folder holds.
        progress (`bool`, *optional*):
            Show progress bars; by default on a terminal only.

    Returns:
        `Trace`: Losses and geometry of each round.

    Raises:
        `BadValueError`: If there are fewer than two tasks, or a process lacks the data of its own.
        `OutputError`: If the folder holds something else, or rounds of other arguments.
        `UnsupportedError`: If the training does not fit into memory.

    Example:
        >>> from hf_taskvec.experiments.multitask import Merge, Task, run_rounds
        >>> tasks = [Task("law", law_blocks), Task("code", code_blocks)]  # doctest: +SKIP
        >>> trace = run_rounds(base, tasks, settings, "out", rounds=4, steps_per_round=50)  # MIMA  # doctest: +SKIP
        >>> TaskVector.load("out/tasks/law")  # doctest: +SKIP

    """
    merge = merge or Merge()
    folder = Path(output)
    _check(tasks, rounds, steps_per_round, merge)
    accelerator = make_accelerator()
    check_accelerator(accelerator)
    state = processes()
    source = open_base(base)
    owned = [number for number in range(len(tasks)) if owns_task(number)]
    blocks = state.together(lambda: {n: _read(tasks[n], source.vocabulary, source.context) for n in owned}) or {}
    precision = resolve_precision(settings, accelerator)
    longest = max((each.length for each in blocks.values()), default=2)
    state.together(lambda: check_rounds_memory(source.config, settings, longest, len(tasks)))
    trainer = TaskTrainer(source, settings, precision)
    data = gather_values_by_task({number: each.digest for number, each in blocks.items()}, len(tasks))
    key = _key(
        full_fingerprint(trainer.model),
        [task.name for task in tasks],
        data,
        asdict(settings),
        precision,
        steps_per_round * rounds,
        steps_per_round,
        merge,
    )
    if not is_same_in_all_processes([key]):
        raise BadValueError("the base differs between processes: load the same model in each of them.")
    run = _Run(trainer, tuple(tasks), blocks, merge, steps_per_round, rounds, progress)
    if overwrite:
        state.together(functools.partial(_remove_rounds, folder), main_only=True)
    center, trace = state.together(lambda: _resume(folder, key, trainer, tasks)) or (trainer.start, Trace(()))
    if trace.rounds:  # a run that was stopped between its two files has but the first of them
        state.together(functools.partial(trace.save, folder / TRACE), main_only=True)
    for number in range(len(trace.rounds), rounds):
        # A task that fails in one process fails in all: none waits for its weights.
        tuned, losses = state.together(functools.partial(run.train_tasks, center, number, folder, base)) or ({}, {})
        center, found = run.merge_updates(center, tuned, number)
        means = gather_values_by_task({task: sum(each) / len(each) for task, each in losses.items()}, len(tasks))
        done = RoundTrace(number + 1, (number + 1) * steps_per_round, tuple(means), **found)
        trace = Trace(trace.tasks, (*trace.rounds, done))
        save = functools.partial(_save_state, folder, key, center, trace)
        state.together(save, main_only=True)
    trainer.put(center)
    return trace


def check_rounds_memory(config: Any, settings: TrainingSettings, block_length: int, tasks: int) -> None:
    """Refuse rounds of so many tasks that do not fit into memory, by an estimate."""
    accelerator = make_accelerator()
    count, device = accelerator.num_processes, accelerator.device
    precision = resolve_precision(settings, accelerator)
    training = estimate_memory(config, settings, block_length, precision=precision)
    # Beside the training of its last task a process holds θ_0, the shared weights and those of its other tasks, on the
    # CPU. (When they are merged there is one more, but no longer an optimiser.) A copy is as large as the gradients.
    held = MemoryEstimate((1 + -(-tasks // count)) * training.gradients, 0, 0, 0)
    if device.type == "cpu":
        check_memory(replace(training, weights=training.weights + held.weights), device, sharing=count)
    else:
        check_memory(training, device)
        check_memory(held, torch.device("cpu"), sharing=count)


def _read(task: Task, vocabulary: int, context: int | None) -> TokenBlocks:
    """A task's blocks, checked."""
    if task.blocks is None:
        raise BadValueError(f"the task {task.name!r} belongs to this process, which has no data for it.")
    return read_blocks(task.blocks, vocabulary, context)


def _check(tasks: Sequence[Task], rounds: int, steps: int, merge: Merge) -> None:
    names = [task.name for task in tasks]
    if len(tasks) < 2:
        raise BadValueError(f"there {'is one task' if tasks else 'are no tasks'}: merging takes at least two.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise BadValueError(f"two tasks are called {twice!r}. Give each a name of its own.")
    wrong = next((name for name in names if not name or Path(name).name != name), None)
    if wrong is not None:
        raise BadValueError(f"a task cannot be called {wrong!r}: its name is that of a folder.")
    for name, value in (("rounds", rounds), ("steps_per_round", steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadValueError(f"{name}={value!r} must be a whole number of at least 1.")
    # Bad options are found here, before any training.
    trial = [TaskVector.from_tensors({"layers.0.w": torch.ones(2, 2)}, name=label_for(name)) for name in names]
    combine(trial, merge.rule, **merge.options) * merge.scale


@dataclass(frozen=True)
class _Run:
    trainer: TaskTrainer
    tasks: tuple[Task, ...]
    blocks: Mapping[int, TokenBlocks]
    merge: Merge
    steps: int
    rounds: int
    progress: bool | None

    def train_tasks(
        self, center: Weights, number: int, folder: Path, base: Any
    ) -> tuple[dict[int, Weights], dict[int, list[float]]]:
        """One round of this process's tasks: their weights and losses. After the last one their vectors are saved."""
        trainer, done, total = self.trainer, number * self.steps, self.rounds * self.steps
        tuned, losses = {}, {}
        for task, blocks in self.blocks.items():
            trainer.put(center)
            seed = mixed_seed(trainer.settings.seed, task)
            losses[task] = trainer.train(blocks, seed, done, done + self.steps, total, self.progress)
            tuned[task] = trainer.take()
            if number + 1 == self.rounds:
                name = self.tasks[task].name
                trainer.vector(base, label_for(name)).save(folder / TASKS / name, overwrite=True)
        return tuned, losses

    def options(self, number: int) -> dict[str, Any]:
        """The rule's options in a round: a rule that draws at random gets a seed of the run and the round."""
        given = dict(self.merge.options)
        if "seed" in find_rule(self.merge.rule).options:
            given["seed"] = mixed_seed(self.trainer.settings.seed, number, int(given.get("seed", 0)))
        return given

    def merge_updates(
        self, center: Weights, tuned: Mapping[int, Weights], number: int
    ) -> tuple[Weights, dict[str, Any]]:
        """The shared weights after a round, and the geometry of what was merged: one unit after the other.

        No more than one unit of all tasks is held beside the weights of the process's own tasks.
        """
        trainer, count = self.trainer, len(self.tasks)
        after: Weights = {}
        task_gram, update_gram = (torch.zeros(count, count, dtype=torch.float64) for _ in range(2))
        lost = whole = 0.0
        labels = [task.name for task in self.tasks]
        layers, options = layer_count(trainer.units), self.options(number)
        for unit, names in trainer.units.items():
            rows = [
                gather_tensors_by_task({task: weights[n] for task, weights in tuned.items()}, count, center[n])
                for n in names
            ]
            start, before = (tuple(weights[name] for name in names) for weights in (trainer.start, center))
            each = [tuple(stacked[task] for stacked in rows) for task in range(count)]
            changes, updates = (
                [_folded(unit, trainer.change(unit, weights, since)) for weights in each] for since in (start, before)
            )
            task_gram += measures.gram(unit, changes)
            update_gram += measures.gram(unit, updates)
            merged = combine_parameter(unit, updates, labels, layers, self.merge.rule, **options)
            moved, discarded, size = trainer.moved(unit, before, _folded(unit, merged, self.merge.scale))
            after.update(zip(names, moved, strict=True))
            lost, whole = lost + discarded, whole + size
        task_cosines, task_norms = cosines(task_gram)
        update_cosines, update_norms = cosines(update_gram)
        return after, {
            "task_cosines": task_cosines,
            "update_cosines": update_cosines,
            "task_norms": task_norms,
            "update_norms": update_norms,
            "discarded": lost / whole if whole else 0.0,
        }


def _folded(unit: str, terms: tuple[Term, ...], scale: float = 1.0) -> tuple[Term, ...]:
    """The terms times a number, like ones added up."""
    return (TaskVector({unit: terms}) * scale).terms_of(unit)


# Saving and resuming.


def _key(*parts: Any) -> str:
    plain = [asdict(part) if isinstance(part, Merge) else part for part in parts]
    return json_digest(1, *plain)


def _save_state(folder: Path, key: str, center: Weights, trace: Trace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(folder / STATE) as partial:
        # One entry: safetensors writes several in any order, and the same run should give the same bytes.
        save_file(center, partial, metadata={"rounds": json.dumps([key, trace.to_json()])})
    trace.save(folder / TRACE)


def _remove_rounds(folder: Path) -> None:
    """Remove what a run has left; nothing else is ours."""
    for path in (folder / STATE, folder / TRACE, *filter(atomic.is_partial, folder.glob(".*"))):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / TASKS, ignore_errors=True)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _resume(folder: Path, key: str, trainer: TaskTrainer, tasks: Sequence[Task]) -> tuple[Weights, Trace]:
    """Where an interrupted run was, or the start."""
    path = folder / STATE
    if not path.exists():
        if folder.exists() and any(folder.iterdir()) and processes().is_main_process:
            left = {each.name for each in folder.iterdir() if not atomic.is_partial(each)}
            if left - {TASKS, TRACE}:
                raise OutputError(f"the folder {folder.name} holds other files. Choose a new or empty one.")
        return trainer.start, Trace(tuple(task.name for task in tasks))
    try:
        with safe_open(path, framework="pt") as file:
            found, text = json.loads(file.metadata()["rounds"])
            if found != key:
                raise OutputError(
                    f"{folder.name} holds rounds of another base, other tasks or other settings. Choose another "
                    "folder, or delete it."
                )
            trace = Trace.from_json(text)
            weights = {name: file.get_tensor(name) for name in trainer.start}
            same = all(_alike(tensor, trainer.start[name]) for name, tensor in weights.items())
            if not same or trace.tasks != tuple(task.name for task in tasks):
                raise CorruptFileError("it holds other weights or tasks than its key says")
            return weights, trace
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, OutputError):
            raise
        raise CorruptFileError(
            f"{STATE} in {folder.name} is damaged ({error}). Delete the folder and start anew."
        ) from None
