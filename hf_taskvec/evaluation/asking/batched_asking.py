"""The work of a sweep: batches split over processes, kept in the store, halved when memory runs out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from hf_taskvec.distributed import Processes, processes
from hf_taskvec.errors import BadValueError, MismatchError, TaskVectorError
from hf_taskvec.evaluation.asking.asking_cost import asking_cost
from hf_taskvec.evaluation.asking.batch_plan import BatchPlan, Row, TokenizedPassage, plan_batches, tokenize_passages
from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages, record_key
from hf_taskvec.evaluation.asking.generation import Continuation, Generator
from hf_taskvec.evaluation.asking.scalable_edits import RowScalableEdit, ScalableEdit, identity_at
from hf_taskvec.evaluation.texts.passages import Passage
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.models.fingerprints import full_fingerprint, nameless_hooks
from hf_taskvec.models.model_facts import context_length
from hf_taskvec.models.sharded_weights import is_sharded
from hf_taskvec.progress import progress_bar, progress_line

# Rows of the first attempt. Only the kind of device decides, so that any number of processes agrees.
_FIRST_SIZE = {"cpu": 16}
_FIRST_SIZE_ELSEWHERE = 64
_NO_MEMORY = "memory runs out even for a single passage; use a smaller model or shorter passages"


@dataclass(frozen=True)
class Work:
    """What came of a plan: every row's continuation, and how it was done."""

    rows: dict[Row, Continuation]
    plan: BatchPlan
    halvings: int
    generated: int
    model_seconds: float
    seconds: float


@dataclass(frozen=True)
class Asked:
    """A model's fingerprint, the passages in its tokens, and what it answered."""

    fingerprint: str
    passages: tuple[TokenizedPassage, ...]
    work: Work


def ask(
    model: Any,
    edit: ScalableEdit,
    scales: Sequence[float],
    *,
    passages: Sequence[Passage],
    protocol: Protocol,
    tokenizer: Any,
    store: FinishedPassages,
    batch_size: int | None = None,
    likelihood: bool = True,
    label: str = "batches",
    progress: bool | None = None,
) -> Asked:
    """All passages through one model at every λ, each from the store if it is there.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The model that is asked.
        edit (`ScalableEdit`):
            Sets λ.
        scales (`Sequence[float]`):
            The values of λ.
        passages (`Sequence[Passage]`):
            What is asked.
        protocol (`Protocol`):
            How it is asked.
        tokenizer (`PreTrainedTokenizerBase`):
            Of the model.
        store (`FinishedPassages`):
            Keeps what is finished.
        batch_size (`int`, *optional*):
            Rows in one batch; found automatically without it.
        likelihood (`bool`, *optional*, defaults to `True`):
            Also ask for the likelihood of the true continuations.
        label (`str`, *optional*, defaults to `"batches"`):
            Of the progress bar.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.
    """
    tokenized = tokenize_passages(passages, protocol, tokenizer, model.config)
    return ask_tokenized(
        model,
        edit,
        scales,
        passages=tokenized,
        protocol=protocol,
        tokenizer=tokenizer,
        store=store,
        batch_size=batch_size,
        likelihood=likelihood,
        label=label,
        progress=progress,
    )


def ask_tokenized(
    model: Any,
    edit: ScalableEdit,
    scales: Sequence[float],
    *,
    passages: Sequence[TokenizedPassage],
    protocol: Protocol,
    tokenizer: Any,
    store: FinishedPassages,
    batch_size: int | None = None,
    likelihood: bool = True,
    label: str = "batches",
    progress: bool | None = None,
) -> Asked:
    """`ask` for passages that are in the model's tokens already, whose lengths the caller has chosen.

    Where `new_tokens` is 0, nothing is generated: the likelihood of the true text is all that is asked for.
    """
    tokenized = tuple(passages)
    context = context_length(model.config)
    fingerprint = _agreed(full_fingerprint(model))
    asked = fingerprint
    if nameless_hooks(model):  # what they do may be something else the next time: nothing that is kept is found again
        asked += processes().gather(uuid4().hex)[0]
    keys = {
        Row(scale, i): record_key(asked, *identity_at(edit, scale), passage, protocol)
        for scale in scales
        for i, passage in enumerate(tokenized)
    }
    generator = Generator(model, tokenizer, protocol.decoding, protocol.seed, likelihood)
    with generator.prepared():
        work = _run(generator, edit, tokenized, scales, keys, store, batch_size, context, label, progress)
    return Asked(fingerprint, tokenized, work)


def _run(
    generator: Generator,
    edit: ScalableEdit,
    passages: Sequence[TokenizedPassage],
    scales: Sequence[float],
    keys: dict[Row, str],
    store: FinishedPassages,
    batch_size: int | None,
    context: int | None,
    label: str,
    progress: bool | None,
) -> Work:
    """Every passage at every λ.

    Batches are formed over *all* rows before processes share them, so the number of processes does not change
    the composition of a batch. The first batch of every process is the trial: if memory runs out on any, all
    halve the batch size together, and none keeps what it made at the larger one. A later shortage halves that
    one batch only, and the recorded plan says so.
    """
    begin = time.perf_counter()
    state = processes()
    mixed = isinstance(edit, RowScalableEdit)
    size = _FIRST_SIZE.get(generator.model.device.type, _FIRST_SIZE_ELSEWHERE) if batch_size is None else batch_size
    # A rank may see files that another does not (no shared disk): what anyone finished is finished.
    done: dict[str, Continuation] = {}
    for part in state.gather(store.found(keys.values(), generator.likelihood)):
        done.update(part)
    job, told = _Job(generator, edit, passages, keys, store, done), False
    with _progress_bar(label, state, progress) as bar:
        while True:
            plan = plan_batches(passages, scales, size, mixed=mixed, context=context)
            # Processes that hold parts of a model call it together, so each of them asks everything.
            together = any(is_sharded(weight) for weight in generator.model.parameters())
            first, step = (0, 1) if together else (state.process_index, state.num_processes)
            numbers = range(first, len(plan.batches), step)
            mine = [number for number in numbers if job.pending(plan.batches[number])]
            if not told:
                told = _tell(label, job, [plan.batches[number] for number in mine], len(done), progress)
            bar.reset(len(mine))
            trial = job.attempt(plan.batches[mine[0]]) if mine else {}
            if all(state.gather(trial is not None)):
                break
            if size == 1:
                raise BadValueError(_NO_MEMORY)
            size = max(1, size // 2)
        job.keep(trial or {})
        bar.update(min(1, len(mine)))
        for number in mine[1:]:
            job.do(number, plan.batches[number])
            bar.update()
    errors = [error for error in state.gather(job.error) if error]
    if errors:
        raise job.raised or BadValueError(f"another process failed: {errors[0]}")
    for part in state.gather({key: done[key] for key in job.fresh}):
        done.update(part)
    halved: dict[int, list[tuple[Row, ...]]] = {}
    for part in state.gather(job.halved):
        halved.update(part)
    counts = state.gather((len(job.fresh), generator.model_seconds))
    return Work(
        rows={row: done[key] for row, key in keys.items()},
        plan=plan.with_halved(halved),
        halvings=sum(len(parts) - 1 for parts in halved.values()),
        generated=sum(count[0] for count in counts),
        model_seconds=max(count[1] for count in counts),
        seconds=time.perf_counter() - begin,
    )


class _Job:
    """One process's share of the work."""

    def __init__(
        self,
        generator: Generator,
        edit: ScalableEdit,
        passages: Sequence[TokenizedPassage],
        keys: dict[Row, str],
        store: FinishedPassages,
        done: dict[str, Continuation],
    ) -> None:
        self.generator, self.edit, self.passages, self.keys = generator, edit, passages, keys
        self.store, self.done = store, done
        self.fresh: list[str] = []
        self.halved: dict[int, list[tuple[Row, ...]]] = {}
        self.raised: TaskVectorError | None = None
        self._scale: float | None = None

    @property
    def error(self) -> str:
        return str(self.raised) if self.raised else ""

    def pending(self, batch: Sequence[Row]) -> list[Row]:
        """The rows of a batch that are not finished yet."""
        return [row for row in batch if self.keys[row] not in self.done]

    def attempt(self, batch: Sequence[Row]) -> dict[str, Continuation] | None:
        """The pending rows of a batch; `None` if memory ran out.

        Our own errors are kept until all processes can be told of them; nothing more is done until then.
        """
        from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

        rows = self.pending(batch)
        if self.raised or not rows:
            return {}
        try:
            found = self.generator.run([self.passages[row.passage] for row in rows], lambda part: self._set(rows[part]))
        except TaskVectorError as error:
            self.raised = error
            return {}
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            clear_device_cache(garbage_collection=True)
            return None
        return {self.keys[row]: c for row, c in zip(rows, found, strict=True)}

    def keep(self, records: dict[str, Continuation]) -> None:
        """Finished rows, on disk before this returns."""
        self.store.add(records)
        self.done.update(records)
        self.fresh += records

    def do(self, number: int, batch: tuple[Row, ...]) -> None:
        """Do a batch of the plan, halved as often as memory runs out."""
        parts, left = [], [batch]
        while left:
            part = left.pop(0)
            records = self.attempt(part)
            if records is not None:
                self.keep(records)
                parts.append(part)
            elif len(part) > 1:
                middle = len(part) // 2
                left[:0] = [part[:middle], part[middle:]]
            else:
                self.raised = BadValueError(_NO_MEMORY)
        if len(parts) > 1:
            self.halved[number] = parts

    def _set(self, rows: Sequence[Row]) -> None:
        if isinstance(self.edit, RowScalableEdit):
            self.edit.set_row_scales([row.scale for row in rows])
        elif self._scale != rows[0].scale:  # an edit in place may rewrite all weights: once for each λ
            self.edit.set_scale(rows[0].scale)
            self._scale = rows[0].scale


def _tell(label: str, job: _Job, batches: Sequence[Sequence[Row]], kept: int, progress: bool | None) -> bool:
    """Say what is about to be asked, and roughly how long it takes and how much memory, before any of it."""
    rows = [[job.passages[row.passage] for row in job.pending(batch)] for batch in batches]
    if rows:
        cost = asking_cost(job.generator.model, rows, job.generator.likelihood)
        already = f", {kept:,} are kept from before" if kept else ""
        progress_line(f"{label}: {cost}{already}", progress, cost.seconds)
    return True


def _agreed(fingerprint: str) -> str:
    """The model's fingerprint, which must be the same in every process."""
    if len(set(processes().gather(fingerprint))) > 1:
        raise MismatchError("the model's weights differ between processes; load the same model in each of them")
    return fingerprint


def _progress_bar(label: str, state: Processes, progress: bool | None) -> Any:
    """The one progress bar, on the main process; it counts that process's share."""
    if state.num_processes > 1:
        label += f" (process 1 of {state.num_processes})"
    return progress_bar((), label, progress, unit="batch")
