"""One model in this process that can be trained on any task: its trained weights are put in and taken out."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.deltas import Difference, LowRank
from hf_taskvec.algebra.low_rank import singular_triples
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.algebra.vector_constructors import Model
from hf_taskvec.errors import UnsupportedError, some
from hf_taskvec.models.layout import is_peft_model
from hf_taskvec.training.accelerators import SingleProcess
from hf_taskvec.training.settings import ComputePrecision, TrainingSettings
from hf_taskvec.training.token_blocks import TokenBlocks
from hf_taskvec.training.trainable_parts import make_trainable
from hf_taskvec.training.trained_model import TrainingBase, training_dtype
from hf_taskvec.training.training_loop import TrainingLoop, make_optimizer

Weights = dict[str, torch.Tensor]


class TaskTrainer:
    """A model to train, full or with LoRA, and the arithmetic of what is trained.

    What is trained is divided into units: each parameter is one or, with LoRA, each pair of factors. `start` is where
    every task vector begins: the weights of the base or, with LoRA, no change at all.
    """

    def __init__(self, base: TrainingBase, settings: TrainingSettings, precision: ComputePrecision) -> None:
        self.settings, self.precision = settings, precision
        self._accelerator = SingleProcess()
        model: Any = base.load(training_dtype(base.config, settings, precision))
        model.to(self._accelerator.device)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model: Any = make_trainable(model, settings)
        self._trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.units: Mapping[str, tuple[str, ...]] = self._find_units()
        self.start = self.take()

    def _find_units(self) -> dict[str, tuple[str, ...]]:
        if not is_peft_model(self.model):
            return {name: (name,) for name in self._trained}
        ends = (".lora_A.default.weight", ".lora_B.default.weight")
        prefixes = [name.removesuffix(ends[0]) for name in self._trained if name.endswith(ends[0])]
        # Called as the weights that they change: rules may tell an MLP's by its name.
        units: dict[str, tuple[str, ...]] = {f"{each}.weight": (each + ends[0], each + ends[1]) for each in prefixes}
        others = self._trained.keys() - {name for pair in units.values() for name in pair}
        if others:
            raise UnsupportedError(f"rounds of LoRA average factors of linear layers, not {some(sorted(others))}.")
        return units

    # Weights in and out.

    def take(self) -> Weights:
        """A copy of the trained weights, on the CPU."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self._trained.items()}

    def put(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the trained weights."""
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(weights[name])

    def vector(self, base: Model, name: str) -> TaskVector:
        """The task vector of the weights that are in the model."""
        if self.settings.method == "lora":
            return TaskVector.from_adapter(self.model, base=base, name=name)
        return TaskVector.from_finetuned(base, self.model, name=name)

    # Training.

    def train(
        self, blocks: TokenBlocks, seed: int, done: int, until: int, total: int, progress: bool | None
    ) -> list[float]:
        """Make the steps from `done` to `until` of `total`, from the weights that are in the model; their losses.

        AdamW starts anew; the learning rate and the order of the blocks go on where the last round left them.
        """
        settings = dataclasses.replace(self.settings, seed=seed)
        with torch.random.fork_rng([self._accelerator.device] if self._accelerator.device.type == "cuda" else []):
            loop = TrainingLoop(
                self._accelerator,
                self.model,
                make_optimizer(self.model, settings),
                blocks,
                settings,
                self.precision,
                losses=[0.0] * done,
                total=total,
            )
            loop.run(progress, _nothing, until)
        self.model.eval()
        return loop.losses[done:]

    # Arithmetic, unit by unit. A unit's weights are a tuple of tensors: the parameter, or LoRA's A and B.

    def change(self, unit: str, weights: tuple[torch.Tensor, ...], since: tuple[torch.Tensor, ...]) -> tuple[Term, ...]:
        """What leads from the weights `since` to `weights`."""
        if len(weights) == 1:
            return (Term(1.0, Difference(InMemory(since[0]), InMemory(weights[0]))),)
        return (Term(1.0, self._product(unit, weights)), Term(-1.0, self._product(unit, since)))

    def _product(self, unit: str, pair: tuple[torch.Tensor, ...]) -> LowRank:
        a, b = pair
        return LowRank(InMemory(b), InMemory(a), self._scaling(unit))

    def _scaling(self, unit: str) -> float:
        return float(self.model.get_submodule(unit.removesuffix(".weight")).scaling["default"])

    def moved(
        self, unit: str, weights: tuple[torch.Tensor, ...], change: tuple[Term, ...]
    ) -> tuple[tuple[torch.Tensor, ...], float, float]:
        """The weights after a change, rounded once.

        With LoRA also the squared norm of what does not fit into its rank, and that of the whole; 0 and 0 otherwise.
        """
        if len(weights) == 1:
            out = torch.empty_like(weights[0])
            Sum(tuple(out.shape), change, InMemory(weights[0])).into(out, unit)
            return (out,), 0.0, 0.0
        terms = (Term(1.0, self._product(unit, weights)), *change)
        return self._factored(unit, terms)

    def _factored(self, unit: str, terms: tuple[Term, ...]) -> tuple[tuple[torch.Tensor, ...], float, float]:
        """The factors of LoRA's rank that are nearest to a sum.

        A direction that the sum does not need is as LoRA starts: with zeros in B alone, so that it can still be learnt.
        """
        a, b = (self.start[name].clone() for name in self.units[unit])
        b.zero_()
        kept = TaskVector({unit: terms}).terms_of(unit)  # like terms folded
        size = measures.dot(unit, kept, kept)
        if size <= 0.0:
            return (a, b), 0.0, 0.0
        left, values, right = singular_triples(unit, kept, len(a))
        root = (values / self._scaling(unit)).sqrt()
        a[: len(root)], b[:, : len(root)] = (root[:, None] * right).float(), (left * root).float()
        return (a, b), max(0.0, size - values.square().sum().item()), size


def _nothing(_: int) -> None:
    pass
