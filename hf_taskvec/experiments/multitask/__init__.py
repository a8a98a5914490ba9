"""Many tasks, one model: rounds of fine-tuning each task from a shared model and merging what each has learnt.

One loop, `run_rounds`, is plain merging (one round), MIMA (rounds of averaging), ATM (rounds of task arithmetic) and
federated averaging (tasks whose data stays with one process), depending on how often it merges, and how.

- `rounds`: `run_rounds`.
- `round_trace`: what happened in each round.
- `task_trainer`: the model that is trained on one task after the other.
- `task_exchange`: weights and values of tasks, exchanged between processes.
- `multitask_config`, `multitask_inputs`: settings and inputs of `recipes/multitask.py`.
- `token_accuracy`, `task_scores`: how well a model knows the tasks.
- `results`, `result_plots`: what is reported.
"""

from hf_taskvec.experiments.multitask.round_trace import RoundTrace, Trace
from hf_taskvec.experiments.multitask.rounds import Merge, Task, run_rounds

__all__ = ["Merge", "RoundTrace", "Task", "Trace", "run_rounds"]
