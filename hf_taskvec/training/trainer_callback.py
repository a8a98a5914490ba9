"""For those who train with `transformers.Trainer`: a task vector at the end of each epoch."""

import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_taskvec.errors import OutputError, UnsupportedError
from hf_taskvec.filenames import CONFIG, VECTOR_RECORD
from hf_taskvec.files.output_folder import new_folder
from hf_taskvec.models.layout import is_peft_model
from hf_taskvec.training.trained_model import save_model, save_vector, whole_weights


class TaskVectorCallback(TrainerCallback):
    """Saves a task vector at the end of each epoch: `output/epoch-1`, `output/epoch-2`, ...

    Where no whole number of epochs is over (training stops at `max_steps`, or the length of the data is not known), the
    folder is named after the step: `output/step-25`.

    The vectors are those against the weights at the start of training. Of a PEFT-wrapped model it is the adapter's own
    vector, its factors kept as factors.

    Args:
        output (`str` or `Path`):
            The folder for the vectors.
        base (`str` or `Path`, *optional*):
            The folder or Hub id that the model was loaded from, unchanged. Without it the starting weights are kept in
            `output/.start` while training lasts; memory holds no second model either way. For an adapter it is needed
            only if that changes more than low-rank factors (as in `TaskVector.from_adapter`).
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace vectors of an earlier run.

    Raises:
        `OutputError`: When training begins, if the folder holds the vectors of an earlier run.
        `UnsupportedError`: When training is resumed, if the weights that it started from are not known.

    Example:
        >>> from hf_taskvec.training import TaskVectorCallback
        >>> callback = TaskVectorCallback("outputs/vectors")
        >>> trainer = Trainer(model, args, train_dataset=blocks, callbacks=[callback])  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> last = TaskVector.load("outputs/vectors/epoch-3")  # doctest: +SKIP

    """

    def __init__(self, output: str | Path, base: str | Path | None = None, *, overwrite: bool = False) -> None:
        self.output, self.base, self.overwrite = Path(output), base, overwrite

    @property
    def _start(self) -> Path:
        return self.output / ".start"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the starting weights, if nothing else tells them."""
        model, is_resumed = kwargs["model"], state.global_step > 0
        earlier = [found for kind in ("epoch", "step") for found in self.output.glob(f"{kind}-*/{VECTOR_RECORD}")]
        if earlier and not is_resumed and not self.overwrite:
            raise OutputError(
                f"{self.output.name} already holds the vectors of a training run. Pass overwrite=True to replace them."
            )
        if self.base is not None or is_peft_model(model):
            return
        if not is_resumed:
            weights = whole_weights(model, keep=state.is_world_process_zero)
            if state.is_world_process_zero:
                with new_folder(self._start, CONFIG, overwrite=True) as folder:
                    save_model(model, folder, weights)
        elif state.is_world_process_zero and not self._start.is_dir():
            raise UnsupportedError(
                f"training goes on at step {state.global_step}, and {self.output.name} does not hold the weights it "
                "started from. Give TaskVectorCallback the base model as base=."
            )

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the vector of the epoch."""
        model = kwargs["model"]
        weights = whole_weights(model, keep=state.is_world_process_zero)
        if state.is_world_process_zero:
            base = self.base if self.base is not None or is_peft_model(model) else self._start
            save_vector(model, weights, base, self.output / _name(state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the starting weights."""
        if state.is_world_process_zero:
            shutil.rmtree(self._start, ignore_errors=True)


def _name(state: TrainerState) -> str:
    """A name that no other vector of the run has: `state.epoch` ends on a whole number only where an epoch is over."""
    epoch = state.epoch or 0.0
    return f"epoch-{epoch:.0f}" if epoch and epoch.is_integer() else f"step-{state.global_step}"
