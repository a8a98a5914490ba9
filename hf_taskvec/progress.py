"""Progress bars of long calls: on a terminal, unless the caller says otherwise, and only in the main process."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from hf_taskvec.distributed import is_main_process
from hf_taskvec.escaping import visible

if TYPE_CHECKING:
    from tqdm.auto import tqdm

_Item = TypeVar("_Item")


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
    return tqdm(items, desc=visible(what), total=total, disable=None if shown is None else not shown, **options)


def progress_line(text: str, progress: bool | None) -> None:
    """Write a line between the progress bars of a long call, where these are shown.

    Args:
        text (`str`):
            What is done next.
        progress (`bool` or `None`):
            As for `progress_bar`.

    """
    shown = sys.stderr.isatty() if progress is None else progress
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
