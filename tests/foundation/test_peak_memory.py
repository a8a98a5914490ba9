"""What a piece of work takes, beside what is known to be taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_taskvec import peak_memory as module
from hf_taskvec.peak_memory import peak_memory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")
def test_the_peak_is_that_of_the_work_inside() -> None:
    before = torch.ones(30_000_000)  # 120 MB that are held before, and count for nothing
    with peak_memory() as little:
        assert torch.ones(1000).sum() == 1000
    with peak_memory() as much:
        assert torch.ones(50_000_000).sum() == 50_000_000  # given back at once
    held = [torch.ones(10_000) for _ in range(4000)]  # small pieces, which the C library keeps when they are freed
    del held
    with peak_memory() as again:
        held = [torch.ones(10_000) for _ in range(4000)]
    assert again.bytes is not None and 150e6 < again.bytes < 300e6 and len(held) == 4000
    assert little.bytes is not None and little.bytes < 20e6
    assert much.bytes is not None and 150e6 < much.bytes < 300e6
    assert before.numel() == 30_000_000


def test_where_nothing_tells_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_SELF", tmp_path / "none")
    with peak_memory() as peak:
        pass
    assert peak.bytes is None
