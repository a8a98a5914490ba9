"""The model that is trained: loaded, checked, with LoRA beside its weights or without, and saved again."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.provenance import ModelRecord, Provenance
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.algebra.vector_constructors import Model
from hf_taskvec.atomic import hidden_beside
from hf_taskvec.errors import BadValueError, DivergedError, UnsupportedError
from hf_taskvec.filenames import ADAPTER_CONFIG
from hf_taskvec.files.own_folder import scratch_folder
from hf_taskvec.models.checkpoint import Checkpoint, open_checkpoint
from hf_taskvec.models.companions import COMPANIONS
from hf_taskvec.models.layout import is_peft_model
from hf_taskvec.models.live_model import live_checkpoint
from hf_taskvec.models.model_facts import context_length, vocabulary_size
from hf_taskvec.training.accelerators import whole_tensor
from hf_taskvec.training.saved_state import writing_safetensors
from hf_taskvec.training.settings import ComputePrecision, TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class TrainingBase:
    """A model to start from: files in a folder, or a live model that stays as it is."""

    model: "Path | PreTrainedModel"
    config: "PreTrainedConfig"
    #: its weights as they were opened; those of a live model are not copies
    weights: Checkpoint
    record: ModelRecord

    @property
    def context(self) -> int | None:
        """How many tokens the model reads at once, where its configuration tells."""
        return context_length(self.config)

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return vocabulary_size(self.config)

    def load(self, dtype: torch.dtype) -> "PreTrainedModel":
        """A copy to train."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        model: Any
        with without_progress_bars():
            if isinstance(self.model, Path):
                model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
            else:
                model = copy.deepcopy(self.model).to(dtype)  # type: ignore[arg-type]
        # What is saved names the base's Hub id, or nothing: no path of this machine.
        model.name_or_path = model.config.name_or_path = self.record.name if self.record.revision else ""
        try:
            model.generation_config.validate(strict=True)
        except ValueError:  # then it could not be saved, after all the work; the base's file is copied instead
            model.generation_config = GenerationConfig.from_model_config(model.config)
        return model


def open_base(base: "str | Path | PreTrainedModel") -> TrainingBase:
    """The base of a training run, refused if it is not a causal language model of plain weights."""
    from transformers import AutoConfig, PreTrainedModel

    if isinstance(base, str | Path):
        checkpoint = open_checkpoint(base, companions=[*COMPANIONS])
        assert checkpoint.folder is not None
        if "model_type" not in checkpoint.config:
            raise UnsupportedError(f"{checkpoint.name} has no config.json with a model_type: it cannot be trained.")
        try:
            config = AutoConfig.from_pretrained(checkpoint.folder)
        except Exception as error:  # transformers raises whatever the values lead it to
            raise UnsupportedError(f"{checkpoint.name}: transformers does not know this model ({error}).") from None
        _check_causal(config, checkpoint.name, checkpoint.config.get("architectures"))
        return TrainingBase(checkpoint.folder, config, checkpoint, checkpoint.record())
    if is_peft_model(base):
        raise UnsupportedError("the base is wrapped by PEFT. Call merge_and_unload() first, or give its base model.")
    if not isinstance(base, PreTrainedModel):
        raise BadValueError(f"the base must be a folder, a Hub id or a PreTrainedModel, not a {type(base).__name__}.")
    where = f"the live {type(base).__name__}"
    _check_causal(base.config, where, [type(base).__name__])
    if base.get_output_embeddings() is None:
        raise UnsupportedError(f"{where} has no output head: it is not a causal language model.")
    if any(not parameter.is_floating_point() for parameter in base.parameters()):
        raise UnsupportedError(f"{where} is quantised. Load it in bf16, fp16 or fp32 to train it.")
    weights = live_checkpoint(base)
    return TrainingBase(base, base.config, weights, weights.record())


def meta_model(config: "PreTrainedConfig") -> "PreTrainedModel":
    """The model of a configuration without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def training_dtype(config: "PreTrainedConfig", settings: TrainingSettings, precision: ComputePrecision) -> torch.dtype:
    """What the weights are held in: fp32 where they are trained; frozen ones that are stored in bf16 may stay so."""
    stays = settings.method == "lora" and precision == "bf16" and config.dtype == torch.bfloat16
    return torch.bfloat16 if stays else torch.float32


def _check_causal(config: "PreTrainedConfig", where: str, architectures: object) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    remedy = "Task vectors of this library are those of causal language models (GPT, Llama, Phi, ...)."
    kind = architectures[0] if isinstance(architectures, list) and architectures else config.model_type
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(f"{where} ({kind}) is not a causal language model. {remedy}")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise UnsupportedError(f"{where} ({kind}) is an encoder: its tokens see what follows them. {remedy}")


def whole_weights(model: torch.nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """All weights, or of a `PeftModel` those it trains, with sharded ones gathered.

    Every process must call it; the one that keeps them gets them, on the CPU. Tied weights stay one tensor.
    """
    only_trained = is_peft_model(model)
    weights: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if only_trained and not tensor.requires_grad:
            continue
        if id(tensor) not in seen:
            value = whole_tensor(tensor)
            seen[id(tensor)] = value.cpu() if keep else None
        weights[name] = seen[id(tensor)]
    return weights if keep else {}


def check_weights_finite(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not finite after the last step; after any other step, the next loss shows it."""
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DivergedError(
                f"{name} is not finite after the last step; nothing was saved. Lower the learning_rate."
            )


def save_model(model: Any, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """A model folder (or, of a `PeftModel`, an adapter folder) with the given weights."""
    options = {"save_embedding_layers": False} if is_peft_model(model) else {}
    with without_progress_bars(), writing_safetensors(folder):
        model.save_pretrained(folder, state_dict=dict(weights), **options)
    if not is_peft_model(model):
        return
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty form of a card, which tells nothing of this run
    path = folder / ADAPTER_CONFIG
    config = json.loads(path.read_text("utf-8"))
    config["base_model_name_or_path"] = config["base_model_name_or_path"] or None
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def save_vector(model: Any, weights: Mapping[str, torch.Tensor], base: Model | None, folder: Path) -> None:
    """The task vector of given weights against a base.

    They go through the disk, so that memory holds no third model: the differences are streamed from both files.
    """
    with scratch_folder(hidden_beside(folder, ".weights")) as tuned:
        save_model(model, tuned, weights)
        if is_peft_model(model):
            vector = TaskVector.from_adapter(tuned, base=base, name=label_for(folder.name))
        else:
            assert base is not None
            vector = TaskVector.from_finetuned(base, tuned, name=label_for(folder.name))
        vector.save(folder, overwrite=True)


def made_by(vector: TaskVector, how: str) -> TaskVector:
    """A vector of one origin, its provenance telling how it was made."""
    (origin,) = vector.provenance.origins
    told = Provenance.of(replace(origin, how=how, identity=None))
    return TaskVector({name: change.terms for name, change in vector.items()}, told)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Without transformers' own progress bars, which know nothing of terminals and of ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
