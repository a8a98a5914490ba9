"""Models on the meta device: all names and shapes of an architecture, without its weights.

Sizes cost nothing there, but each layer is a Python object. What a config asks for is therefore bounded by what the
model's files hold: a config of a few bytes can name a million layers.
"""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from hf_taskvec.errors import MismatchError
from hf_taskvec.models.model_classes import config_for, known_class

# So many parameters are built whatever the files hold, which takes less than a second.
_ALWAYS = 4096
# The most that is built of a config alone. The largest published models have some thousands.
_WITHOUT_FILES = 4 * _ALWAYS
# A live model may have several parameters for a stored tensor: tied ones, and parts of what is stored in one piece.
_PER_TENSOR = 8
# What configs call the numbers of things that a list is made of. They may be as large as a tensor has rows (experts in
# one tensor), or as there are tensors.
_COUNTS = re.compile(r"layer|block|expert|depth|stage|head|codebook|types")
_SIZES = re.compile(r"size|dim|vocab")
_TOO_MUCH = "far more than the model's files hold or, if there are none, than any known model has"


def most_parameters(config: Mapping[str, Any], stored: Mapping[str, Sequence[int]] | None) -> int:
    """How many parameters a model of this config may have, by the shapes of the tensors in its files.

    Raises:
        `MismatchError`: If the config itself names a number of layers or the like beyond that.
    """
    if stored is None:
        most = largest = _WITHOUT_FILES
    else:
        # In powers of two, so that models of about the same size share what is remembered of them.
        most = max(_ALWAYS, 1 << (_PER_TENSOR * len(stored)).bit_length())
        largest = max([most, *(size for shape in stored.values() for size in shape)])
    for key, value in _numbers(config):
        if value > largest and _COUNTS.search(key) and not _SIZES.search(key):
            raise MismatchError(f"the config says {key}={value}, {_TOO_MUCH}. Is it the model's own config.json?")
    return most


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """The whole numbers in a config and in what is nested in it, each with the name that it is under."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _numbers(each, str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each, key)
    elif isinstance(value, int):
        yield key, value


def build_meta_model(config: Mapping[str, Any], most: int, cls: Any = None) -> Any:
    """The model of a config, on the meta device.

    Args:
        config (`Mapping[str, Any]`):
            As it stands in a `config.json`.
        most (`int`):
            How many parameters it may have.
        cls (`type`, *optional*):
            Its class; by default the one that the config names.

    Raises:
        `MismatchError`: If it would have more, or cannot be built.
        `UnsupportedError`: If the config does not tell its class.
    """
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.utils import logging

    cls = cls or known_class(config)
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"), _at_most(most):
            # JSON has no infinity: transformers writes {"__float__": "Infinity"}.
            settings = PreTrainedConfig._decode_special_floats(dict(config))
            return cls._from_config(config_for(cls, AutoConfig.for_model(**settings)))
    except _TooLargeError:
        raise MismatchError(
            f"the config describes a {cls.__name__} of more than {most} parameters, {_TOO_MUCH}. Is it "
            "the model's own config.json?"
        ) from None
    except Exception as error:  # transformers raises whatever the values lead it to
        raise MismatchError(
            f"the config does not describe a {cls.__name__} that can be built ({type(error).__name__}: {error}). Is it "
            "the model's own config.json?"
        ) from None
    finally:
        logging.set_verbosity(level)


class _TooLargeError(Exception):
    """Ends the building of a model."""


@contextmanager
def _at_most(parameters: int) -> Iterator[None]:
    """A block in which this thread cannot register more parameters, or modules, than so many."""
    thread, counts = threading.get_ident(), {"parameters": 0, "modules": 0}

    def count(what: str) -> None:
        if threading.get_ident() == thread:
            counts[what] += 1
            if counts[what] > parameters:
                raise _TooLargeError

    handles = [
        torch_modules.register_module_parameter_registration_hook(lambda *_: count("parameters")),
        torch_modules.register_module_module_registration_hook(lambda *_: count("modules")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
