"""The progress bars of the analysis."""

from collections.abc import Iterable
from typing import TypeVar

from tqdm.auto import tqdm

_Item = TypeVar("_Item")


def progress_bar(items: Iterable[_Item], what: str, progress: bool | None, total: int | None = None) -> "tqdm[_Item]":
    """A bar over items, shown or not; with `progress=None` on a terminal only."""
    return tqdm(items, desc=what, total=total, disable=None if progress is None else not progress)
