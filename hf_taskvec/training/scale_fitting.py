"""`fit_scales`: coefficients of several task vectors, learned by gradient on text."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hf_taskvec.algebra.parameter_names import Grouping, group_of
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits_live
from hf_taskvec.application.merged_edit import MergedEdit
from hf_taskvec.application.to_live_model import edit
from hf_taskvec.distributed import Processes, processes
from hf_taskvec.errors import BadValueError, DivergedError
from hf_taskvec.models.live_model import live_weights
from hf_taskvec.models.model_facts import context_length, evaluation_mode, input_device, vocabulary_size
from hf_taskvec.progress import progress_bar
from hf_taskvec.training.coefficients import CoefficientTable, Start, coefficient_gradients
from hf_taskvec.training.fitted_scales import Ending, FittedScales
from hf_taskvec.training.objectives import Objective, TextBatch, token_losses
from hf_taskvec.training.token_blocks import TokenBlocks, epoch_order, mixed_seed, read_blocks

# The "epoch" whose order of blocks tells which are held out: none that is trained.
_HELD_OUT = -1

# Adam's memory is shorter than usual, since there are few steps: with 0.9 and 0.999 two planted coefficients were off
# by 0.03 after 60 steps, with these by 0.001.
_BETAS = (0.8, 0.95)


def fit_scales(
    model: Any,
    vectors: Mapping[str, TaskVector],
    objective: Objective,
    *,
    by: Grouping = "tensor",
    start: Start = 0.0,
    steps: int = 60,
    learning_rate: float = 0.1,
    weight_decay: float = 0.0,
    validation: float = 0.2,
    evaluate_every: int = 5,
    patience: int = 3,
    batch_size: int = 4,
    seed: int = 0,
    progress: bool | None = None,
) -> FittedScales:
    """Coefficients of task vectors, one for each vector and group of parameters, learned by gradient on text.

    The edit is `θ + Σ_k Σ_g c[k, g] · v_k[g]`, as in aTLAS (Zhang et al. 2024, arXiv 2407.02880), which learns one
    coefficient for each parameter block. There are few of them, so a few dozen steps of Adam on little text suffice,
    with a learning rate that falls to 0 in a straight line. Low-rank vectors stay low-rank. The memory is that of the
    model, a copy of what the vectors change in it, and one parameter's gradient at a time.

    Some blocks of each text are held out. Every few steps the objective is evaluated on them; learning ends when that
    no longer helps, and the coefficients are those of the best such step. The start is one of them: the result is
    never worse than the start on what was held out.

    Batches are formed before processes share them, so under `accelerate launch` any number of processes makes the same
    steps, up to the order of summation; every process returns the same coefficients. A run that is killed begins again.

    Args:
        model (`PreTrainedModel`):
            A live causal language model, which the vectors fit; not quantised. It is without dropout meanwhile, and
            afterwards as it was, bit for bit.
        vectors (`Mapping[str, TaskVector]`):
            The vectors, under the names that the result shall have for them.
        objective (`Objective`):
            What to make small, and on which texts: a `ForgetObjective`, a `MergeObjective`, or one's own.
        by (`str`, *optional*, defaults to `"tensor"`):
            What has a coefficient of its own in each vector: `"tensor"`; `"layer"`, and each tensor outside of the
            layers; `"kind"`, what has the same place in all layers, such as `mlp.up_proj`; `"vector"`, the whole.
        start (`float` or `Mapping`, *optional*, defaults to 0.0):
            The coefficients to start from: one for all, one for each vector by its name, or a table like
            `FittedScales.coefficients`.
        steps (`int`, *optional*, defaults to 60):
            How many steps to make at most.
        learning_rate (`float`, *optional*, defaults to 0.1):
            About how far a coefficient moves in the first steps.
        weight_decay (`float`, *optional*, defaults to 0.0):
            Pulls the coefficients towards the start: by this share of their distance, times the learning rate, in each
            step.
        validation (`float`, *optional*, defaults to 0.2):
            The share of each text's blocks to hold out, at least one block. With 0 all are trained on, all steps are
            made and the last one is kept.
        evaluate_every (`int`, *optional*, defaults to 5):
            Steps between evaluations on what is held out.
        patience (`int`, *optional*, defaults to 3):
            After how many evaluations without a better one learning ends.
        batch_size (`int`, *optional*, defaults to 4):
            How many blocks of each text a step takes, over all processes.
        seed (`int`, *optional*, defaults to 0):
            Of the blocks' order and of which are held out. torch's own random numbers are neither used nor set.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `FittedScales`: The coefficients, the vector that they make, and how learning went.

    Raises:
        `BadValueError`: If an argument makes no sense, or there is nothing to learn from.
        `MissingNameError`: If there is no such grouping, or `start` names a vector that is not there.
        `MismatchError`: If a vector does not fit the model, or the model cannot read the blocks.
        `UnsupportedError`: If the model is quantised, offloaded, compiled or wrapped.
        `DivergedError`: If a loss or a gradient is not a finite number. The model is as it was.

    Example:
        >>> from hf_taskvec.training import ForgetObjective, fit_scales
        >>> objective = ForgetObjective(forget_blocks, keep_blocks, target=3.1)  # doctest: +SKIP
        >>> fit = fit_scales(model, {"hp1": hp1, "hp2": hp2}, objective, by="layer")  # doctest: +SKIP
        >>> fit.vector.apply("me/phi-1_5-books", "out/")  # doctest: +SKIP

    """
    began = time.perf_counter()
    if not isinstance(model, torch.nn.Module):
        raise BadValueError(f"fit_scales() takes a live model, not a {type(model).__name__}. Load it first.")
    table = CoefficientTable(_checked_vectors(vectors, by), by)
    _check_counts(steps=steps, evaluate_every=evaluate_every, patience=patience, batch_size=batch_size)
    _check_rates(learning_rate, weight_decay, validation)
    first = table.at(start)
    weights = live_weights(model)
    for vector in vectors.values():
        check_fits_live(vector, model, weights)
    table.check_length()
    # What any of the vectors changes: their sum would lack what cancels in it.
    covering = TaskVector({name: vector.terms_of(name) for vector in vectors.values() for name in vector})
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        placed = stack.enter_context(edit(covering, model, 0.0))
        assert isinstance(placed, MergedEdit)
        texts = _Texts.read(model, objective, validation, batch_size, seed)
        gradient = stack.enter_context(coefficient_gradients(model, table))
        placed.set_vector(table.vector(first))
        placed.set_scale(1.0)
        run = _Run(model, objective, texts, placed, table, gradient)
        kept, ended = run.learn(first, steps, learning_rate, weight_decay, evaluate_every, patience, progress)
    return FittedScales(
        vector=table.vector(run.tried[kept]),
        coefficients=table.named(run.tried[kept]),
        by=by,
        losses=tuple(run.losses),
        validation=tuple(run.validated.items()),
        kept_step=kept,
        ended=ended,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Text:
    """One of the objective's texts: its blocks, which of them are trained on, and which held out."""

    name: str
    blocks: TokenBlocks
    trained: torch.Tensor
    held_out: torch.Tensor
    seed: int
    untouched: torch.Tensor | None

    def step_rows(self, step: int, batch_size: int) -> torch.Tensor:
        """The blocks of a step: epoch after epoch, each in an order of its own."""
        epoch, index = divmod(step, -(-len(self.trained) // batch_size))
        order = epoch_order(len(self.trained), self.seed, epoch)
        return self.trained[order[index * batch_size :][:batch_size]]

    def batch(self, rows: torch.Tensor, device: torch.device) -> TextBatch:
        """Some of the blocks, where the model takes its input."""
        untouched = None if self.untouched is None else self.untouched[rows].to(device)
        ids, labels = (each[rows].to(device) for each in (self.blocks.ids, self.blocks.labels))
        return TextBatch(self.name, rows, ids, labels, untouched)


@dataclass(frozen=True)
class _Texts:
    """All texts of the objective, and how their blocks are shared."""

    each: tuple[_Text, ...]
    batch_size: int
    device: torch.device
    state: Processes

    @classmethod
    def read(cls, model: Any, objective: Objective, validation: float, batch_size: int, seed: int) -> "_Texts":
        """The blocks, checked and split. The model must be untouched."""
        state, device, found = processes(), input_device(model), []
        if not objective.texts:
            raise BadValueError("the objective has no texts to learn from.")
        for number, (name, data) in enumerate(objective.texts.items()):
            blocks = read_blocks(data, vocabulary_size(model.config), context_length(model.config))
            own = mixed_seed(seed, number)
            order = epoch_order(len(blocks), own, _HELD_OUT)
            count = max(1, round(validation * len(blocks))) if validation else 0
            if count >= len(blocks):
                raise BadValueError(
                    f"the text {name!r} has too few blocks ({len(blocks)}) to train on some and hold out "
                    f"{validation:g} of them. Give more or shorter blocks, or validation=0."
                )
            is_compared = name in objective.compared
            untouched = _untouched_losses(model, blocks, batch_size, device, state) if is_compared else None
            found.append(_Text(name, blocks, order[count:].sort().values, order[:count].sort().values, own, untouched))
        return cls(tuple(found), batch_size, device, state)

    def step(self, step: int) -> Iterator[tuple[TextBatch, float]]:
        """This process's share of a step's blocks, with what each of them counts."""
        for text in self.each:
            rows = text.step_rows(step, self.batch_size)
            mine = rows[self.state.process_index :: self.state.num_processes]
            if len(mine):
                yield text.batch(mine, self.device), 1.0 / len(rows)

    def held_out(self) -> Iterator[tuple[TextBatch, float]]:
        """This process's share of all blocks that are held out, with what each of them counts."""
        for text in self.each:
            mine = text.held_out[self.state.process_index :: self.state.num_processes]
            for rows in mine.split(self.batch_size) if len(mine) else ():
                yield text.batch(rows, self.device), 1.0 / len(text.held_out)


class _Run:
    """Learning, with what has been measured so far."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        texts: _Texts,
        placed: MergedEdit,
        table: CoefficientTable,
        gradient: torch.Tensor,
    ) -> None:
        self._model, self._objective, self._texts = model, objective, texts
        self._placed, self._table, self._gradient = placed, table, gradient
        self.losses: list[float] = []
        #: the validation loss, and the coefficients, after so many steps
        self.validated: dict[int, float] = {}
        self.tried: dict[int, torch.Tensor] = {}

    def learn(
        self,
        start: torch.Tensor,
        steps: int,
        learning_rate: float,
        weight_decay: float,
        evaluate_every: int,
        patience: int,
        progress: bool | None,
    ) -> tuple[int, Ending]:
        """Make the steps; the number of the one that is kept, and why there were no more."""
        values = start.clone()
        optimizer = torch.optim.Adam([values], lr=learning_rate, betas=_BETAS)
        validates = any(len(text.held_out) for text in self._texts.each)
        with progress_bar((), "Fitting", progress, steps, unit="step") as bar:
            for step in range(steps + 1):
                last = step == steps
                if validates and (step % evaluate_every == 0 or last):
                    self.tried[step] = values.clone()
                    self.validated[step] = self._validation_loss(step)
                    best = min(self.validated, key=lambda each: (self.validated[each], each))
                    if sum(each > best for each in self.validated) >= patience and not last:
                        return best, "the validation loss no longer fell"
                if last:
                    break
                values.grad = self._step_gradient(step)
                rate = learning_rate * (1.0 - step / steps)
                optimizer.param_groups[0]["lr"] = rate
                values.sub_(values - start, alpha=rate * weight_decay)
                optimizer.step()
                self._placed.set_vector(self._table.vector(values))
                bar.set_postfix_str(f"loss {self.losses[-1]:.3f}", refresh=False)
                bar.update()
        if not validates:
            self.tried[steps] = values
            return steps, "all steps were made"
        return best, "all steps were made"

    def _step_gradient(self, step: int) -> torch.Tensor:
        self._gradient.zero_()
        total = 0.0
        for batch, share in self._texts.step(step):
            loss = self._objective(self._model, batch).sum() * share
            if loss.requires_grad:  # an objective may give a constant, where a batch shall not count
                loss.backward()
            total += loss.item()
        *found, total = self._over_all([*self._gradient.tolist(), total])
        self._check_finite(total, "loss", step)
        self._check_finite(sum(map(abs, found)), "gradient's norm", step)
        self.losses.append(total)
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def _validation_loss(self, step: int) -> float:
        with torch.no_grad():
            shares = [(self._objective(self._model, b).sum() * s).item() for b, s in self._texts.held_out()]
        (total,) = self._over_all([math.fsum(shares)])
        self._check_finite(total, "validation loss", step)
        return total

    def _over_all(self, numbers: list[float]) -> list[float]:
        """The sums over all processes, the same bits in each: what follows from them must be the same everywhere."""
        state = self._texts.state
        total = state.all_reduce(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        state.broadcast(total)
        return total.tolist()

    def _check_finite(self, number: float, what: str, step: int) -> None:
        if not math.isfinite(number):
            raise DivergedError(
                f"the {what} is {number} after {step} steps; the model is as it was. A lower learning_rate, or a start "
                "nearer to 0, usually helps; check the objective, too."
            )


def _untouched_losses(
    model: Any, blocks: TokenBlocks, batch_size: int, device: torch.device, state: Processes
) -> torch.Tensor:
    """The losses of all tokens, of which each process computes some blocks."""
    mine = torch.arange(len(blocks))[state.process_index :: state.num_processes]
    found = torch.zeros(len(blocks), blocks.length - 1, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for rows in mine.split(batch_size) if len(mine) else ():
            losses = token_losses(model, blocks.ids[rows].to(device), blocks.labels[rows].to(device))
            found[rows] = losses.double().cpu()
    return state.all_reduce(found)


def _checked_vectors(vectors: Any, by: Grouping) -> Mapping[str, TaskVector]:
    if not isinstance(vectors, Mapping) or isinstance(vectors, TaskVector):
        raise BadValueError("vectors must be a mapping from names to task vectors, {'hp1': hp1, ...}.")
    if not vectors:
        raise BadValueError("there are no vectors whose coefficients could be learned. Give one at least.")
    for name, vector in vectors.items():
        if not isinstance(name, str) or not isinstance(vector, TaskVector):
            raise BadValueError(f"vectors[{name!r}] is a {type(vector).__name__}; names must lead to task vectors.")
        if not len(vector):
            raise BadValueError(f"the vector {name!r} changes nothing, so it has no coefficient.")
    group_of("", by)  # refuses what is no grouping
    return dict(vectors)


def _check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise BadValueError(f"{name}={count!r} must be a whole number of at least 1.")


def _check_rates(learning_rate: float, weight_decay: float, validation: float) -> None:
    if not 0.0 < learning_rate < math.inf:
        raise BadValueError(f"learning_rate={learning_rate!r} must be above 0.")
    if not 0.0 <= weight_decay * learning_rate <= 1.0:
        raise BadValueError(f"weight_decay={weight_decay!r} must be at least 0, and times the learning rate at most 1.")
    if not 0.0 <= validation < 1.0:
        raise BadValueError(f"validation={validation!r}: the share of blocks to hold out is at least 0 and below 1.")
