"""Task vectors inside other tools.

- `lm_eval_model`: `TaskVectorLM`, lm-evaluation-harness's model type `taskvec`: a model with a vector on it.
- `lm_eval_tasks`: `register_lm_eval`, which makes that type known to lm-eval, and `lm_eval_metric`, its tasks as a
  metric for `score_scales`.

Importing the package imports no other tool; what needs one says which extra installs it.
"""

from typing import TYPE_CHECKING

from hf_taskvec.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_taskvec.integrations.lm_eval_model import TaskVectorLM
    from hf_taskvec.integrations.lm_eval_tasks import lm_eval_metric, register_lm_eval

_HOMES = {"TaskVectorLM": "lm_eval_model", "lm_eval_metric": "lm_eval_tasks", "register_lm_eval": "lm_eval_tasks"}

__all__ = ["TaskVectorLM", "lm_eval_metric", "register_lm_eval"]

__getattr__ = lazy_names(__name__, _HOMES)
