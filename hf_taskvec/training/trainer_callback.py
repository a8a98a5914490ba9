"""For those who train with `transformers.Trainer`: a task vector at the end of each epoch."""

import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_taskvec.errors import OutputError, UnsupportedError
from hf_taskvec.filenames import VECTOR_RECORD
from hf_taskvec.models.layout import is_peft_model
from hf_taskvec.training.trained_model import save_model, save_vector, whole_weights


class TaskVectorCallback(TrainerCallback):
    """Saves a task vector at the end of each epoch: `folder/epoch-1`, `folder/epoch-2`, ...

    The vectors are those against the weights at the start of training. Of a PEFT-wrapped model it is the adapter's own
    vector, its factors kept as factors.

    Args:
        folder: where to put the vectors.
        base (*optional*): the folder or Hub id that the model was loaded from, unchanged. Without it the starting
            weights are kept in `folder/.start` while training lasts; memory holds no second model either way. For an
            adapter it is needed only if that changes more than low-rank factors (as in `TaskVector.from_adapter`).
        overwrite: replace vectors of an earlier run.

    ```python
    trainer = Trainer(model, args, train_dataset=blocks, callbacks=[TaskVectorCallback("outputs/vectors")])
    trainer.train()
    last = TaskVector.load("outputs/vectors/epoch-3")
    ```
    """

    def __init__(self, folder: str | Path, base: str | Path | None = None, *, overwrite: bool = False) -> None:
        self.folder, self.base, self.overwrite = Path(folder), base, overwrite

    @property
    def _start(self) -> Path:
        return self.folder / ".start"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model, is_resumed = kwargs["model"], state.global_step > 0
        if not is_resumed and not self.overwrite and any(self.folder.glob(f"epoch-*/{VECTOR_RECORD}")):
            raise OutputError(
                f"{self.folder.name} already holds the vectors of a training run. Pass overwrite=True to replace them."
            )
        if self.base is not None or is_peft_model(model):
            return
        if not is_resumed:
            weights = whole_weights(model, keep=state.is_world_process_zero)
            if state.is_world_process_zero:
                shutil.rmtree(self._start, ignore_errors=True)
                partial = self.folder / ".start.partial"
                save_model(model, partial, weights)
                partial.rename(self._start)
        elif state.is_world_process_zero and not self._start.is_dir():
            raise UnsupportedError(
                f"training goes on at step {state.global_step}, and {self.folder.name} does not hold the weights it "
                "started from. Give TaskVectorCallback the base model as base=."
            )

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        weights = whole_weights(model, keep=state.is_world_process_zero)
        if state.is_world_process_zero:
            base = self.base if self.base is not None or is_peft_model(model) else self._start
            save_vector(model, weights, base, self.folder / f"epoch-{round(state.epoch or 0)}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            shutil.rmtree(self._start, ignore_errors=True)
