"""The loop: batches formed over all processes, gradients accumulated, one AdamW step each."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.errors import DivergedError
from hf_taskvec.progress import progress_bar
from hf_taskvec.training.accelerators import TrainingAccelerator, whole_tensor
from hf_taskvec.training.settings import ComputePrecision, TrainingSettings
from hf_taskvec.training.text_losses import NEXT_TOKEN, SecondText, TextLoss
from hf_taskvec.training.token_blocks import TokenBlocks, epoch_order, mixed_seed, process_micro_batches
from hf_taskvec.training.trainable_parts import make_trainable

if TYPE_CHECKING:
    from accelerate import Accelerator

# Reading a loss from a GPU waits for it; so there it is done for several steps at once.
_STEPS_BETWEEN_READING = {"cpu": 1}
_ELSEWHERE = 20


def make_optimizer(model: torch.nn.Module, settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW over what is trainable; weight decay on matrices and embeddings, none on biases and norms."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Fused is three times as fast on a CPU, and the fastest on a GPU.
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.learning_rate, fused=True)


def start_training(
    accelerator: "Accelerator",
    model: Any,
    blocks: TokenBlocks,
    settings: TrainingSettings,
    precision: ComputePrecision,
    loss: TextLoss = NEXT_TOKEN,
    second: SecondText | None = None,
) -> "TrainingLoop":
    """A loop before its first step, over all processes."""
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = make_trainable(model, settings)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, settings))
    return TrainingLoop(accelerator, model, optimizer, blocks, settings, precision, loss=loss, second=second)


@dataclass(frozen=True)
class _Batch:
    """Rows of blocks that one step learns from, over all processes."""

    blocks: TokenBlocks
    rows: torch.Tensor
    loss: TextLoss

    @property
    def share(self) -> float:
        """What a sum over some of the rows is multiplied by, to be that part of the weighted mean over all of them."""
        return self.loss.weight / self.loss.count(self.blocks, self.rows)

    def parts(self, rank: int, processes: int, size: int) -> list[torch.Tensor]:
        """A process's micro-batches."""
        return process_micro_batches(self.rows, rank, processes, size)


@dataclass
class TrainingLoop:
    """A training run: its model and optimiser, and the losses so far."""

    accelerator: TrainingAccelerator
    model: Any
    optimizer: Any
    blocks: TokenBlocks
    settings: TrainingSettings
    precision: ComputePrecision
    losses: list[float] = field(default_factory=list)
    #: how many steps there are, if not as many as the epochs have
    total: int | None = None
    #: of the blocks
    loss: TextLoss = NEXT_TOKEN
    #: text of which each step takes a batch as well
    second: SecondText | None = None
    #: loss and gradient norm of the steps whose numbers were not read yet
    _unread: list[torch.Tensor] = field(default_factory=list)

    @property
    def steps_in_epoch(self) -> int:
        """Steps of the optimiser in one epoch; its last batch may be smaller."""
        return -(-len(self.blocks) // self.settings.batch_size)

    @property
    def steps(self) -> int:
        """Steps of the optimiser in all."""
        return self.total or self.settings.epochs * self.steps_in_epoch

    @property
    def plain(self) -> Any:
        """The model without accelerate's wrappers."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def run(self, progress: bool | None, after_step: Callable[[int], None], until: int | None = None) -> float:
        """Train from where the losses end to the last step, or until so many are done; the speed, in tokens per second.

        `after_step(done)` is called in every process after each step, with the number of steps done.
        """
        stop = self.steps if until is None else until
        self.model.train()
        every = _STEPS_BETWEEN_READING.get(self.accelerator.device.type, _ELSEWHERE)
        tokens, began, start = 0, time.perf_counter(), len(self.losses)
        order = torch.empty(0)
        with progress_bar((), "Training", progress, stop, initial=start, unit="step") as bar:
            for step in range(start, stop):
                epoch, index = divmod(step, self.steps_in_epoch)
                if index == 0 or step == start:
                    order = epoch_order(len(self.blocks), self.settings.seed, epoch)
                rows = order[index * self.settings.batch_size :][: self.settings.batch_size]
                self._step(step, rows)
                tokens += rows.numel() * self.blocks.length
                if (step + 1) % every == 0 or step + 1 == stop:
                    self.read_losses()
                    speed = tokens / (time.perf_counter() - began)
                    state = f"epoch {epoch + 1}, loss {self.losses[-1]:.3f}, {speed:,.0f} tokens/s"
                    bar.set_postfix_str(state, refresh=False)
                bar.update()
                after_step(step + 1)
        return tokens / (time.perf_counter() - began)

    def _step(self, step: int, rows: torch.Tensor) -> None:
        accelerator, settings = self.accelerator, self.settings
        rank, processes = accelerator.process_index, accelerator.num_processes
        # Random numbers (dropout) are those of the step, so a resumed run has them without storing anything.
        torch.manual_seed(mixed_seed(settings.seed, step, rank))
        rate = settings.learning_rate_at(step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        micro = settings.micro_batch_size or -(-settings.batch_size // processes)
        parts = [(batch, part) for batch in self._batches(step, rows) for part in batch.parts(rank, processes, micro)]
        total = torch.zeros((), device=accelerator.device)
        for number, (batch, part) in enumerate(parts, 1):
            last = number == len(parts)
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                # Processes average their gradients, so each one's share of the mean counts for all of them.
                loss = self._summed(batch, part) * batch.share
                (loss * processes).backward()
            total += loss.detach()
        norm = accelerator.clip_grad_norm_(self._trained(), settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._unread.append(torch.stack([total, whole_tensor(norm).to(total.device)]))

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _batches(self, step: int, rows: torch.Tensor) -> "list[_Batch]":
        """What a step learns from: the rows of the blocks, and some of the second text, if there is one."""
        batches = [_Batch(self.blocks, rows, self.loss)]
        if self.second:
            others = self.second.blocks
            size = min(len(others), self.settings.batch_size)
            epoch, index = divmod(step, -(-len(others) // size))
            order = epoch_order(len(others), mixed_seed(self.settings.seed, 1), epoch)
            batches.append(_Batch(others, order[index * size :][:size], self.second.loss))
        return batches

    def _summed(self, batch: "_Batch", part: torch.Tensor) -> torch.Tensor:
        """The summed loss of a micro-batch.

        A process whose share is empty computes a block of which nothing counts: the others wait for it when gradients
        (and, sharded, weights) are exchanged.
        """
        rows = part if len(part) else batch.rows[:1]
        ids, labels = (each[rows].to(self.accelerator.device) for each in (batch.blocks.ids, batch.blocks.labels))
        with self._autocast():
            said = batch.loss.of(self.model, ids)
        return batch.loss.summed(said, ids, labels) if len(part) else said.sum() * 0.0

    def _autocast(self) -> Any:
        if self.precision == "bf16":
            return torch.autocast(self.accelerator.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def read_losses(self) -> None:
        """Bring the losses up to date, and stop if one is not a number. All processes find the same."""
        if not self._unread:
            return
        # Each process has its share of a loss. The norms are the same in all: their sum is finite where each is.
        numbers = self.accelerator.reduce(torch.stack(self._unread), "sum")
        self._unread.clear()
        for loss, norm in numbers.tolist():
            step = len(self.losses) + 1
            if not math.isfinite(loss) or not math.isfinite(norm):
                what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient's norm is {norm}"
                raise DivergedError(
                    f"the {what} at step {step} of {self.steps}; nothing was saved. A lower learning_rate "
                    f"(it is {self.settings.learning_rate:g}) or a longer warmup usually helps."
                )
            self.losses.append(loss)

    def epoch_losses(self) -> tuple[float, ...]:
        """The mean loss of each epoch over its tokens."""
        found = []
        for epoch in range(self.settings.epochs):
            order = epoch_order(len(self.blocks), self.settings.seed, epoch)
            counts = [self.blocks.targets(rows) for rows in order.split(self.settings.batch_size)]
            losses = self.losses[epoch * self.steps_in_epoch :][: self.steps_in_epoch]
            found.append(sum(map(lambda n, x: n * x, counts, losses)) / max(1, sum(counts)))
        return tuple(found)
