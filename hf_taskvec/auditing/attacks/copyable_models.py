"""Which live models can be copied to be attacked: those that their weights tell everything about."""

from typing import Any

import torch

from hf_taskvec.errors import BadValueError, UnsupportedError, some
from hf_taskvec.models.fingerprints import hooked_modules
from hf_taskvec.models.layout import is_peft_model


def check_copyable(model: Any, attack: str) -> None:
    """Refuse a model that a copy of its weights would not be.

    Args:
        model (`PreTrainedModel`):
            The live model.
        attack (`str`):
            What is to be done to the copy, for messages.

    Raises:
        `BadValueError`: If it is no live model.
        `UnsupportedError`: If it has hooks (an attached edit, for example), or is not on one device.
    """
    if not isinstance(model, torch.nn.Module):
        raise BadValueError(f"{attack} attacks a live model, not a {type(model).__name__}. Load it first.")
    what = f"the live {type(model).__name__}"
    hooked = [] if is_peft_model(model) else hooked_modules(model)  # PEFT is refused by name, with its remedy
    if hooked:
        raise UnsupportedError(
            f"{what} has hooks at {some(hooked)}: a copy of its weights would not be the same model. An attached edit "
            "must be merged before it is attacked: vector.edit(model).keep(), on a copy of the model."
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise UnsupportedError(
            f"{what} is offloaded or spread over {some(map(str, devices))}, which {attack} was not tested with. Load "
            "it on one device."
        )
