"""Threads that work on many things at once."""

import threading
from collections.abc import Iterator

import pytest
import torch

from hf_taskvec.threads import workers


def test_a_large_machine_gets_no_more_than_16_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has memory of its own, and all of them together are bounded."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 48)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    enough, seen = threading.Event(), set()

    def items() -> Iterator[int]:
        yield from range(30)
        enough.set()

    def work(item: int) -> int:
        seen.add(threading.get_ident())
        enough.wait()  # so that every item needs a thread of its own, as long as there are any
        return item

    with workers() as run:
        assert list(run(work, items())) == list(range(30))
    assert len(seen) == 16
