"""Classes beside the causal language models: all those that the other auto classes of transformers give for a task.

Bodies without a head (`AutoModel`) are left out: their weights are those of the classes that have one.
"""

from __future__ import annotations

import re

from transformers.models.auto import modeling_auto

_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def _tables() -> dict[str, dict[str, str | tuple[str, ...]]]:
    """What an auto class is for -> model type -> class or classes, as transformers has them."""
    found = {}
    for name, table in vars(modeling_auto).items():
        named = re.fullmatch(r"MODEL_FOR_(\w+?)(?:_MAPPING)?_NAMES", name)
        if named and name != _CAUSAL:
            found[named[1].lower().replace("_", "-")] = table
    return found


def _classes() -> dict[str, tuple[str, str]]:
    causal = set(getattr(modeling_auto, _CAUSAL).values())
    found: dict[str, tuple[str, str]] = {}
    for table, types in _tables().items():
        for model_type, named in types.items():
            for name in (named,) if isinstance(named, str) else named:
                if name not in causal:
                    found.setdefault(name, (table, model_type))
    return found


#: class -> what the auto class that gives it first is for, and its model type; none that a causal language model is
CLASSES = _classes()

# Whose classes go through the check of live models as well: it takes twice the time of the other.
_LIVE_TABLES = (
    *("pretraining", "image", "masked-image-modeling", "causal-image-modeling", "image-classification"),
    *("image-segmentation", "semantic-segmentation", "instance-segmentation", "universal-segmentation"),
    *("video-classification", "image-text-to-text", "multimodal-lm", "masked-lm", "object-detection"),
)
_LIVE_TYPES = (
    *("albert", "bart", "beit", "bert", "blip", "clip", "convnext", "deberta-v2", "deit", "distilbert", "electra"),
    *("gemma3", "gpt2", "hubert", "llama", "llava", "mbart", "mistral", "modernbert", "mt5", "paligemma", "pegasus"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3", "resnet", "roberta", "siglip", "smolvlm", "swin", "t5", "umt5", "vit"),
    *("wav2vec2", "whisper", "xlm-roberta", "xlnet"),
)
#: all of some auto classes, and those of types that people meet most
LIVE = frozenset(name for name, (table, each) in CLASSES.items() if table in _LIVE_TABLES or each in _LIVE_TYPES)
