"""The work of a sweep: batches split over processes, kept in the store, halved when memory runs out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, runtime_checkable
from typing import Protocol as Interface

from hf_taskvec.errors import BadValueError, MismatchError, TaskVectorError
from hf_taskvec.evaluation.generation import Continuation, Generator
from hf_taskvec.evaluation.plan import Plan, Row, Task, make_plan
from hf_taskvec.evaluation.store import Store

if TYPE_CHECKING:
    from accelerate import PartialState

# Rows of the first attempt. Only the kind of device decides, so that any number of processes agrees.
_FIRST_SIZE = {"cpu": 16}
_FIRST_SIZE_ELSEWHERE = 64
_NO_MEMORY = "memory runs out even for a single passage; use a smaller model or shorter passages"


@runtime_checkable
class Edit(Interface):
    """All that the harness knows of an edit: what it is, and how to set λ."""

    fingerprint: str

    def set_scale(self, scale: float, /) -> None: ...


@runtime_checkable
class RowEdit(Edit, Interface):
    """An edit that can give each row of the batch its own λ, so that all λ go through the model together."""

    def set_row_scales(self, scales: list[float], /) -> None: ...


class NoEdit:
    """An edit that changes nothing, at any λ: the control."""

    fingerprint = "none"

    def set_scale(self, scale: float, /) -> None:
        pass


@dataclass(frozen=True)
class Work:
    """What came of a plan: every row's continuation, and how it was done."""

    rows: dict[Row, Continuation]
    plan: Plan
    halvings: int
    generated: int
    model_seconds: float
    seconds: float


def run(
    generator: Generator,
    edit: Edit,
    tasks: Sequence[Task],
    scales: Sequence[float],
    keys: dict[Row, str],
    store: Store,
    *,
    batch_size: int | None,
    context: int | None,
) -> Work:
    """Every task at every λ, each from the store if it is there.

    Batches are formed over *all* rows before processes share them and before finished ones are dropped, so
    neither changes the composition of a batch. The first batch of every process is the trial: if memory
    runs out on any, all halve the batch size together. A later shortage halves that one batch only, and is
    counted.
    """
    begin = time.perf_counter()
    state = processes()
    mixed = isinstance(edit, RowEdit)
    size = batch_size or _FIRST_SIZE.get(generator.model.device.type, _FIRST_SIZE_ELSEWHERE)
    # A rank may see files that another does not (no shared disk): what anyone finished is finished.
    done: dict[str, Continuation] = {}
    for part in _gather(store.found(keys.values(), generator.likelihood)):
        done.update(part)
    job = _Job(generator, edit, tasks, keys, store, done)
    while True:
        plan = make_plan(tasks, scales, size, mixed=mixed, context=context)
        mine = plan.batches[state.process_index :: state.num_processes]
        pending = [rows for batch in mine if (rows := [row for row in batch if keys[row] not in done])]
        fits = not pending or job.try_batch(pending[0])
        if all(_gather(fits)):
            break
        if size == 1:
            raise BadValueError(_NO_MEMORY)
        size = max(1, size // 2)
    for rows in _progress(pending[1:], len(pending), state.is_main_process):
        job.split_batch(rows)
    errors = [error for error in _gather(job.error) if error]
    if errors:
        raise job.raised or BadValueError(f"another process failed: {errors[0]}")
    for part in _gather({key: done[key] for key in job.fresh}):
        done.update(part)
    counts = _gather((job.halvings, generator.rows_generated, generator.model_seconds))
    return Work(
        rows={row: done[key] for row, key in keys.items()},
        plan=plan,
        halvings=sum(count[0] for count in counts),
        generated=sum(count[1] for count in counts),
        model_seconds=max(count[2] for count in counts),
        seconds=time.perf_counter() - begin,
    )


class _Job:
    """One process's share of the work."""

    def __init__(
        self,
        generator: Generator,
        edit: Edit,
        tasks: Sequence[Task],
        keys: dict[Row, str],
        store: Store,
        done: dict[str, Continuation],
    ) -> None:
        self.generator, self.edit, self.tasks, self.keys = generator, edit, tasks, keys
        self.store, self.done = store, done
        self.fresh: list[str] = []
        self.halvings = 0
        self.raised: TaskVectorError | None = None
        self._scale: float | None = None

    @property
    def error(self) -> str:
        return str(self.raised) if self.raised else ""

    def try_batch(self, rows: Sequence[Row]) -> bool:
        """Do a batch; `False` if memory ran out. Our own errors wait until all processes can hear of them."""
        from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

        if self.raised:
            return True
        try:
            found = self.generator.run([self.tasks[row.task] for row in rows], lambda part: self._set(rows[part]))
        except TaskVectorError as error:
            self.raised = error
            return True
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            clear_device_cache(garbage_collection=True)
            return False
        records = {self.keys[row]: c for row, c in zip(rows, found, strict=True)}
        self.store.add(records)
        self.done.update(records)
        self.fresh += records
        return True

    def split_batch(self, rows: Sequence[Row]) -> None:
        """Do a batch, in two halves if memory runs out."""
        if self.try_batch(rows):
            return
        if len(rows) == 1:
            raise BadValueError(_NO_MEMORY)
        self.halvings += 1
        middle = len(rows) // 2
        self.split_batch(rows[:middle])
        self.split_batch(rows[middle:])

    def _set(self, rows: Sequence[Row]) -> None:
        if isinstance(self.edit, RowEdit):
            self.edit.set_row_scales([row.scale for row in rows])
        elif self._scale != rows[0].scale:  # an edit in place may rewrite all weights: once for each λ
            self.edit.set_scale(rows[0].scale)
            self._scale = rows[0].scale


def processes() -> "PartialState":
    """The processes of this run, as `accelerate launch` (or the caller's own Accelerator) set them up."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # `Accelerator` reads this flag, a bare PartialState does not and would leave CPU processes unconnected.
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def agree(value: str, what: str) -> str:
    """`value`, which must be the same in every process."""
    if len(set(_gather(value))) > 1:
        raise MismatchError(f"{what} differ between processes; load the same model in each of them")
    return value


def _gather(value: Any) -> list[Any]:
    from accelerate.utils import gather_object

    return list(gather_object([value]))


def _progress(items: list[Any], total: int, main: bool) -> Any:
    from tqdm.auto import tqdm

    # disable=None: quiet when the output is not a terminal.
    quiet = None if main else True
    return tqdm(items, total=total, initial=total - len(items), desc="batches", disable=quiet)
