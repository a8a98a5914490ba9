"""Threads that work on many things at once, in each of which torch uses one thread.

For small pieces that is faster than one thing after another with all of torch's threads, which then mostly wait for
each other.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

# A thread's own memory is 10 to 15 MB. More threads than these hardly write faster, and would take half a gigabyte.
MOST = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Run(Protocol):
    """Gives the function's result for each item, in the order of the items."""

    def __call__(self, function: Callable[[_Item], _Result], items: Iterable[_Item], /) -> Iterator[_Result]:
        """Call the function with each item, in whichever thread is free."""


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which torch uses one thread: the last bits of products and sums hang on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def workers(threads: int | None = None) -> Iterator[Run]:
    """Threads that take items as they are made, a few ahead of what is asked for.

    While the block runs, torch uses one thread in this process and in each of these.

    Args:
        threads (`int`, *optional*):
            How many; by default as many as torch uses, but no more than 16.

    Yields:
        `Run`: A function that takes a function and items, and gives the results in the order of the items.

    Example:
        >>> with workers(2) as run:
        ...     list(run(abs, [-1, 2, -3]))
        [1, 2, 3]

    """
    before = torch.get_num_threads()
    count = threads or min(before, MOST)
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(count, initializer=lambda: torch.set_num_threads(1))

    def run(function: Callable[[_Item], _Result], items: Iterable[_Item], /) -> Iterator[_Result]:
        waiting: deque[Future[_Result]] = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
