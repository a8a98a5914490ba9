"""Stages of a longer work: fine-tuned models in a cache, known by what made them, done once and resumed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.distributed import make_accelerator, processes
from hf_taskvec.json_files import json_digest
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.fingerprints import full_fingerprint
from hf_taskvec.training.accelerators import resolve_precision
from hf_taskvec.training.finetuning import finetune
from hf_taskvec.training.settings import SETTINGS_VERSION, TrainingSettings
from hf_taskvec.training.training_cost import training_cost

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel


_MERGED = "-merged"


@dataclass(frozen=True)
class TrainingStages:
    """A cache of trained stages. Each lies in a folder of its own, named after all that decides it.

    Args:
        cache (`Path`):
            The folder of all stages. Experiments may share it.
        force (`bool`, *optional*, defaults to `False`):
            Do every stage again, also a finished one.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Saved beside each model.
        checkpoint_every (`int`, *optional*):
            Steps between checkpoints; one at the end of each epoch if not given.
        tell (`Callable`, *optional*):
            Is called with a line on each stage, before it is done.
        progress (`bool`, *optional*):
            Show progress bars; by default on a terminal only.
    """

    cache: Path
    force: bool = False
    tokenizer: Any = None
    checkpoint_every: int | None = None
    tell: Callable[[str], None] | None = None
    progress: bool | None = None

    def train(
        self,
        name: str,
        base: "str | Path | PreTrainedModel",
        blocks: "datasets.Dataset",
        settings: TrainingSettings,
        *,
        vectors: bool = False,
    ) -> Path:
        """The folder of `base` fine-tuned on `blocks`: a model, or an adapter for LoRA. Trained if it is not there.

        An interrupted training is resumed. Under `accelerate launch` every process calls this.

        Args:
            name (`str`):
                What the folder's name begins with.
            base (`str`, `Path` or `PreTrainedModel`):
                As for `finetune`.
            blocks (`datasets.Dataset`):
                As for `finetune`.
            settings (`TrainingSettings`):
                As for `finetune`.
            vectors (`bool`, *optional*, defaults to `False`):
                Also keep the task vector of each epoch, inside the folder.

        Returns:
            `Path`: The folder of the stage.
        """
        precision = resolve_precision(settings, make_accelerator())  # what "auto" stands for differs between machines
        decisive = [SETTINGS_VERSION, _identity(base), rows_digest(blocks), asdict(settings), precision]
        key = json_digest(*decisive, *(["vectors"] if vectors else []))
        folder = self.cache / f"{name}-{key[:12]}"
        if self.tell is not None:
            done = folder.exists() and not self.force
            doing = "done before" if done else f"fine-tuning on {training_cost(base, blocks, settings)}"
            self.tell(f"{name}: {doing} ({folder.name})")
        finetune(
            base,
            blocks,
            settings,
            folder,
            tokenizer=self.tokenizer,
            checkpoint_every=self.checkpoint_every,
            vectors=vectors,
            overwrite=self.force,
            progress=self.progress,
        )
        processes().wait_for_everyone()
        return folder

    def train_model(self, name: str, base: str | Path, blocks: "datasets.Dataset", settings: TrainingSettings) -> Path:
        """The same, but always a whole model: what LoRA gives is merged into the base."""
        folder = self.train(name, base, blocks, settings)
        if settings.method == "full":
            return folder
        merged = folder.with_name(f"{folder.name}{_MERGED}")
        if self.force or not merged.exists():
            TaskVector.from_adapter(folder, name=label_for(name)).apply(base, merged, overwrite=True)
        processes().wait_for_everyone()
        return merged

    def trained(self, model: Path) -> Path:
        """The folder with the record of the training that made a model of `train_model`.

        Args:
            model (`Path`):
                What `train_model` gave.
        """
        return model.with_name(model.name.removesuffix(_MERGED))


def _identity(base: "str | Path | PreTrainedModel") -> str:
    return open_checkpoint(base).sampled_fingerprint if isinstance(base, str | Path) else full_fingerprint(base)


def rows_digest(blocks: "datasets.Dataset") -> str:
    """What packed blocks are known by: their tokens."""
    return json_digest([list(map(int, row)) for row in blocks["input_ids"]])
