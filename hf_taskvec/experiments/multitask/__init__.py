"""Many tasks, one model: rounds of fine-tuning each task from a shared model and merging what came of it.

One loop, `run_rounds`, is plain merging (one round), MIMA (rounds of averaging), ATM (rounds of task arithmetic) and
federated averaging (tasks whose data stays with one process), depending on how often it merges, and how.
"""

from hf_taskvec.experiments.multitask.round_trace import RoundTrace, Trace
from hf_taskvec.experiments.multitask.rounds import Merge, Task, run_rounds

__all__ = ["Merge", "RoundTrace", "Task", "Trace", "run_rounds"]
