"""Knowing before doing: what vectors and models tell about an edit before it is made.

The public names are listed here and imported when first used.

    from hf_taskvec.analysis import task_correlation, recommend_scales
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_taskvec.analysis.correlations import (
        Correlation,
        CorrelationMatrix,
        correlation_matrix,
        correlation_proxy,
        task_correlation,
    )
    from hf_taskvec.analysis.cosines import CosineMatrix, cosine_matrix
    from hf_taskvec.analysis.gradients import Alignment, gradient_alignment
    from hf_taskvec.analysis.landscapes import Landscape, loss_landscape
    from hf_taskvec.analysis.linearity import Linearity, Measures, cross_task_linearity, stitch
    from hf_taskvec.analysis.ranks import LargeRows, Ranks, effective_ranks, large_rows, stable_ranks
    from hf_taskvec.analysis.recommended_scales import (
        PRACTICAL_MARGIN,
        Recommendation,
        Region,
        Transfer,
        recommend_scales,
    )
    from hf_taskvec.analysis.token_batches import Edited

_HOME = {
    "Alignment": "gradients",
    "Correlation": "correlations",
    "CorrelationMatrix": "correlations",
    "CosineMatrix": "cosines",
    "Edited": "token_batches",
    "Landscape": "landscapes",
    "LargeRows": "ranks",
    "Linearity": "linearity",
    "Measures": "linearity",
    "PRACTICAL_MARGIN": "recommended_scales",
    "Ranks": "ranks",
    "Recommendation": "recommended_scales",
    "Region": "recommended_scales",
    "Transfer": "recommended_scales",
    "correlation_matrix": "correlations",
    "correlation_proxy": "correlations",
    "cosine_matrix": "cosines",
    "cross_task_linearity": "linearity",
    "effective_ranks": "ranks",
    "gradient_alignment": "gradients",
    "large_rows": "ranks",
    "loss_landscape": "landscapes",
    "recommend_scales": "recommended_scales",
    "stable_ranks": "ranks",
    "stitch": "linearity",
    "task_correlation": "correlations",
}

__all__ = [
    "PRACTICAL_MARGIN",
    "Alignment",
    "Correlation",
    "CorrelationMatrix",
    "CosineMatrix",
    "Edited",
    "Landscape",
    "LargeRows",
    "Linearity",
    "Measures",
    "Ranks",
    "Recommendation",
    "Region",
    "Transfer",
    "correlation_matrix",
    "correlation_proxy",
    "cosine_matrix",
    "cross_task_linearity",
    "effective_ranks",
    "gradient_alignment",
    "large_rows",
    "loss_landscape",
    "recommend_scales",
    "stable_ranks",
    "stitch",
    "task_correlation",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
