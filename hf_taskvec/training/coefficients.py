"""One coefficient for each vector and group of parameters: the vector that they stand for, and their gradient.

The weights are `θ + Σ_k Σ_g c[k, g] · v_k[g]`, so `∂L/∂c[k, g]` is the sum of `<∂L/∂θ_p, v_k[p]>` over the parameters p
of the group. An ordinary backward pass makes each `∂L/∂θ_p`; as soon as one is there, its inner products are taken and
it is freed. So learning takes the memory of one model, of one gradient, and of what the vectors hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import torch

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.expressions import LONGEST
from hf_taskvec.algebra.parameter_names import Grouping, group_of
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean, some
from hf_taskvec.merging import combine
from hf_taskvec.merging.option_checks import checked_number
from hf_taskvec.models.live_model import live_weights

Coefficients = Mapping[str, Mapping[str, float]]
Start = float | Mapping[str, float | Mapping[str, float]]


@dataclass(frozen=True)
class CoefficientTable:
    """The coefficients' places in a flat tensor: by vector, and by group in the order of its parameters."""

    vectors: Mapping[str, TaskVector]
    by: Grouping

    @cached_property
    def places(self) -> dict[tuple[str, str], int]:
        """From the vector's name and the group to the place."""
        pairs = [(k, group_of(name, self.by)) for k, vector in self.vectors.items() for name in vector]
        return {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}

    def at(self, start: Start) -> torch.Tensor:
        """The coefficients that a caller gave: one for all, one for each vector, or a table for each vector."""
        if isinstance(start, Mapping):
            for name in start:
                if name not in self.vectors:
                    raise MissingNameError(f"start has {name!r}, which is no vector.{did_you_mean(name, self.vectors)}")
        found = [self._start(start, vector, group) for vector, group in self.places]
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def _start(self, start: Start, vector: str, group: str) -> float:
        if not isinstance(start, Mapping):
            return checked_number("start", start)
        if vector not in start:
            raise BadValueError(f"start has no number for {vector!r}. Give one for each vector.")
        of_vector = start[vector]
        if not isinstance(of_vector, Mapping):
            return checked_number(f"start[{vector!r}]", of_vector)
        if group not in of_vector:
            raise BadValueError(f"start has no number for {group!r} of {vector!r}, a group by={self.by!r}.")
        return checked_number(f"start[{vector!r}][{group!r}]", of_vector[group])

    def named(self, values: torch.Tensor) -> dict[str, dict[str, float]]:
        """The coefficients by vector and group, in six digits: what they stand for is written in an expression."""
        found: dict[str, dict[str, float]] = {name: {} for name in self.vectors}
        for (vector, group), value in zip(self.places, values.tolist(), strict=True):
            found[vector][group] = float(f"{value:.6g}")
        return found

    def vector(self, values: torch.Tensor) -> TaskVector:
        """The vector that the coefficients stand for, lazy: an expression of the rule `learned`."""
        tables = list(self.named(values).values())
        return combine(list(self.vectors.values()), "learned", scales=tables, by=self.by)

    def check_length(self) -> None:
        """Refuse more coefficients than an expression can hold: the vector could be saved, and not loaded again."""
        longest = len(self.vector(torch.full((len(self.places),), -1.23456e-10, dtype=torch.float64)).expression)
        if longest > LONGEST:
            raise BadValueError(
                f"{len(self.places)} coefficients by={self.by!r} are too many: the expression of the vector would have "
                f"{longest:,} characters, and {LONGEST:,} are the most. Take by='layer' or by='kind', or leave "
                "parameters out with vector.filter(...)."
            )


@contextmanager
def coefficient_gradients(model: torch.nn.Module, table: CoefficientTable) -> Iterator[torch.Tensor]:
    """A tensor to which each backward pass inside the block adds the gradient of the coefficients.

    Only what a vector changes has a gradient inside the block, and keeps none. Afterwards each parameter has what it
    had before: whether it requires a gradient, and its gradient.

    Args:
        model (`torch.nn.Module`):
            The model, which the vectors fit.
        table (`CoefficientTable`):
            The coefficients.

    Yields:
        `torch.Tensor`: The gradient, fp64 on the CPU, 0 at first. The caller sets it to 0 again for the next step.

    Raises:
        `UnsupportedError`: If a vector changes what has no gradient: a buffer, or what accelerate has offloaded.

    """
    total = torch.zeros(len(table.places), dtype=torch.float64, device="cpu")
    changed = _changed_parameters(model, table.vectors)
    lock = Lock()  # parameters on several devices get their gradients in several threads
    before = [(each, each.requires_grad, each.grad) for each in model.parameters()]

    def watch(name: str, parameter: torch.nn.Parameter) -> torch.utils.hooks.RemovableHandle:
        owners = [key for key, vector in table.vectors.items() if name in vector]
        terms = [table.vectors[key].terms_of(name) for key in owners]
        places = torch.tensor([table.places[key, group_of(name, table.by)] for key in owners], device="cpu")

        def take(of: torch.Tensor) -> None:
            gradient, of.grad = of.grad, None
            if gradient is not None:
                found = measures.products_with(gradient.detach(), terms)
                with lock:
                    total[places] += torch.tensor(found, dtype=torch.float64, device="cpu")

        return parameter.register_post_accumulate_grad_hook(take)

    try:
        with ExitStack() as hooks, torch.enable_grad():
            for parameter, _, _ in before:
                parameter.grad = None
                parameter.requires_grad_(False)
            for name, parameter in changed.items():
                parameter.requires_grad_(True)
                hooks.callback(watch(name, parameter).remove)
            yield total
    finally:
        for parameter, required, gradient in before:
            parameter.requires_grad_(required)
            parameter.grad = gradient


def _changed_parameters(model: torch.nn.Module, vectors: Mapping[str, TaskVector]) -> dict[str, torch.nn.Parameter]:
    """The live parameters that some vector changes; tied ones once."""
    weights = live_weights(model)
    names = dict.fromkeys(name for vector in vectors.values() for name in vector)
    found = {name: weights[name].parameter for name in names}
    without: Sequence[str] = [name for name, each in found.items() if each is None or each.is_meta]
    if without:
        raise UnsupportedError(
            f"{some(without)}: buffers, parts of fused parameters and offloaded weights have no gradient here. Leave "
            "them out with vector.filter(exclude=...), or load the model whole."
        )
    return {name: parameter for name, parameter in found.items() if parameter is not None}
