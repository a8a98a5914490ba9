"""LoRA on all linear layers, on the embeddings and on the head, against PEFT's own merge in fp64."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from matrix.outcomes import Tally, others
from matrix.subjects import Subject, assert_close, loaded, stored
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from hf_taskvec import TaskVector


def check(subject: Subject, tally: Tally) -> None:
    """Each adapter is a part: exact at λ = 1 and −0.6, or refused."""
    if experts := _experts(subject.base):
        with tally.part("experts"):
            _check_adapter(subject, "experts", [], experts)
            tally.exact += 1
    for what, targets in _targets(subject.base).items():
        before = len(tally.refused)
        with tally.part(what):
            _check_adapter(subject, what, targets)
            tally.exact += 1
        if what == "all-linear" and len(tally.refused) > before:  # it reaches into fused experts
            linear = [n for n, m in subject.base.named_modules() if type(m) is torch.nn.Linear and "lm_head" not in n]
            with tally.part("linear layers"):
                _check_adapter(subject, "linear layers", linear)
                tally.exact += 1


def _targets(model: PreTrainedModel) -> dict[str, str | list[str]]:
    names = {module: name for name, module in model.named_modules()}
    targets: dict[str, str | list[str]] = {"all-linear": "all-linear"}
    for what, getter in (("embeddings", model.get_input_embeddings), ("head", model.get_output_embeddings)):
        try:
            layer = getter()
        except (AttributeError, NotImplementedError):  # the model has none that transformers knows
            continue
        if layer in names:
            targets[what] = [names[layer]]
    return targets


def _experts(model: PreTrainedModel) -> list[str]:
    """The parameters that hold several matrices, which PEFT changes as they are."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and not name.endswith((".weight", ".bias"))
    ]


def _check_adapter(subject: Subject, what: str, targets: str | list[str], parameters: list[str] | None = None) -> None:
    adapter = subject.folder / f"adapter {what}"
    with others("PEFT"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(
            r=3, lora_alpha=5, target_modules=targets, target_parameters=parameters, task_type="CAUSAL_LM"
        )
        wrapped = trained(loaded(subject.base_folder), config)
        wrapped.save_pretrained(adapter)
        # Not the adapter loaded again: PEFT itself loses the factors of some layers beside experts on the way (laguna).
        merged = stored(subject.saved(wrapped.double().merge_and_unload(), f"merged {what}"))
    vector = TaskVector.from_adapter(adapter, base=subject.base_folder)
    base = stored(subject.base_folder)
    for scale in (1.0, -0.6):
        expected = {
            name: tensor.double() + scale * (merged[name].double() - tensor.double()) for name, tensor in base.items()
        }
        found = stored(vector.apply(subject.base_folder, subject.folder / f"{what} at {scale}", scale=scale))
        assert_close(found, expected, f"λ = {scale}")


def trained(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """The model with an adapter in which everything trainable has changed."""
    torch.manual_seed(3)
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return wrapped


def merged_by_peft(base: Path, adapter: Path) -> PreTrainedModel:
    """The base in fp64 with the adapter merged by PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(loaded(base, dtype=torch.float64), adapter).merge_and_unload()
