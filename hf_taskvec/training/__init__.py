"""Learning from packed blocks of text: fine-tuning, full or LoRA, and coefficients of task vectors.

- `finetuning`: `finetune`, a base and blocks of text -> a model or an adapter in a folder.
- `repairing`: `repair`, an edited model trained on kept text; edit and repair as one task vector.
- `text_losses`: what a run makes small: losses of texts, and what an objective has to offer.
- `teachers`: instead of the next-token loss the distance to a `Teacher`; a `Guard` of other text.
- `unlearning`: `unlearn`, the usual methods of others; `unlearning_methods` has their losses.
- `settings`: `TrainingSettings`, every choice of a run.
- `training_stages`: `TrainingStages`, fine-tuned models in a cache, each done once.
- `scale_fitting`: `fit_scales`, coefficients of several task vectors, learned by gradient on text; `fitted_scales` is
  what it gives, `objectives` what it makes small, `coefficients` their vector and their gradient.
- `memory_estimate`: what a run needs, and whether it fits, before it starts.
- `trainer_callback`: `TaskVectorCallback`, task vectors of those who train with `transformers.Trainer`.
- `run_record`: `Finetuned`, the record that a finished run leaves.
- `repair_record`: `Repaired`, what a finished repair leaves.
- `saved_state`: the checkpoint of a run in its middle.
- `training_loop`: batches, gradients, steps and losses.
- `token_blocks`: blocks of tokens, checked, and their order.
- `trained_model`: the base opened and loaded, its trained weights gathered and saved.
- `trainable_parts`: what of a model is trained: all, some modules, or LoRA's factors.
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
from hf_taskvec.training.fitted_scales import FittedScales
from hf_taskvec.training.memory_estimate import MemoryEstimate, check_memory, estimate_memory
from hf_taskvec.training.objectives import (
    ForgetObjective,
    MergeObjective,
    Objective,
    TextBatch,
    block_losses,
    token_losses,
)
from hf_taskvec.training.repair_record import Repaired
from hf_taskvec.training.repairing import repair
from hf_taskvec.training.run_record import Finetuned
from hf_taskvec.training.scale_fitting import fit_scales
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.teachers import Guard, Teacher
from hf_taskvec.training.unlearning import AUTHORS_SETTINGS, Unlearned, unlearn
from hf_taskvec.training.unlearning_methods import (
    NPO,
    RMU,
    GradientAscent,
    GradientDifference,
    SimNPO,
    UnlearningMethod,
    unlearning_method,
)

if TYPE_CHECKING:
    from hf_taskvec.training.trainer_callback import TaskVectorCallback

__all__ = [
    "AUTHORS_SETTINGS",
    "NPO",
    "RMU",
    "Finetuned",
    "FittedScales",
    "ForgetObjective",
    "GradientAscent",
    "GradientDifference",
    "Guard",
    "MemoryEstimate",
    "MergeObjective",
    "Objective",
    "Repaired",
    "SimNPO",
    "TaskVectorCallback",
    "Teacher",
    "TextBatch",
    "TrainingSettings",
    "Unlearned",
    "UnlearningMethod",
    "block_losses",
    "check_memory",
    "estimate_memory",
    "finetune",
    "fit_scales",
    "repair",
    "token_losses",
    "unlearn",
    "unlearning_method",
]

# transformers' Trainer imports PEFT and bitsandbytes, which takes seconds: only for those who use it.
__getattr__ = lazy_names(__name__, {"TaskVectorCallback": "trainer_callback"})
