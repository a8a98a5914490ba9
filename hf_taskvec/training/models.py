"""The model that is trained: loaded, checked, with LoRA beside its weights or without, and saved again."""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.checkpoint import open_checkpoint
from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean, some
from hf_taskvec.names import is_peft_model
from hf_taskvec.training.parallel import gathered
from hf_taskvec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Base:
    """A model to start from: files in a folder, or a live model that stays as it is."""

    model: "Path | PreTrainedModel"
    config: "PreTrainedConfig"
    #: the Hub id, or an empty text: no path of this machine is to be stored
    hub_id: str = ""

    @property
    def context(self) -> int | None:
        """How many tokens the model reads at once, where its configuration tells."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocabulary(self) -> int:
        return self.config.get_text_config().vocab_size

    def load(self, dtype: "torch.dtype | str") -> "PreTrainedModel":
        """A copy to train."""
        from transformers import AutoModelForCausalLM

        model: Any
        if isinstance(self.model, Path):
            model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
        else:
            model = copy.deepcopy(self.model)
            if dtype != "auto":
                model.to(dtype)
        model.name_or_path = self.hub_id
        model.config.name_or_path = self.hub_id
        return model


def open_base(base: "str | Path | PreTrainedModel") -> Base:
    """The base of a training run, refused if it is not a causal language model of plain weights."""
    from transformers import AutoConfig, PreTrainedModel

    if isinstance(base, str | Path):
        checkpoint = open_checkpoint(base, companions=["tokenizer*", "*.jinja", "*.model", "*.txt"])
        assert checkpoint.folder is not None
        if "model_type" not in checkpoint.config:
            raise UnsupportedError(f"{checkpoint.name} has no config.json with a model_type: it cannot be trained.")
        try:
            config = AutoConfig.from_pretrained(checkpoint.folder)
        except ValueError as error:
            raise UnsupportedError(f"{checkpoint.name}: transformers does not know this model ({error}).") from None
        _check_causal(config, checkpoint.name, checkpoint.config.get("architectures"))
        return Base(checkpoint.folder, config, checkpoint.name if checkpoint.revision else "")
    if is_peft_model(base):
        raise UnsupportedError("the base is wrapped by PEFT. Call merge_and_unload() first, or give its base model.")
    if not isinstance(base, PreTrainedModel):
        raise BadValueError(f"the base must be a folder, a Hub id or a PreTrainedModel, not a {type(base).__name__}.")
    _check_causal(base.config, f"the live {type(base).__name__}", [type(base).__name__])
    if base.get_output_embeddings() is None:
        raise UnsupportedError(f"the live {type(base).__name__} has no output head: it is not a language model.")
    return Base(base, base.config)


def _check_causal(config: "PreTrainedConfig", where: str, architectures: "list[str] | None") -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    remedy = "Task vectors of this library are those of causal language models (GPT, Llama, Phi, ...)."
    kind = architectures[0] if architectures else config.model_type
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(f"{where} ({kind}) is not a causal language model. {remedy}")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise UnsupportedError(f"{where} ({kind}) is an encoder: its tokens see what follows them. {remedy}")


def add_lora(model: "PreTrainedModel", settings: TrainingSettings) -> Any:
    """The model with new, trainable factors beside its frozen weights: a `PeftModel`."""
    from peft import LoraConfig, get_peft_model

    targets = settings.targets or ALL_LINEAR
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha or 2 * settings.rank,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(settings.seed)
    adapted = get_peft_model(model, config)
    if not isinstance(config.target_modules, str):  # a set, which would be stored in another order each time
        config.target_modules = sorted(config.target_modules)  # type: ignore[arg-type]
    return adapted


def check_targets(model: torch.nn.Module, targets: tuple[str, ...] | str | None) -> None:
    """Refuse targets that name no module, or one that LoRA cannot adapt. The model may be on the meta device."""
    from transformers.pytorch_utils import Conv1D

    if targets is None or targets == ALL_LINEAR:
        return
    modules = dict(model.named_modules())
    adaptable = [n for n, m in modules.items() if isinstance(m, torch.nn.Linear | torch.nn.Embedding | Conv1D)]
    known = sorted({name.rsplit(".", 1)[-1] for name in adaptable})
    if not targets:
        raise BadValueError(f"targets is empty. The model has {some(known, 12)}; or leave targets out for all of them.")
    for target in [targets] if isinstance(targets, str) else targets:
        if isinstance(targets, str):
            try:
                found = [name for name in modules if re.fullmatch(target, name)]
            except re.error as error:
                raise BadValueError(f"targets={target!r} is not a regular expression ({error}).") from None
        else:
            found = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not found:
            hint = did_you_mean(target, known)
            raise MissingNameError(
                f"no module of the model matches the target {target!r}.{hint} It has {some(known, 12)}."
            )
        wrong = [name for name in found if name not in adaptable]
        if wrong:
            raise UnsupportedError(
                f"the target {target!r} matches {wrong[0]}, a {type(modules[wrong[0]]).__name__}. LoRA adapts linear layers "
                f"and embeddings: {some(known, 12)}."
            )


def whole_weights(model: torch.nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """The state dict with every sharded tensor gathered, for the process that keeps it; all must call it."""
    weights = {}
    for name, tensor in model.state_dict().items():
        whole = gathered(tensor)
        if keep:
            weights[name] = whole
    return weights


def save_model(model: Any, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """A model folder (or, of a `PeftModel`, an adapter folder) with the given weights."""
    if not is_peft_model(model):
        model.save_pretrained(folder, state_dict=dict(weights))
        return
    model.save_pretrained(folder, state_dict=dict(weights), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty form of a card, which tells nothing of this run
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text("utf-8"))
    config["base_model_name_or_path"] = config["base_model_name_or_path"] or None
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
