"""What vectors and models tell about an edit before it is made.

| question | function | module |
|---|---|---|
| How alike are two tasks? | `task_correlation`, `correlation_matrix` | `correlations` |
| … without running a model? | `correlation_proxy`, `cosine_matrix` | `correlations`, `cosines` |
| Which λ does theory recommend for adding, forgetting, transfer? | `recommend_scales` | `recommended_scales` |
| How low is the rank of weights or of a change? | `stable_ranks`, `effective_ranks` | `ranks` |
| Which neurons does a vector change much? | `large_rows` | `ranks` |
| Are features linear in the weights between two fine-tunes? | `cross_task_linearity` | `linearity` |
| What does a model say with features that are mixed at one layer? | `stitch` | `stitching` |
| How long is each epoch's gradient, and where does it point? | `epoch_gradients` | `checkpoint_gradients` |
| How far is fine-tuning one gradient step? | `gradient_alignment`, `TaskVector.from_gradient` | `gradients` |
| How much does each element matter for a text? | `gradient_importance` | `gradients` |
| How much of an edit is left after quantisation? | `survival_by_scale`, `TaskVector.survival` | `survival` |
| What is the loss around a model and two fine-tunes? | `loss_landscape` | `landscapes` |

Vectors are compared from their files, without a model. What runs a model takes a live one, or
`EditedModel(base, vector)` for many fine-tunes of one base in the memory of one, and leaves it as it was, bit for bit.

Every result that can be drawn has `figure()`, which returns a matplotlib figure, and `plot(output)`, which writes it to
a file. `report_sections` puts all of it into one Markdown report (`recipes/analyze.py`).

The public names are listed here and imported when first used:

    from hf_taskvec.analysis import task_correlation, recommend_scales
"""

from typing import TYPE_CHECKING

from hf_taskvec.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_taskvec.analysis.checkpoint_gradients import EpochGradients, epoch_gradients
    from hf_taskvec.analysis.correlations import (
        Correlation,
        CorrelationMatrix,
        correlation_matrix,
        correlation_proxy,
        task_correlation,
    )
    from hf_taskvec.analysis.cosines import CosineMatrix, cosine_matrix
    from hf_taskvec.analysis.edited_models import EditedModel
    from hf_taskvec.analysis.gradients import GradientAlignment, gradient_alignment, gradient_importance
    from hf_taskvec.analysis.landscapes import Landscape, loss_landscape
    from hf_taskvec.analysis.linearity import Linearity, LinearityMeasures, cross_task_linearity
    from hf_taskvec.analysis.ranks import LargeRows, StableRanks, effective_ranks, large_rows, stable_ranks
    from hf_taskvec.analysis.recommended_scales import PRACTICAL_MARGIN, Recommendation, recommend_scales
    from hf_taskvec.analysis.scale_theorems import ScaleRegion, TransferScales
    from hf_taskvec.analysis.stitching import stitch
    from hf_taskvec.analysis.survival import Survival, WeightSurvival, survival_by_scale

_HOMES = {
    "Correlation": "correlations",
    "CorrelationMatrix": "correlations",
    "CosineMatrix": "cosines",
    "EditedModel": "edited_models",
    "EpochGradients": "checkpoint_gradients",
    "GradientAlignment": "gradients",
    "Landscape": "landscapes",
    "LargeRows": "ranks",
    "Linearity": "linearity",
    "LinearityMeasures": "linearity",
    "PRACTICAL_MARGIN": "recommended_scales",
    "Recommendation": "recommended_scales",
    "ScaleRegion": "scale_theorems",
    "StableRanks": "ranks",
    "Survival": "survival",
    "TransferScales": "scale_theorems",
    "WeightSurvival": "survival",
    "correlation_matrix": "correlations",
    "correlation_proxy": "correlations",
    "cosine_matrix": "cosines",
    "cross_task_linearity": "linearity",
    "effective_ranks": "ranks",
    "epoch_gradients": "checkpoint_gradients",
    "gradient_alignment": "gradients",
    "gradient_importance": "gradients",
    "large_rows": "ranks",
    "loss_landscape": "landscapes",
    "recommend_scales": "recommended_scales",
    "stable_ranks": "ranks",
    "stitch": "stitching",
    "survival_by_scale": "survival",
    "task_correlation": "correlations",
}

__all__ = [
    "PRACTICAL_MARGIN",
    "Correlation",
    "CorrelationMatrix",
    "CosineMatrix",
    "EditedModel",
    "EpochGradients",
    "GradientAlignment",
    "Landscape",
    "LargeRows",
    "Linearity",
    "LinearityMeasures",
    "Recommendation",
    "ScaleRegion",
    "StableRanks",
    "Survival",
    "TransferScales",
    "WeightSurvival",
    "correlation_matrix",
    "correlation_proxy",
    "cosine_matrix",
    "cross_task_linearity",
    "effective_ranks",
    "epoch_gradients",
    "gradient_alignment",
    "gradient_importance",
    "large_rows",
    "loss_landscape",
    "recommend_scales",
    "stable_ranks",
    "stitch",
    "survival_by_scale",
    "task_correlation",
]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
