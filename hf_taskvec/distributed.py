"""The processes of an `accelerate launch`, or the one process that there is.

Everything that has to know about other processes asks here. accelerate is imported only where there are several
processes, or where a device is asked for.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from hf_taskvec.errors import BadValueError, TaskVectorError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator, PartialState

Result = TypeVar("Result")


class Processes:
    """All processes of this run, seen from one of them. The names are those of accelerate's `PartialState`.

    >>> alone = Processes()
    >>> alone.num_processes, alone.is_main_process, alone.gather("value")
    (1, True, ['value'])
    """

    def __init__(self, state: "PartialState | None" = None) -> None:
        self._state = state

    @property
    def process_index(self) -> int:
        """The number of this process."""
        return self._state.process_index if self._state else 0

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self._state.num_processes if self._state else 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self._state.is_local_main_process if self._state else True

    @property
    def device(self) -> "torch.device":
        """The device of this process, as accelerate chooses it."""
        return (self._state or _partial_state()).device

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        if self._state:
            with _others_alive():
                self._state.wait_for_everyone()

    def gather(self, value: Any) -> list[Any]:
        """A small value from every process, in the order of processes; every process must call this."""
        if self.num_processes == 1:
            return [value]
        from accelerate.utils import gather_object

        with _others_alive():
            return list(gather_object([value]))

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The sum of a tensor over all processes, on the CPU if there are several."""
        if self.num_processes == 1:
            return tensor
        import torch

        there = tensor.to(self.device, copy=True)
        torch.distributed.all_reduce(there)
        return there.cpu()

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Put the main process's values into this tensor, bit for bit; every process must call this."""
        if self.num_processes == 1:
            return
        import torch

        there = tensor.detach().to(self.device).contiguous()
        torch.distributed.broadcast(there, 0)
        with torch.no_grad():
            tensor.copy_(there)

    def together(self, work: Callable[[], Result], main_only: bool = False) -> Result | None:
        """What `work` gives; if it fails in any process it fails in all, so that none waits for another forever.

        With `main_only`, only the main process does the work, and the others get `None`.
        """
        result, failure = None, None
        if self.is_main_process or not main_only:
            try:
                result = work()
            except TaskVectorError as error:
                failure = error
        failures = self.gather(str(failure) if failure else "")
        if failure:
            raise failure
        if any(failures):
            raise BadValueError(f"another process failed: {next(filter(None, failures))}")
        return result


@contextmanager
def _others_alive() -> Iterator[None]:
    """What torch raises when another process is gone, in words."""
    try:
        yield
    except RuntimeError as error:
        raise TaskVectorError(
            "another process of this run has ended, or cannot be reached "
            f"({str(error).splitlines()[0][:200]}). Its own output tells why. Start the run again: what was finished "
            "is kept."
        ) from None


def processes() -> Processes:
    """The processes of this run, as `accelerate launch` (or the caller's own `Accelerator`) set them up."""
    return Processes(_partial_state() if is_launched() or _is_set_up() else None)


def is_launched() -> bool:
    """Whether this is one of several launched processes. They are not connected by asking."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main_process() -> bool:
    """Whether this is the process that writes and prints.

    Unlike `processes`, this connects to no other process, so one process alone may ask.
    """
    return processes().is_main_process if _is_set_up() else int(os.environ.get("RANK", "0")) == 0


def make_accelerator(log_with: Any = None, project_dir: str | None = None) -> "Accelerator":
    """An `Accelerator` over the processes of `accelerate launch`, or over this one alone.

    `log_with` names its trackers, which write to `project_dir`.
    """
    from accelerate import Accelerator

    return Accelerator(cpu=_on_cpu(), log_with=log_with, project_dir=project_dir)


def _partial_state() -> "PartialState":
    from accelerate import PartialState

    # `Accelerator` reads this flag, a bare PartialState does not and would leave CPU processes unconnected.
    return PartialState(cpu=_on_cpu())


def _on_cpu() -> bool:
    from accelerate.utils import parse_flag_from_env

    return parse_flag_from_env("ACCELERATE_USE_CPU")


def _is_set_up() -> bool:
    """Whether somebody in this process has asked accelerate for its processes already."""
    accelerate = sys.modules.get("accelerate")
    return accelerate is not None and bool(accelerate.PartialState._shared_state)
