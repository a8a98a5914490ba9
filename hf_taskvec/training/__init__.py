"""Fine-tuning on packed blocks of text, full or LoRA: the loop that the recipes share.

```python
from hf_taskvec.training import TrainingSettings, finetune

blocks = book.training_blocks(tokenizer, 512)
tuned = finetune("microsoft/phi-1_5", blocks, TrainingSettings(method="lora"), "outputs/book")
```
"""

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    # transformers' Trainer imports PEFT and bitsandbytes, which takes seconds: only for those who use it.
    if name == "TaskVectorCallback":
        from hf_taskvec.training.trainer_callback import TaskVectorCallback

        return TaskVectorCallback
    raise AttributeError(f"module 'hf_taskvec.training' has no attribute {name!r}")
