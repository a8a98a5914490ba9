"""The processes of an `accelerate launch`, or the one process that there is.

Everything that has to know about other processes asks here. accelerate is imported only where there are several
processes, or where a device is asked for.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from hf_taskvec.errors import BadValueError, TaskVectorError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator, PartialState

Result = TypeVar("Result")

# Seconds between two signs of life, and after how many without one a process counts as gone.
_SIGN, _SILENCE = 3.0, 45.0


class Processes:
    """All processes of this run, seen from one of them. The names are those of accelerate's `PartialState`.

    >>> alone = Processes()
    >>> alone.num_processes, alone.is_main_process, alone.gather("value")
    (1, True, ['value'])
    """

    def __init__(self, state: "PartialState | None" = None) -> None:
        self._state = state
        if self.num_processes > 1:
            _signs_of_life()

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
        if self.num_processes > 1:
            import torch

            devices = [self.device.index] if self.device.index is not None else None
            wait_watching(lambda: torch.distributed.barrier(async_op=True, device_ids=devices))

    def gather(self, value: Any) -> list[Any]:
        """A small value from every process, in the order of processes; every process must call this."""
        if self.num_processes == 1:
            return [value]
        from accelerate.utils import gather_object

        self.wait_for_everyone()
        with others_alive():
            return list(gather_object([value]))

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The sum of a tensor over all processes, on the CPU if there are several."""
        if self.num_processes == 1:
            return tensor
        import torch

        there = tensor.to(self.device, copy=True)
        wait_watching(lambda: torch.distributed.all_reduce(there, async_op=True))
        return there.cpu()

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Put the main process's values into this tensor, bit for bit; every process must call this."""
        if self.num_processes == 1:
            return
        import torch

        there = tensor.detach().to(self.device).contiguous()
        wait_watching(lambda: torch.distributed.broadcast(there, 0, async_op=True))
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
def others_alive() -> Iterator[None]:
    """What torch raises when another process is gone, in words."""
    try:
        yield
    except RuntimeError as error:
        raise _gone(str(error).splitlines()[0][:200]) from None


def _gone(why: str) -> TaskVectorError:
    return TaskVectorError(
        f"another process of this run has ended, or cannot be reached ({why}). Its own output tells why. Start the run "
        "again: what was finished is kept."
    )


def wait_watching(send: Callable[[], Any], group: Any = None) -> None:
    """Send something to the other processes and wait for them, for as long as all of them give signs of life.

    torch notices at once that a connection is closed, but not for half an hour that nothing comes through it any more:
    of a host that is cut off or frozen. A process that is slow gives signs of life, however long it takes.

    Args:
        send (`Callable`):
            A collective call of torch.distributed with `async_op=True`.
        group (`ProcessGroup`, *optional*):
            Those that make it; by default all processes.

    Raises:
        `TaskVectorError`: If another process has ended, or is silent for longer than three quarters of a minute.
    """
    signs, pause = _signs_of_life(), 0.0
    with others_alive():
        work = send()
        while work is not None and not work.is_completed():
            if signs is not None and (silent := signs.silence(group)) > _SILENCE:
                raise _gone(f"no sign of life for {silent:.0f} seconds")
            time.sleep(pause)
            pause = min(0.02, pause * 1.5 + 1e-5)
        if work is not None:
            work.wait()


class _SignsOfLife(threading.Thread):
    """Tells the other processes every few seconds that this one is there, and sees whether they do.

    They meet in the store of torch.distributed. A call to it waits as long as its host is silent; so only this thread
    makes such calls, and one that does not return is silence too.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="taskvec-signs-of-life")
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed import get_rank, get_world_size
        from torch.distributed.distributed_c10d import _get_default_store

        self.home = _get_default_store()
        self._store = PrefixStore("taskvec-signs-of-life", self.home)
        self._rank, self._others = get_rank(), [each for each in range(get_world_size()) if each != get_rank()]
        self._counts = dict.fromkeys(self._others, 0)
        self._seen: dict[int, float] = {}
        self._looked = time.monotonic()

    def run(self) -> None:
        try:
            while _signs is self:
                self._store.add(str(self._rank), 1)
                for other in self._others:
                    count = self._store.add(str(other), 0)
                    if count != self._counts[other]:
                        self._counts[other], self._seen[other] = count, time.monotonic()
                self._looked = time.monotonic()
                time.sleep(_SIGN)
        except RuntimeError:  # the store is gone: so is the process that has it, which is silence
            return

    def silence(self, group: Any) -> float:
        """For how many seconds the most silent process of a group has given no sign, once it had begun to give them."""
        from torch.distributed import get_process_group_ranks

        ranks = self._others if group is None else get_process_group_ranks(group)
        return time.monotonic() - min([self._looked, *(self._seen[each] for each in ranks if each in self._seen)])


_signs: _SignsOfLife | None = None


def _signs_of_life() -> _SignsOfLife | None:
    """The thread that gives and sees them, which runs from the first time that it is asked for."""
    global _signs
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    if _signs is None or _signs.home is not _get_default_store():
        _signs = _SignsOfLife()
        _signs.start()
    return _signs


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
