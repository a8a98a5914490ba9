"""Progress bars: on a terminal unless told otherwise, and in the main process only."""

import pytest

from hf_taskvec import progress as module
from hf_taskvec.distributed import Processes
from hf_taskvec.progress import progress_bar


def test_a_bar_is_shown_when_asked_for_and_never_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress_bar([1, 2, 3], "Counting", progress=True)) == [1, 2, 3]
    assert "Counting: 100%" in capsys.readouterr().err
    for progress in (None, False):  # what pytest captures is no terminal
        assert list(progress_bar([1, 2, 3], "Counting", progress)) == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_other_processes_show_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(Processes):
        process_index = 1

    monkeypatch.setattr(module, "processes", Second)
    assert list(progress_bar([1, 2], "Counting", progress=True)) == [1, 2]
    assert capsys.readouterr().err == ""
