"""Folders that appear when they are complete."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.folders import names

from hf_taskvec.errors import OutputError
from hf_taskvec.files.output_folder import new_folder
from hf_taskvec.files.own_folder import MARK


def test_a_second_writer_is_told_so_once(tmp_path: Path) -> None:
    told = r"^another run is writing out\. Wait until it is done, or choose another folder\.$"
    with new_folder(tmp_path / "out", "marker") as part:
        with pytest.raises(OutputError, match=told), new_folder(tmp_path / "out", "marker"):
            pass
        (part / "marker").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _output(final: Path, text: str, overwrite: bool = False) -> None:
    with new_folder(final, "marker", overwrite) as part:
        (part / "marker").write_text(text)


def _failing(part: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the rename of an unfinished folder fail."""
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self == part:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no"), None])
def test_an_earlier_output_comes_back_if_replacing_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    final = tmp_path / "out"
    _output(final, "old")
    if error is None:  # as a kill between the two renames leaves it
        final.rename(tmp_path / ".out.replaced")
        with pytest.raises(OutputError, match="already holds an output"):
            _output(final, "new")
    else:
        with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, OutputError)):
            _failing(tmp_path / ".out.unfinished", error, patch)
            _output(final, "new", overwrite=True)
    assert (final / "marker").read_text() == "old"
    _output(final, "new", overwrite=True)
    assert (final / "marker").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


_HOLDER = """
import sys
from hf_taskvec.files.output_folder import new_folder
with new_folder(sys.argv[1], "marker") as part:
    (part / "half").touch()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_told_so_and_a_killed_one_keeps_nobody_out(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path / "out")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"writing\n"
        with pytest.raises(OutputError, match=r"^another run is writing out\."):
            _output(tmp_path / "out", "second")
        holder.kill()
        holder.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", ".out.unfinished"]
    assert names(tmp_path / ".out.unfinished") == [MARK, "half"]
    _output(tmp_path / "out", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["marker"]


def test_an_output_leaves_no_lock_behind(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out", "marker"):
        assert (tmp_path / ".out.lock").exists()
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "other", "marker"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_processes_with_folders_of_their_own_for_temporary_files_see_one_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As jobs of a cluster have them."""
    (tmp_path / "temporary").mkdir()
    with new_folder(tmp_path / "out", "marker"):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        with pytest.raises(OutputError, match=r"^another run is writing out\."):
            _output(tmp_path / "out", "second")
