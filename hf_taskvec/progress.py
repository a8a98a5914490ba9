"""Progress bars of long calls: on a terminal, unless the caller says otherwise, and only in the main process."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from hf_taskvec.distributed import is_main_process
from hf_taskvec.escaping import visible

if TYPE_CHECKING:
    from tqdm.auto import tqdm

_Item = TypeVar("_Item")
#: seconds after which a call that is not on a terminal says how far it is
LONG = 60.0


class _Lines:
    """A stream in which a bar that is drawn anew is a new line; of the first minute there is none."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begin = stream, time.monotonic()

    def write(self, text: str) -> None:
        """Write what a bar draws."""
        if text.strip() and time.monotonic() - self._begin >= LONG:
            self._stream.write(f"{text.strip()}\n")

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def progress_bar(
    items: Iterable[_Item], what: str, progress: bool | None, total: int | None = None, **options: Any
) -> "tqdm[_Item]":
    """The items, with a progress bar that moves as they are taken. Close it, or use it in a `with` block.

    Args:
        items (`Iterable`):
            What to go through; empty, where the caller moves the bar itself with `update`.
        what (`str`):
            The bar's label.
        progress (`bool` or `None`):
            Whether to show it. `None`: on a terminal only. Other processes than the main one never show it.
        total (`int`, *optional*):
            How many items there are, if `len(items)` does not tell.
        options:
            Of tqdm, such as `unit="B"`.

    """
    from tqdm.auto import tqdm

    shown = progress if is_main_process() else False
    if shown is None and not sys.stderr.isatty():
        # A log: nothing of what is short, and of what is long a line a minute.
        lines: dict[str, Any] = {"file": _Lines(sys.stderr), "delay": LONG, "mininterval": LONG, "miniters": 1}
        return tqdm(
            items, desc=visible(what), total=total, maxinterval=LONG, leave=False, ascii=True, **lines, **options
        )
    return tqdm(items, desc=visible(what), total=total, disable=None if shown is None else not shown, **options)


def progress_line(text: str, progress: bool | None, seconds: float = 0.0) -> None:
    """Write a line between the progress bars of a long call, where these are shown.

    Args:
        text (`str`):
            What is done next.
        progress (`bool` or `None`):
            As for `progress_bar`.
        seconds (`float`, *optional*, defaults to 0.0):
            How long it will take. What takes longer than a minute is told where there is no terminal, too: in a log.

    """
    shown = (sys.stderr.isatty() or seconds > LONG) if progress is None else progress
    if shown and is_main_process():
        print(visible(text), file=sys.stderr)


@contextmanager
def library_bars(progress: bool | None, *libraries: Any) -> Iterator[None]:
    """The progress bars of Hugging Face libraries inside the block: shown, hidden, or as is fit.

    Args:
        progress (`bool` or `None`):
            Whether to show them. `None`: on a terminal, unless they were switched off.
        libraries:
            `datasets` or `huggingface_hub.utils`: what can switch its bars on and off. Afterwards they are as before.

    """
    with ExitStack() as stack:
        for library in libraries:
            before = not library.are_progress_bars_disabled()
            shown = (before and sys.stderr.isatty()) if progress is None else progress
            switch = {True: library.enable_progress_bars, False: library.disable_progress_bars}
            switch[shown]()
            stack.callback(switch[before])
        yield
