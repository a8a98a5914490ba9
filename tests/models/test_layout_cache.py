"""Layouts that are kept on disk: the same as built ones, for what they were built of, and never in the way."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import ARCHITECTURES, TinyModels

from hf_taskvec import TaskVector
from hf_taskvec.json_files import json_digest
from hf_taskvec.models.layout import Layout, layout_of_config
from hf_taskvec.models.layout_cache import SWITCH, entry_path, may_be_kept, read_entry, write_entry

LLAMA = {"model_type": "llama", "hidden_size": 16}


@pytest.fixture
def layout() -> dict[str, Any]:
    return Layout("Some", "Body", {"b": (2, 3), "a": ()}, ignored=("x$",), head=frozenset({"b"})).to_json()


@pytest.fixture
def not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that has not imported transformers, and finds one of two files; its folder."""
    folder = tmp_path / "site" / "transformers"
    (folder / "models").mkdir(parents=True)
    for name in ("__init__.py", "models/modeling_llama.py"):
        (folder / name).write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(sys.modules, "transformers")
    return folder


# What is kept


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layout_comes_back_as_it_was(architecture: str, models: TinyModels, tmp_path: Path) -> None:
    built = layout_of_config(json.loads((models.pair(architecture).base / "config.json").read_text()))
    write_entry(tmp_path / "entry.json", built.to_json())
    kept = Layout.from_json(read_entry(tmp_path / "entry.json") or {})
    assert kept == built and list(kept.shapes) == list(built.shapes) and hash(kept.ignored) == hash(built.ignored)


def test_only_new_processes_of_plain_configs_use_it(not_imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_be_kept(LLAMA)
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    for other in (code, {"text_config": code}, {"parts": [{"backbone": "./here"}]}, {"vision": r"C:\here"}):
        assert not may_be_kept({**LLAMA, **other})
    monkeypatch.setenv(SWITCH, "yes")
    assert not may_be_kept(LLAMA)
    monkeypatch.setenv(SWITCH, "0")
    assert may_be_kept(LLAMA)
    monkeypatch.setitem(sys.modules, "transformers", sys)  # where classes may have been registered or changed
    assert not may_be_kept(LLAMA)


def test_whatever_a_layout_follows_from_is_in_the_name(not_imported: Path) -> None:
    found = [entry_path(LLAMA, 8)]
    assert found[0] is not None and found[0] == entry_path(dict(reversed(LLAMA.items())), 8)

    def differs(path: Path | None) -> None:
        assert path is not None and path not in found
        found.append(path)

    differs(entry_path({**LLAMA, "hidden_size": 32}, 8))
    differs(entry_path(LLAMA, 16))
    source = not_imported / "models" / "modeling_llama.py"
    before = source.stat()
    source.write_text("raise RuntimeError('another')")
    differs(entry_path(LLAMA, 8))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    differs(entry_path(LLAMA, 8))
    (not_imported / "new.py").touch()
    differs(entry_path(LLAMA, 8))
    (not_imported.parent / "kernels-1.0.dist-info").mkdir()
    differs(entry_path(LLAMA, 8))


def test_without_sources_nothing_is_kept(not_imported: Path) -> None:
    (not_imported / "models" / "modeling_llama.py").unlink()
    (not_imported / "__init__.py").rename(not_imported / "__init__.pyc")
    assert entry_path(LLAMA, 8) is None


# Files that are not as they were written


def test_a_changed_entry_is_none(layout: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "entry.json"
    write_entry(path, layout)
    assert read_entry(path) == json.loads(json.dumps(layout))
    written = path.read_bytes()
    whole = json.loads(written)
    other_shape = {**layout, "shapes": {"b": [2, 4], "a": []}}
    no_shape = {**layout, "shapes": {"b": "2"}}
    for content in (
        *(b"", b"{}", b"[]", b"\xff", written[:-1], written[:-9] + b'"x"}', b"[" * 100_000),
        json.dumps({**whole, "key": "another"}).encode(),
        json.dumps({**whole, "layout": other_shape}).encode(),
        json.dumps({**whole, "layout": no_shape, "digest": json_digest(no_shape)}).encode(),
        json.dumps({**whole, "layout": {}, "digest": json_digest({})}).encode(),
    ):
        path.write_bytes(content)
        assert read_entry(path) is None, content[:80]
    path.write_bytes(written)
    assert read_entry(path) is not None


def test_what_another_user_may_have_put_there_is_not_read(layout: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "entry.json"
    assert read_entry(path) is None
    write_entry(path, layout)
    path.chmod(0o620)
    assert read_entry(path) is None
    path.chmod(0o600)
    moved = path.rename(tmp_path / "moved.json")
    assert read_entry(moved) is None
    path.symlink_to(moved.rename(tmp_path / "real"))
    assert read_entry(path) is None
    path.unlink()
    os.mkfifo(path)
    assert read_entry(path) is None
    path.unlink()
    path.mkdir()
    assert read_entry(path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_read(layout: dict[str, Any], tmp_path: Path) -> None:
    write_entry(tmp_path / "entry.json", layout)
    os.chown(tmp_path / "entry.json", 12345, -1)
    assert read_entry(tmp_path / "entry.json") is None


# Writing


def test_what_cannot_be_written_is_not_kept(layout: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_entry(tmp_path / "file" / "layouts" / "entry.json", layout)
    (tmp_path / "folder.json").mkdir()
    write_entry(tmp_path / "folder.json", layout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.json"]


def test_entries_are_for_their_user_alone_and_the_newest_stay(layout: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.json").touch()
    os.utime(tmp_path / "mine.json", (0, 0))
    before = os.umask(0)
    try:
        for number in range(70):
            path = tmp_path / f"{number:064x}.json"
            write_entry(path, layout)
            os.utime(path, (number, number))
    finally:
        os.umask(before)
    (tmp_path / "mine.json").unlink()  # which is not an entry, and stays
    assert {path.stem for path in tmp_path.iterdir()} == {f"{number:064x}" for number in range(6, 70)}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_writers_at_the_same_time_leave_one_whole_entry(layout: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "entry.json"
    write_entry(path, layout)
    threads = [threading.Thread(target=lambda: [write_entry(path, layout) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read_entry(path) is not None
    assert [each.name for each in tmp_path.iterdir()] == ["entry.json"]


# Whole processes


def test_a_second_process_needs_no_transformers_and_damage_changes_nothing(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("gpt2")
    kept = tmp_path / "assets" / "hf_taskvec" / "layouts"

    def extract(**environment: str) -> list[str]:
        code = (
            "import sys; from hf_taskvec import TaskVector\n"
            f"vector = TaskVector.from_finetuned({str(pair.base)!r}, {str(pair.tuned)!r})\n"
            "print(vector.fingerprint, 'transformers' in sys.modules)"
        )
        given = {**os.environ, "HF_ASSETS_CACHE": str(tmp_path / "assets"), **environment}
        done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    right = TaskVector.from_finetuned(pair.base, pair.tuned).fingerprint
    assert extract() == [right, "True"]
    (entry,) = kept.iterdir()
    content = entry.read_text()
    assert str(pair.base.parent) not in content and str(Path.home()) not in content
    assert extract() == [right, "False"]
    assert extract(**{SWITCH: "1"}) == [right, "True"]
    entry.write_text(content.replace("GPT2LMHeadModel", "GPT2LMHeadModeI"))
    assert extract() == [right, "True"]
    assert entry.read_text() == content
