"""Which class of transformers a model is of: the one that its config names, or that the live model has.

Code beside a model (`auto_map`) is never run. Where a class is defined there alone, it is not known here, and the names
in the files are taken as they are.
"""

from collections.abc import Mapping
from typing import Any

from hf_taskvec.errors import UnsupportedError


def named_classes(config: Mapping[str, Any]) -> list[str]:
    """The names of classes in a config's `architectures`."""
    named = config.get("architectures")
    return [each for each in named if isinstance(each, str)] if isinstance(named, list | tuple) else []


def known_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a `config.json` describes; None for a type that transformers does not know.

    That is the first in `architectures` that belongs to the config's type. A config that names no such class describes
    the causal language model of its type.

    Raises:
        `UnsupportedError`: If it names none, and there is no causal language model of its type.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    own = CONFIG_MAPPING[kind]
    named = named_classes(config)
    for name in named:
        found = own_class(name)
        if found is not None and _takes(found, own):
            return found
    if own in MODEL_FOR_CAUSAL_LM_MAPPING:
        return causal_class(kind)
    told = (
        f"names {' and '.join(named)}, which this transformers does not know as one of them"
        if named
        else "names no class"
    )
    raise UnsupportedError(
        f"a config of type {kind} may be that of several classes of model, and this one {told} in its architectures. "
        "Save the model again with its save_pretrained(), which writes the class down."
    )


def causal_class(kind: str) -> Any:
    """The causal language model of a model type; None if there is none, or several."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)
    return found if isinstance(found, type) else None


def own_class(name: str) -> Any:
    """The model class of that name that transformers itself has; None if it has none."""
    import transformers

    try:
        found = getattr(transformers, name, None)
    except ImportError:  # it needs a package that is not installed
        return None
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def class_of_model(model: Any) -> Any:
    """The class of a live model, without what `fully_shard` makes of it; None if it is no model of transformers."""
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel

    models = (each for each in type(model).__mro__ if issubclass(each, PreTrainedModel))
    return next((each for each in models if not issubclass(each, FSDPModule)), None)


def config_for(cls: Any, config: Any) -> Any:
    """What a class is made from: a config, or of a model of pictures and text the text's, if it is a text model's."""
    return config if isinstance(config, cls.config_class) else config.get_text_config()


def _takes(cls: Any, config: type) -> bool:
    """Whether a model class is made from configs of a class, or of the text in them."""
    wanted = cls.config_class
    if wanted is None:
        return False
    return issubclass(config, wanted) or config.sub_configs.get("text_config") is wanted  # type: ignore[attr-defined]
