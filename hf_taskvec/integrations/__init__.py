"""Task vectors inside other tools.

- `lm_eval_model`: `TaskVectorLM`, lm-evaluation-harness's model type `taskvec`: a model with a vector on it.
- `lm_eval_tasks`: `register_lm_eval`, which makes that type known to lm-eval, and `lm_eval_tasks_folder`, where our
  tasks for it lie: YAMLs, in `lm_eval_yaml/`.
- `lm_eval_passages`: the passages and scores that these YAMLs name.
- `mergekit_config`: `read_mergekit_config`, a YAML of mergekit, read strictly.
- `mergekit_merge`: `open_merge`, such a YAML as a base and a vector. It takes no mergekit.
- `merging_callback`: `MergeModelCallback` and `MergeConfig`, in the place of TRL's, for `Trainer` and TRL's trainers.

Importing the package imports no other tool; what needs one says which extra installs it.
"""

from typing import TYPE_CHECKING

from hf_taskvec.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_taskvec.integrations.lm_eval_model import TaskVectorLM
    from hf_taskvec.integrations.lm_eval_tasks import lm_eval_tasks_folder, register_lm_eval
    from hf_taskvec.integrations.mergekit_config import MergekitConfig, read_mergekit_config
    from hf_taskvec.integrations.mergekit_merge import MergekitMerge, open_merge
    from hf_taskvec.integrations.merging_callback import MergeConfig, MergeModelCallback

_HOMES = {
    "MergeConfig": "merging_callback",
    "MergeModelCallback": "merging_callback",
    "MergekitConfig": "mergekit_config",
    "MergekitMerge": "mergekit_merge",
    "TaskVectorLM": "lm_eval_model",
    "lm_eval_tasks_folder": "lm_eval_tasks",
    "open_merge": "mergekit_merge",
    "read_mergekit_config": "mergekit_config",
    "register_lm_eval": "lm_eval_tasks",
}

__all__ = [
    "MergeConfig",
    "MergeModelCallback",
    "MergekitConfig",
    "MergekitMerge",
    "TaskVectorLM",
    "lm_eval_tasks_folder",
    "open_merge",
    "read_mergekit_config",
    "register_lm_eval",
]

__getattr__ = lazy_names(__name__, _HOMES)
