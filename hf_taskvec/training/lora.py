"""LoRA: trainable factors beside a model's frozen weights."""

import re
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean, some
from hf_taskvec.models.layout import layout_of_model
from hf_taskvec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"  # PEFT's word for every linear layer but the output head


def add_lora(model: "PreTrainedModel", settings: TrainingSettings) -> Any:
    """The model with new, trainable factors beside its frozen weights: a `PeftModel`."""
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    targets = settings.targets or ALL_LINEAR
    config = LoraConfig(
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # as GPT-2 stores its weights
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
        if restructured := sorted(layout_of_model(model).restructured):
            raise UnsupportedError(
                f"{some(restructured)}: transformers stores such parameters (fused experts, for example) in another "
                "form than the live model has, and LoRA cannot adapt them in a form that a task vector can hold. Name "
                "other layers as targets, e.g. ('q_proj', 'v_proj')."
            )
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
                f"the target {target!r} matches {wrong[0]}, a {type(modules[wrong[0]]).__name__}. LoRA adapts linear "
                f"layers and embeddings: {some(known, 12)}."
            )
