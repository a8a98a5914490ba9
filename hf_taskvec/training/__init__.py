"""Fine-tuning on packed blocks of text, full or LoRA: the loop that the recipes share.

- `finetuning`: `finetune`, a base and blocks of text -> a model or an adapter in a folder.
- `settings`: `TrainingSettings`, every choice of a run.
- `memory_estimate`: what a run needs, and whether it fits, before it starts.
- `trainer_callback`: `TaskVectorCallback`, task vectors of those who train with `transformers.Trainer`.
- `run_record`: `Finetuned`, the record that a finished run leaves.
- `saved_state`: the checkpoint of a run in its middle.
- `training_loop`: batches, gradients, steps and losses.
- `token_blocks`: blocks of tokens, checked, and their order.
- `trained_model`: the base opened and loaded, its trained weights gathered and saved.
- `lora`: factors beside frozen weights.
- `accelerators`: what the loop needs of an accelerator.

Example:
    >>> from hf_taskvec.training import TrainingSettings, finetune
    >>> blocks = book.training_blocks(tokenizer, 512)  # doctest: +SKIP
    >>> settings = TrainingSettings(method="lora")
    >>> tuned = finetune("microsoft/phi-1_5", blocks, settings, "outputs/book")  # doctest: +SKIP

"""

from typing import TYPE_CHECKING

from hf_taskvec.lazy_names import lazy_names
from hf_taskvec.training.finetuning import finetune
from hf_taskvec.training.memory_estimate import MemoryEstimate, check_memory, estimate_memory
from hf_taskvec.training.run_record import Finetuned
from hf_taskvec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from hf_taskvec.training.trainer_callback import TaskVectorCallback

__all__ = [
    "Finetuned",
    "MemoryEstimate",
    "TaskVectorCallback",
    "TrainingSettings",
    "check_memory",
    "estimate_memory",
    "finetune",
]

# transformers' Trainer imports PEFT and bitsandbytes, which takes seconds: only for those who use it.
__getattr__ = lazy_names(__name__, {"TaskVectorCallback": "trainer_callback"})
