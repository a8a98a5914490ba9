"""Progress bars: on a terminal unless told otherwise, and in the main process only."""

import pytest

from hf_taskvec import distributed, progress
from hf_taskvec.progress import progress_bar, progress_line


def test_a_bar_is_shown_when_asked_for_and_never_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress_bar([1, 2, 3], "Counting", progress=True)) == [1, 2, 3]
    assert "Counting: 100%" in capsys.readouterr().err
    for shown in (None, False):  # what pytest captures is no terminal
        assert list(progress_bar([1, 2, 3], "Counting", shown)) == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_a_line_is_written_where_bars_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shown in (True, None, False):
        progress_line("part 1 of 2", shown)
        assert capsys.readouterr().err == ("part 1 of 2\n" if shown else "")
    monkeypatch.setattr(distributed, "_is_set_up", lambda: False)
    monkeypatch.setenv("RANK", "1")
    progress_line("part 1 of 2", True)
    assert capsys.readouterr().err == ""


def test_a_long_call_says_how_far_it_is_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONG", 0.0)
    with progress_bar((), "Asking", None, unit="batch") as bar:
        bar.reset(2)
        bar.update()
        bar.update()
    said = capsys.readouterr().err
    assert "\r" not in said
    assert said.splitlines()[-1].startswith("Asking: 100%")
    assert list(progress_bar([1], "Asking", False)) == [1]
    assert capsys.readouterr().err == ""
    progress_line("an hour", None, 3600.0)
    progress_line("an hour", False, 3600.0)
    assert capsys.readouterr().err == "an hour\n"


def test_other_processes_show_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_is_set_up", lambda: False)
    monkeypatch.setenv("RANK", "1")
    assert list(progress_bar([1, 2], "Counting", progress=True)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_a_bar_waits_for_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process alone may extract a vector: the others need not come to the same line."""

    def connect() -> None:
        raise AssertionError("connected to the other processes")

    monkeypatch.setattr(distributed, "_is_set_up", lambda: False)
    monkeypatch.setattr(distributed, "_partial_state", connect)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert list(progress_bar([1, 2], "Counting", progress=False)) == [1, 2]
