"""Rules that go by the angles between vectors: sums whose coefficients are found at once, parameter by parameter.

What they give is exact and lazy, and factors stay factors; for the angles `combine` reads all vectors, in tiles.
"""

import math

import torch

from hf_taskvec.algebra.projection import inner_products
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import BadValueError
from hf_taskvec.merging.rule_registry import Parameter, rule

# Of 1 - cos²: vectors so nearly of one direction, or of opposite ones, that no arc between them is defined.
_COLLINEAR = 1e-14
_SINGULAR = 1e-6


@rule("slerp", paper="https://arxiv.org/abs/2403.13257")
def slerp_rule(parameter: Parameter, t: float = 0.5) -> list[Term]:
    """Between two vectors along the arc: neither's length gets lost where they point elsewhere.

    With the angle ω between the two, `sin((1 - t)ω)/sin(ω)` of the first and `sin(tω)/sin(ω)` of the second, for each
    parameter by itself; where they have one direction, or opposite ones, it is `interpolate`. What one of the vectors
    does not change is at a right angle to the other. This is mergekit's `nuslerp` with a base model; its `slerp` turns
    whole models instead of what fine-tuning changed.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.
        t (`float`, *optional*, defaults to 0.5):
            From 0, the first vector, to 1, the second.

    """
    if parameter.vectors != 2:
        raise BadValueError(f"the rule 'slerp' is between two vectors, not {parameter.vectors}. Use 'weighted'.")
    if isinstance(t, bool) or not isinstance(t, float | int) or not 0.0 <= t <= 1.0:
        raise BadValueError(f"t={t!r} must be at least 0 and at most 1. Use 'sum' to go beyond the two vectors.")
    shares = [1.0 - t, float(t)]
    (cosine,) = _cosines(parameter) or [0.0]
    if 1.0 - cosine * cosine > _COLLINEAR:
        angle = math.acos(cosine)
        shares = [math.sin(share * angle) / math.sin(angle) for share in shares]
    return parameter.sum([shares[change.index] * change.weight for change in parameter.changes])


@rule("model_stock", paper="https://arxiv.org/abs/2403.19522")
def model_stock_rule(parameter: Parameter) -> list[Term]:
    """The mean of the vectors, shortened the more they disagree (Model Stock).

    With n vectors and the mean cosine c between two of them, the mean is multiplied by `n c / (1 + (n - 1) c)`, for
    each parameter by itself: 1 where they agree, 0 where they are orthogonal. The paper has no weights; here a vector
    is multiplied by its own before angles are taken.

    Args:
        parameter (`Parameter`):
            The parameter, and what each vector changes in it.

    """
    count = sum(weight != 0.0 for weight in parameter.weights)
    if count == 1:
        return parameter.sum()
    # A vector that leaves the parameter as it is has a cosine of 0 with each of the others.
    cosine = sum(_cosines(parameter)) / (count * (count - 1) / 2)
    whole = 1.0 + (count - 1) * cosine
    ratio = 0.0 if abs(whole) < _SINGULAR else count * cosine / whole
    return parameter.sum([ratio * change.weight / count for change in parameter.changes])


def _cosines(parameter: Parameter) -> list[float]:
    """Of each two of the weighted changes; 0 where one of them is zero."""
    gram = inner_products(parameter.name, [change.terms for change in parameter.changes])
    signs = torch.tensor([math.copysign(1.0, each.weight) for each in parameter.changes], dtype=torch.float64)
    lengths = gram.diagonal().sqrt()
    scales = torch.where(lengths > 0.0, signs / lengths, 0.0)
    cosines = (scales[:, None] * gram * scales).clamp(-1.0, 1.0)
    rows, columns = torch.triu_indices(len(signs), len(signs), offset=1)
    return [float(each) for each in cosines[rows, columns]]
