"""The layout of a model class: the canonical name of each weight, and how files and live models call and store it.

The canonical name is the one that transformers writes to disk. transformers itself tells how the names in a live model
relate to it (its conversion tables), which weights are tied, and which layers store their weight transposed; all of
that is read off a model built on the meta device, which costs no memory.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from hf_taskvec.errors import MismatchError, UnsupportedError, some

# Causal masks and rotary tables that older checkpoints carry as if they were weights.
_BUFFERS = re.compile(r"(\.attn\.(attention\.)?|\.attention\.)(bias|masked_bias)$|rotary_emb\.\w*inv_freq$")
_PEFT_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.)")
_PEFT_OWN = re.compile(r"\.(lora_\w+|modules_to_save|trainable_tokens_\w+)(\.|$)")


@dataclass(frozen=True)
class Layout:
    """What is known about a model class's parameters. An empty one stands for an unknown architecture."""

    architecture: str | None = None
    #: canonical name -> shape; tied aliases are not among them
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: tied alias -> the canonical name that is stored
    tied: Mapping[str, str] = field(default_factory=dict)
    #: canonical names of weights that `Conv1D` stores transposed
    conv1d: frozenset[str] = frozenset()
    #: canonical names of the weights of `nn.Embedding` and its subclasses
    embeddings: frozenset[str] = frozenset()
    #: those of them that look up other rows than they are asked for (OPT's positions), which PEFT does not know
    offset: frozenset[str] = frozenset()
    #: name in the live model -> canonical name, where they differ one to one
    renamed: Mapping[str, str] = field(default_factory=dict)
    #: names of live parameters that are stored as several tensors (fused experts)
    fused: frozenset[str] = frozenset()
    #: what the base model's parameters start with in the full model, e.g. `transformer.`
    prefix: str = ""

    def canonical(self, name: str) -> str:
        """The canonical name of a live parameter's name."""
        return self.renamed.get(name, name)

    def live(self, name: str) -> str:
        """The live parameter's name of a canonical name."""
        return {disk: live for live, disk in self.renamed.items()}.get(name, name)

    def place(self, names: Iterable[str], where: str) -> dict[str, str]:
        """Canonical name (or tied alias) -> the given name, for every name that is a parameter.

        Names with the base model's prefix missing or superfluous are recognised; buffers are left out by name.
        Anything else is an error.
        """
        if not self.shapes:
            return {name: name for name in names}
        placed: dict[str, str] = {}
        unknown = []
        for name in names:
            candidates = (name, self.canonical(name), self.prefix + name, name.removeprefix(self.prefix))
            found = next((c for c in candidates if c in self.shapes or c in self.tied), None)
            if found in placed:
                raise MismatchError(
                    f"{where}: {placed[found]} and {name} both are {found} of {self.architecture}. Save the model "
                    "again with save_pretrained()."
                )
            if found is not None:
                placed[found] = name
            elif not _BUFFERS.search("." + name):
                unknown.append(name)
        if unknown:
            raise MismatchError(
                f"{where}: {some(unknown)} {'is' if len(unknown) == 1 else 'are'} not among the parameters of "
                f"{self.architecture}, which its config names. The files and the config do not belong together; "
                "save the model again with save_pretrained()."
            )
        return placed


def unwrapped(name: str) -> str | None:
    """A name in a PEFT-wrapped model as the base model has it; None for a parameter that PEFT added.

    >>> unwrapped("base_model.model.lm_head.base_layer.weight")
    'lm_head.weight'
    >>> unwrapped("base_model.model.lm_head.lora_A.default.weight") is None
    True
    """
    if _PEFT_OWN.search(name):
        return None
    return _PEFT_WRAPPERS.sub("", name.removeprefix("base_model.model."))


def how_to_untie(head: str) -> str:
    """What to do to get an untied copy of a model; `head` is the live name of the weight that is tied."""
    return (
        f"To untie a model, give it a head of its own (model.{head} = torch.nn.Parameter(model.{head}.clone())), set "
        "model.config.tie_word_embeddings = False, and save it."
    )


def is_peft_model(model: object) -> bool:
    """Whether a model is a `PeftModel`, without importing peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def without_peft(model: Any) -> Any:
    """The model itself, without PEFT's wrapper if it has one."""
    return model.get_base_model() if is_peft_model(model) else model


def layout_of_config(config: Mapping[str, Any] | None) -> Layout:
    """The layout of the causal language model that a `config.json` describes."""
    if not config or "model_type" not in config:
        return Layout()
    return _layout_of_json(json.dumps(config, sort_keys=True, default=str))


def layout_of_model(model: Any) -> Layout:
    """The layout of a live model, wrapped by PEFT or not."""
    config = getattr(without_peft(model), "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return Layout()
    return layout_of_config(config.to_dict())


@lru_cache(maxsize=32)
def _layout_of_json(text: str) -> Layout:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.pytorch_utils import Conv1D
    from transformers.utils import logging

    data = json.loads(text)
    data.pop("quantization_config", None)
    kind = data["model_type"]
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:  # an architecture that this transformers does not know
        return Layout()
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(f"{kind} is not a causal language model that transformers knows.")
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**data))
    except Exception as error:  # transformers raises whatever the values lead it to
        raise MismatchError(
            f"the config does not describe a {kind} model that can be built ({type(error).__name__}: {error}). Is it "
            "the model's own config.json?"
        ) from None
    finally:
        logging.set_verbosity(level)
    live = dict(model.named_parameters(remove_duplicate=False))
    tied = dict(model.all_tied_weights_keys)
    disk = revert_weight_conversion(model, dict(live))
    renamed, fused = {}, set()
    for name, tensor in live.items():
        if name in disk:
            continue
        one = revert_weight_conversion(model, {name: tensor})
        if len(one) == 1:
            renamed[name] = next(iter(one))
        else:
            fused.add(name)
    modules = {renamed.get(f"{n}.weight", f"{n}.weight"): module for n, module in model.named_modules()}
    embeddings = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Embedding)}
    return Layout(
        architecture=type(model).__name__,
        shapes={name: tuple(tensor.shape) for name, tensor in disk.items() if name not in tied},
        tied=tied,
        conv1d=frozenset(name for name, module in modules.items() if isinstance(module, Conv1D)),
        embeddings=frozenset(embeddings),
        offset=frozenset(name for name, module in embeddings.items() if hasattr(module, "offset")),
        renamed=renamed,
        fused=frozenset(fused),
        prefix=f"{model.base_model_prefix}." if model.base_model_prefix else "",
    )
