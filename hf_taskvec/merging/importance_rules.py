"""Importance: a vector whose elements count as much as they matter for one text more than for another."""

from typing import Any

import torch

from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import BadValueError
from hf_taskvec.merging.option_checks import checked_number
from hf_taskvec.merging.rule_registry import Change, Parameter, rule

_VECTOR, _FORGET, _KEEP = range(3)  # the places of the vectors


@rule("importance", paper="https://arxiv.org/abs/2601.22030", at_least=3)
def importance_rule(parameter: Parameter, power: float = 1.0) -> list[Term]:
    """The first vector, each element times f / (f + k): its importances by the second vector, f, and the third, k.

    For forgetting what a vector learned without harm to what shall be kept: `-λ * combine([v, forget, keep],
    "importance")` negates an element by as much as it matters for the text to forget, and leaves alone what matters for
    the text to keep. `hf_taskvec.analysis.gradient_importance` measures both, by gradients on either text.

    It follows PerTA (Cai et al. 2026), which scales the elements of a task vector by their importance for forgetting
    relative to that for keeping, told by gradients or by the diagonal of the Fisher information. This form of the
    weights and `power` are ours, and need not be the paper's.

    An element of importance 0 for the text to forget is not changed, also where both are 0: nothing says that it
    matters. A parameter that the vector changes must be in both importances. The first weight scales the result; the
    others scale the importances, so that `weights=[1, 1, 2]` keeps twice as carefully, and must not be negative.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        power (`float`, *optional*, defaults to 1.0):
            Of both importances. Above 1 it sets elements further apart, towards a mask of those with f > k; below 1 it
            brings them together, towards a half for all.

    Example:
        >>> from hf_taskvec import TaskVector, combine
        >>> v = TaskVector.from_tensors({"w": torch.tensor([1.0, -2.0, 4.0, 8.0])}, name="v")
        >>> forget = TaskVector.from_tensors({"w": torch.tensor([1.0, 1.0, 3.0, 0.0])}, name="forget")
        >>> keep = TaskVector.from_tensors({"w": torch.tensor([0.0, 1.0, 1.0, 0.0])}, name="keep")
        >>> combine([v, forget, keep], "importance").dense("w")
        tensor([ 1., -1.,  3.,  0.])

    """
    exponent = checked_number("power", power)
    if exponent <= 0.0:
        raise BadValueError(f"power={power!r} must be above 0: at 0 all elements would count the same.")
    if parameter.vectors != 3:
        raise BadValueError(
            f"the rule 'importance' takes three vectors, not {parameter.vectors}: a task vector, the importance of its "
            "elements for the text to forget, and that for the text to keep."
        )
    if min(parameter.weights[_FORGET:]) < 0.0:
        raise BadValueError(
            f"weights={list(parameter.weights)}: that of an importance must not be negative. The first weight negates "
            "the result."
        )
    changes = {change.index: change for change in parameter.changes}
    if _VECTOR not in changes or parameter.weights[_FORGET] == 0.0:
        return []
    for place, text in ((_FORGET, "the second vector, for the text to forget"), (_KEEP, "the third, for that to keep")):
        if place not in changes and parameter.weights[place] != 0.0:
            raise BadValueError(
                f"{parameter.name}: {text}, has no importance for it. Measure the importance of all that the vector "
                "changes (frozen parameters are not measured), or leave it out: vector.filter(exclude=...)."
            )

    def merge(tiles: list[torch.Tensor], _: list[Any], start: int) -> torch.Tensor:
        by_place = dict(zip(changes, tiles, strict=True))
        for place in by_place.keys() - {_VECTOR}:
            _check(parameter.name, changes[place], by_place[place])
        result, forget = by_place[_VECTOR], by_place[_FORGET].mul_(changes[_FORGET].weight)
        matters = forget.gt(0.0)
        if _KEEP in by_place:
            # f^p / (f^p + k^p) as 1 / (1 + (k/f)^p), of which no part overflows to a wrong share.
            ratio = by_place[_KEEP].mul_(changes[_KEEP].weight).div_(forget).pow_(exponent)
            result.div_(ratio.add_(1.0).masked_fill_(~matters, 1.0))
        return result.mul_(matters).mul_(changes[_VECTOR].weight)

    return parameter.computed(merge)


def _check(name: str, change: Change, tile: torch.Tensor) -> None:
    """Refuse an importance that is negative or no number: a share of it would look like any other."""
    if not tile.numel():
        return
    lowest, highest = (bound.item() for bound in tile.aminmax())
    if not -float("inf") < lowest <= highest < float("inf"):
        raise not_finite(name)
    if lowest < 0.0:
        raise BadValueError(
            f"{name}: {change.label} has an importance of {lowest:g}. Importances are 0 or more: the second and the "
            "third vector of the rule 'importance' are what hf_taskvec.analysis.gradient_importance measures, not task "
            "vectors."
        )
