"""What of a model is trained: all of it, the weights of some modules, or LoRA's factors beside frozen weights."""

import re
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean, some
from hf_taskvec.models.layout import layout_of_model
from hf_taskvec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"  # PEFT's word for every linear layer but the output head


def make_trainable(model: "PreTrainedModel", settings: TrainingSettings) -> Any:
    """The model as it is trained: with LoRA's factors, or with the weights of all but the targets frozen."""
    if settings.method == "lora":
        return add_lora(model, settings)
    if settings.targets is not None:
        model.requires_grad_(False)
        for _, module in targeted_modules(model, settings.targets):
            module.requires_grad_(True)
    return model


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
    # PEFT makes sets of them, which would be stored in another order each time.
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)  # type: ignore[arg-type]
    if config.target_parameters is not None:
        config.target_parameters = sorted(config.target_parameters)
    return adapted


def check_targets(model: torch.nn.Module, settings: TrainingSettings) -> None:
    """Refuse targets that name no module, or one that cannot be trained so. The model may be on the meta device."""
    from transformers.pytorch_utils import Conv1D

    targets = settings.targets
    if settings.method == "lora" and (targets is None or targets == ALL_LINEAR):
        fused = sorted(layout_of_model(model).restructured)
        if fused and settings.dropout:
            raise UnsupportedError(
                f"{some(fused)}: PEFT's LoRA on parameters that hold several matrices (fused experts) has no dropout. "
                "Set dropout=0, or name other layers as targets, e.g. ('q_proj', 'v_proj')."
            )
        return
    if targets is None:
        return
    adaptable = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    for target, module in targeted_modules(model, targets):
        if settings.method == "lora" and not isinstance(module, adaptable):
            raise UnsupportedError(
                f"the target {target!r} matches a {type(module).__name__}. LoRA adapts linear layers and embeddings: "
                f"{some(_trainable_ends(model), 12)}."
            )
        if next(module.parameters(), None) is None:
            raise UnsupportedError(f"the target {target!r} matches a {type(module).__name__}, which has no weights.")


def targeted_modules(model: torch.nn.Module, targets: tuple[str, ...] | str) -> list[tuple[str, torch.nn.Module]]:
    """The modules that targets name, each with its target: by the end of their names, or by a regular expression."""
    known = _trainable_ends(model)
    if not targets:
        raise BadValueError(f"targets is empty. The model has {some(known, 12)}; or leave targets out for all of them.")
    modules = dict(model.named_modules())
    chosen: list[tuple[str, torch.nn.Module]] = []
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
        chosen += [(target, modules[name]) for name in found]
    return chosen


def _trainable_ends(model: torch.nn.Module) -> list[str]:
    """The last parts of the names of linear layers and embeddings."""
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    return sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, kinds)})
