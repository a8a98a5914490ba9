"""Knowing before doing: what vectors and models tell about an edit before it is made.

The public names are listed here and imported when first used.

    from hf_taskvec.analysis import task_correlation, recommend_scales
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_taskvec.analysis.correlation import Correlation, CorrelationMatrix, correlation_matrix, task_correlation
    from hf_taskvec.analysis.forward import Edited
    from hf_taskvec.analysis.judging import Judgement
    from hf_taskvec.analysis.scales import Recommendation, Region, Transfer, recommend_scales

_HOME = {
    "Correlation": "correlation",
    "CorrelationMatrix": "correlation",
    "Edited": "forward",
    "Judgement": "judging",
    "Recommendation": "scales",
    "Region": "scales",
    "Transfer": "scales",
    "correlation_matrix": "correlation",
    "recommend_scales": "scales",
    "task_correlation": "correlation",
}

__all__ = [
    "Correlation",
    "CorrelationMatrix",
    "Edited",
    "Judgement",
    "Recommendation",
    "Region",
    "Transfer",
    "correlation_matrix",
    "recommend_scales",
    "task_correlation",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
