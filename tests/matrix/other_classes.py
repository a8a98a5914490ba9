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
