"""A callable in the place of a module's forward, for what hooks cannot do: a block around the whole call."""

from abc import ABC, abstractmethod
from functools import update_wrapper
from typing import Any, NoReturn

import torch

from hf_taskvec.errors import UnsupportedError


def refuse_copy(*_: Any) -> NoReturn:
    """For `__deepcopy__` and `__reduce_ex__` of what an attached edit leaves in a model."""
    raise UnsupportedError(
        "a model to which a vector is attached cannot be copied or pickled: the copy would go on adding that change. "
        "End the edit first (edit.restore()), or copy the model before. (model.save_pretrained() saves the weights, of "
        "which an attached edit is no part.)"
    )


class ReplacedForward(ABC):
    """In the place of a module's forward until `remove`. Subclasses say in `run` what a call does.

    Args:
        module (`torch.nn.Module`):
            Whose forward is replaced.

    Attributes:
        forward (`Callable`):
            What was there before.

    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.forward = module.forward
        self._module, self._had_own = module, "forward" in vars(module)
        update_wrapper(self, self.forward, updated=())  # generate() and Trainer look at the signature
        self._is_over = False
        module.forward = self

    @property
    def fingerprint(self) -> str:
        """What it changes in the model's output, for the model's fingerprint; empty for nothing."""
        return ""

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What is called instead of the forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run`; after `remove`, should another library have kept this, the forward itself."""
        return (self.forward if self._is_over else self.run)(*args, **kwargs)

    def remove(self) -> None:
        """Put back what was there before."""
        self._is_over = True
        if vars(self._module).get("forward") is not self:  # replaced once more, by somebody who calls this one
            return
        if self._had_own:
            self._module.forward = self.forward
        else:
            del self._module.forward

    __deepcopy__ = __reduce_ex__ = refuse_copy
