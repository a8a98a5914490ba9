"""Files that are replaced whole: the old content or the new one, and nothing left over."""

import subprocess
import sys
from pathlib import Path

import pytest

from hf_taskvec import atomic


def test_a_block_that_fails_leaves_the_old_content_and_no_temporary_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    for shared in (False, True):
        for error in (ValueError, KeyboardInterrupt):
            file.write_text("old")
            with pytest.raises(error), atomic.replacing(file, shared) as partial:
                partial.write_text("half of the n")
                raise error
            assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_a_new_file_that_fails_does_not_appear(tmp_path: Path) -> None:
    with pytest.raises(ValueError), atomic.replacing(tmp_path / "new") as partial:
        partial.write_text("half")
        raise ValueError
    assert not list(tmp_path.iterdir())


def test_the_content_appears_under_its_name_when_the_block_ends(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(b"old")
    with atomic.replacing(file) as partial:
        partial.write_bytes(b"new")
        assert file.read_bytes() == b"old" and atomic.is_partial(partial) and partial.parent == tmp_path
    assert file.read_bytes() == b"new" and list(tmp_path.iterdir()) == [file]


def test_bytes_and_text_are_written_as_they_are(tmp_path: Path) -> None:
    atomic.write_bytes(tmp_path / "a", bytes(range(256)))
    atomic.write_text(tmp_path / "b", "λ\r\nθ\n")
    assert (tmp_path / "a").read_bytes() == bytes(range(256))
    assert (tmp_path / "b").read_bytes() == "λ\r\nθ\n".encode()


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    """Rather than an empty file, or the old content passed off as the new."""
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileNotFoundError), atomic.replacing(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "old"


SCRIPT = """
import sys
from pathlib import Path
from hf_taskvec import atomic
file, mark = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for _ in range(200):
    atomic.write_text(file, mark * 20_000, shared=True)
    content = file.read_text()
    assert content in ("a" * 20_000, "b" * 20_000), len(content)
"""


def test_two_processes_that_write_one_file_never_mix_their_contents(tmp_path: Path) -> None:
    file = tmp_path / "shared.txt"
    command = [sys.executable, "-c", SCRIPT, str(file)]
    writers = [
        subprocess.Popen(
            [*command, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for mark in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:  # both at once
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors
    assert file.read_text() in ("a" * 20_000, "b" * 20_000)
    assert list(tmp_path.iterdir()) == [file]


def test_a_temporary_file_is_told_from_others() -> None:
    for name, expected in (
        (".a.json.partial", True),
        (".a.json.12.f00d.partial", True),
        ("a.partial", False),
        (".a", False),
    ):
        assert atomic.is_partial(Path(name)) is expected
