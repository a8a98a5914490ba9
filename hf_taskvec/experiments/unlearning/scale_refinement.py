"""The sweep of the experiment: the given λ, then a few more where the book is just forgotten."""

from typing import Any

from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.sweeping import sweep


def refined_sweep(
    model: Any, edit: Any, scales: list[float], books: Any, *, refine: int, output: Any, **options: Any
) -> UnlearningReport:
    """A sweep over `scales` and `refine` more λ where the book is just forgotten.

    The interval in which the forget score crosses the never-seen level is halved `refine` times, and each middle is
    tried as well. Without that, a coarse grid goes past the level by up to a whole step, and the book is not as if
    never seen but worse. Like any other, these λ are judged on the choosing half of the passages alone. What was
    generated is kept in the sweep's store, so each further λ costs only itself.

    Args:
        model (`PreTrainedModel`):
            As for `sweep`.
        edit (`Any`):
            As for `sweep`.
        scales (`list` of `float`):
            The λ to begin with.
        books (`Sequence` of `Book`):
            As for `sweep`.
        refine (`int`):
            How many more λ to try.
        output (`str` or `Path`):
            The folder for the report; what was generated is kept in `store` inside it.
        **options (`Any`):
            As for `sweep`.

    Returns:
        `UnlearningReport`: Over all λ that were tried.
    """
    scales = list(scales)
    store = options.pop("store", f"{output}/store")
    quick = {**options, "permutations": 1}  # only the candidates are looked at
    for _ in range(refine):
        found = _scale_between(sweep(model, edit, scales, books, store=store, **quick))
        if found is None:
            break
        scales.append(found)
    return sweep(model, edit, scales, books, store=store, output=output, **options)


def _scale_between(report: UnlearningReport) -> float | None:
    """The λ halfway between the last that forgets too little and the first that forgets enough; None without one."""
    choice = report.choice
    if choice is None or not choice.candidates:
        return None
    order = sorted(choice.candidates, key=lambda candidate: (abs(candidate.scale), candidate.scale))
    enough = [candidate.forgets for candidate in order]
    if True not in enough or enough[0]:
        return None
    first = enough.index(True)
    return round((order[first - 1].scale + order[first].scale) / 2, 6)
