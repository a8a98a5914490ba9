"""LoRA adapters of tiny models, as if they had been trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector


@dataclass(frozen=True)
class Adapter:
    base: Path
    folder: Path
    live: PeftModel

    def vector(self, **options: Any) -> TaskVector:
        return TaskVector.from_adapter(self.folder, **options)


def adapter(base: Path, folder: Path, seed: int = 0, save: bool = True, **config: Any) -> Adapter:
    """An adapter that was trained, as far as its numbers show: everything trainable has changed."""
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**{"r": 4, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if save:
        model.save_pretrained(folder)
    return Adapter(base, folder, model)
