"""Fine-tuning on packed blocks of text, full or LoRA: the loop that the recipes share.

```python
from hf_taskvec.training import TrainingSettings, finetune

blocks = book.training_blocks(tokenizer, 512)
tuned = finetune("microsoft/phi-1_5", blocks, TrainingSettings(method="lora"), "outputs/book")
```
"""

from hf_taskvec.training.callback import TaskVectorCallback
from hf_taskvec.training.finetuning import finetune
from hf_taskvec.training.memory import MemoryEstimate, check_memory, estimate_memory
from hf_taskvec.training.record import Finetuned
from hf_taskvec.training.settings import TrainingSettings

__all__ = [
    "Finetuned",
    "MemoryEstimate",
    "TaskVectorCallback",
    "TrainingSettings",
    "check_memory",
    "estimate_memory",
    "finetune",
]
