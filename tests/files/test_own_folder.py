"""What has the name of a hidden folder or file of ours, and is not: it is refused and stays as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.folders import names
from support.launched_training import QUICK, make_blocks
from support.tiny_models import Pair, TinyModels

from hf_taskvec import atomic
from hf_taskvec.errors import OutputError
from hf_taskvec.files.output_folder import new_folder, unfinished
from hf_taskvec.files.own_folder import MARK, scratch_folder
from hf_taskvec.training import finetune

Write = Callable[[Pair, Path], object]
WRITERS: dict[str, Write] = {
    "save": lambda pair, out: pair.vector().save(out, overwrite=True),
    "apply": lambda pair, out: pair.vector().apply(pair.base, out, overwrite=True),
    "to_adapter": lambda pair, out: (
        pair.vector().compress(rank=1).to_adapter(out, base=pair.base, dense="drop", overwrite=True)
    ),
    "finetune": lambda pair, out: finetune(pair.base, make_blocks(), QUICK, out, overwrite=True),
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Write:
    return WRITERS[request.param]


@pytest.fixture
def pair(models: TinyModels) -> Pair:
    return models.pair("phi")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of somebody else, elsewhere."""
    folder = tmp_path / "elsewhere" / "precious"
    (folder / "deeper").mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    (folder / "deeper" / "notes").write_text("more of it")
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ending", ["unfinished", "replaced", "lock"])
def test_a_link_is_not_followed(pair: Pair, tmp_path: Path, precious: Path, write: Write, ending: str) -> None:
    before = content(precious)
    link = tmp_path / f".out.{ending}"
    link.symlink_to(precious if ending != "lock" else precious / "thesis.tex")
    with pytest.raises(OutputError, match=rf"\.out\.{ending} beside the output .*not touched"):
        write(pair, tmp_path / "out")
    assert content(precious) == before and link.is_symlink() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("ending", ["unfinished", "replaced"])
def test_a_folder_that_we_did_not_make_stays(
    pair: Pair, tmp_path: Path, precious: Path, write: Write, ending: str
) -> None:
    before = content(precious)
    theirs = precious.rename(tmp_path / f".out.{ending}")
    with pytest.raises(OutputError, match=r"holds files that no run of this version has left.*remove it"):
        write(pair, tmp_path / "out")
    assert content(theirs) == before and not (tmp_path / "out").exists()


def test_a_file_in_the_way_stays(tmp_path: Path) -> None:
    for ending in ("unfinished", "replaced", "lock"):
        theirs = tmp_path / f".out.{ending}"
        theirs.write_text("mine")
        with pytest.raises(OutputError, match="beside the output is no"), new_folder(tmp_path / "out", "marker"):
            pass
        assert theirs.read_text() == "mine"
        theirs.unlink()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="giving a folder away needs root")
def test_a_folder_of_another_user_stays(tmp_path: Path) -> None:
    theirs = tmp_path / ".out.unfinished"
    theirs.mkdir()
    (theirs / MARK).touch()
    (theirs / "mine").touch()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(OutputError, match="belongs to another user"), new_folder(tmp_path / "out", "marker"):
        pass
    assert names(theirs) == [MARK, "mine"]


def _interrupted(out: Path, after: str | None = None) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(out, "marker", resume=True) as part:
        if after:
            (part / after).write_text("old")
        raise KeyboardInterrupt


@pytest.mark.parametrize("left", ["nothing", "mark", "half", "complete"])
def test_what_a_killed_run_left_is_known_whenever_it_was_killed(tmp_path: Path, left: str) -> None:
    part = unfinished(tmp_path / "out")
    part.mkdir()
    if left in ("mark", "half"):
        (part / MARK).touch()
    if left == "half":
        (part / "half").touch()
    if left == "complete":  # killed between calling it finished and renaming it
        (part / "marker").touch()
    with new_folder(tmp_path / "out", "marker") as again:
        assert names(again) == [MARK]
        (again / "marker").touch()
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["marker"]


def test_a_resumed_run_finds_what_was_left(tmp_path: Path) -> None:
    _interrupted(tmp_path / "out", "marker")
    with new_folder(tmp_path / "out", "marker", resume=True) as part:
        assert (part / "marker").read_text() == "old"
    assert names(tmp_path / "out") == ["marker"]


@pytest.mark.parametrize("output_is_there", [True, False])
def test_an_earlier_output_that_was_half_removed_is_not_brought_back(tmp_path: Path, output_is_there: bool) -> None:
    old = tmp_path / ".out.replaced"
    old.mkdir()
    (old / MARK).touch()
    (old / "rest").touch()
    if output_is_there:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "marker").touch()
    with new_folder(tmp_path / "out", "marker", overwrite=True) as part:
        (part / "marker").write_text("new")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["marker"]


def test_links_in_an_unfinished_folder_go_and_what_they_lead_to_stays(tmp_path: Path, precious: Path) -> None:
    _interrupted(tmp_path / "out")
    part = unfinished(tmp_path / "out")
    (part / "folder").symlink_to(precious)
    (part / "file").symlink_to(precious / "thesis.tex")
    before = content(precious)
    with new_folder(tmp_path / "out", "marker") as again:
        assert names(again) == [MARK]
    assert content(precious) == before


def test_a_folder_for_a_while_is_ours_or_refused(tmp_path: Path, precious: Path) -> None:
    with scratch_folder(tmp_path / "deep" / ".weights") as folder:
        (folder / "file").touch()
    assert not (tmp_path / "deep" / ".weights").exists()
    (tmp_path / ".weights").symlink_to(precious)
    before = content(precious)
    with pytest.raises(OutputError, match="is a link"), scratch_folder(tmp_path / ".weights"):
        pass
    assert content(precious) == before


def test_a_link_to_an_output_is_not_replaced_through(pair: Pair, tmp_path: Path, write: Write) -> None:
    """What a link leads to may be another output than its name tells."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out", target_is_directory=True)
    write(pair, tmp_path / "link")  # nothing is there yet
    held = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "disk" / "out").iterdir()}
    with pytest.raises(OutputError, match=r"link is a link to a folder that already holds an output\. Name that"):
        write(pair, tmp_path / "link")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "disk" / "out").iterdir()} == held
    write(pair, tmp_path / "disk" / "out")
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "disk") == ["out"]


def test_a_temporary_file_is_not_written_through_a_link(tmp_path: Path, precious: Path) -> None:
    (tmp_path / ".report.json.partial").symlink_to(precious / "thesis.tex")
    (tmp_path / "report.json").symlink_to(precious / "deeper" / "notes")
    before = content(precious)
    atomic.write_text(tmp_path / "report.json", "new")
    assert content(precious) == before
    assert (tmp_path / "report.json").read_text() == "new" and not (tmp_path / "report.json").is_symlink()


def test_names_of_any_length_that_a_file_system_takes(pair: Pair, tmp_path: Path, write: Write) -> None:
    for name in ("n" * 255, "ü" * 122 + "n"):
        write(pair, tmp_path / name)
        write(pair, tmp_path / name)
        assert names(tmp_path) == [name]
        shutil.rmtree(tmp_path / name)
    with pytest.raises(OutputError, match=r"^the name n{20}… is too long: it has 256 bytes.*take 255"):
        write(pair, tmp_path / ("n" * 256))
    assert names(tmp_path) == []
