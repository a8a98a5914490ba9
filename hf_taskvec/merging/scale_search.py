"""Finding λ: the scale of the best score on validation data, within a budget of evaluations."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean
from hf_taskvec.progress import progress_bar

SearchMethod = Literal["grid", "bounded"]
_METHODS: tuple[str, ...] = get_args(SearchMethod)


@dataclass(frozen=True)
class ScaleSearch:
    """What a search for λ found.

    Args:
        scale (`float`):
            The best λ.
        score (`float`):
            The score there.
        tried (`tuple[tuple[float, float], ...]`):
            Every λ that was tried with its score, in the order of λ.

    """

    scale: float
    score: float
    tried: tuple[tuple[float, float], ...]


def search_scale(
    score: Callable[[float], float],
    bounds: tuple[float, float] = (0.0, 1.0),
    *,
    method: SearchMethod = "grid",
    budget: int = 21,
    progress: bool | None = None,
) -> ScaleSearch:
    """The λ of the highest score within bounds; of equal ones, that of the smallest magnitude.

    Args:
        score (`Callable[[float], float]`):
            From λ to a number, the higher the better. Measure it on validation data, not on what is reported.
        bounds (`tuple[float, float]`, *optional*, defaults to `(0.0, 1.0)`):
            The smallest and the largest λ.
        method (`str`, *optional*, defaults to `"grid"`):
            `"grid"` tries evenly spaced λ, both bounds among them. `"bounded"` is Brent's method (it needs scipy),
            which narrows the interval down around one maximum and so needs fewer evaluations for more digits, if there
            is only one maximum.
        budget (`int`, *optional*, defaults to 21):
            How often `score` may be called.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `ScaleSearch`: The best λ, its score, and every λ that was tried.

    Raises:
        `BadValueError`: If the bounds or the budget make no sense, or a score is not a number.
        `UnsupportedError`: If `method="bounded"` and scipy is not installed.

    Example:
        >>> search_scale(lambda scale: -((scale - 0.3) ** 2), budget=11).scale
        0.3

    """
    low, high = (float(bound) for bound in bounds)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise BadValueError(f"bounds={bounds}: give two finite numbers, the smaller first.")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 2:
        raise BadValueError(f"budget={budget!r}: at least 2 evaluations are needed.")
    if method not in _METHODS:
        raise MissingNameError(
            f"no search method {method!r}.{did_you_mean(str(method), _METHODS)} Use grid or bounded."
        )
    tried: dict[float, float] = {}

    def try_scale(scale: float) -> float:
        found = float(score(scale))
        if math.isnan(found):
            raise BadValueError(f"the score at λ={scale:g} is not a number.")
        tried[scale] = found
        bar.update()
        return found

    with progress_bar([], "Searching λ", progress, budget) as bar:
        if method == "grid":
            for step in range(budget):
                try_scale(round(low + (high - low) * step / (budget - 1), 12))
        else:
            _narrow(try_scale, low, high, budget)
    best = min(tried, key=lambda scale: (-tried[scale], abs(scale)))
    return ScaleSearch(best, tried[best], tuple(sorted(tried.items())))


def _narrow(try_scale: Callable[[float], float], low: float, high: float, budget: int) -> None:
    try:
        from scipy.optimize import minimize_scalar
    except ImportError as error:
        raise UnsupportedError(
            "a bounded search needs scipy: pip install 'hf-taskvec[search]', or use method='grid'."
        ) from error
    # scipy counts iterations, of which each evaluates once after the first.
    minimize_scalar(
        lambda scale: -try_scale(float(scale)),
        bounds=(low, high),
        method="bounded",
        options={"maxiter": budget, "xatol": (high - low) * 1e-3},
    )
