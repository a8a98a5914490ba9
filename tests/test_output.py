"""Folders that appear when they are complete."""

from pathlib import Path

import pytest

from hf_taskvec.errors import OutputError
from hf_taskvec.output import new_folder


def test_a_second_writer_is_told_so_once(tmp_path: Path) -> None:
    told = r"^another run is writing out\. Wait until it is done, or choose another folder\.$"
    with new_folder(tmp_path / "out", "marker") as part:
        with pytest.raises(OutputError, match=told), new_folder(tmp_path / "out", "marker"):
            pass
        (part / "marker").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
