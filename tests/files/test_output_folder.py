"""Folders that appear when they are complete."""

from pathlib import Path

import pytest

from hf_taskvec.errors import OutputError
from hf_taskvec.files.output_folder import new_folder


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
