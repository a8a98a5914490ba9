"""Safetensors files that are written in place, and closed whatever happens."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import Pair, TinyModels

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, OutputError
from hf_taskvec.files.safetensors_writer import SafetensorsWriter, TensorSpec


@pytest.mark.parametrize("has_pwrite", [True, False])
def test_threads_of_several_writers_write_rows_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_pwrite: bool
) -> None:
    if not has_pwrite:
        monkeypatch.delattr(os, "pwrite", raising=False)
    tensors = {"a": torch.randn(500, 30), "b": torch.randn(301, 7).half(), "scalar": torch.tensor(3.0)}
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    path = tmp_path / "file.safetensors"
    writers = [SafetensorsWriter(path, specs, {"format": "pt"})]
    writers += [SafetensorsWriter(path, specs, {"format": "pt"}, join=True) for _ in range(2)]
    writers[0].write("scalar", tensors["scalar"])
    pieces = [(name, start) for name in ("a", "b") for start in range(0, len(tensors[name]), 3)]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()

    def write(number: int) -> None:
        name, start = pieces[number]
        writers[number % 3].write(name, tensors[name][start : start + 3], start)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, order))
    for writer in writers:
        writer.close()
        writer.close()  # a second time does nothing
    assert path.stat().st_size == writers[0].nbytes
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)


def test_neither_a_file_nor_what_a_link_leads_to_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "link").symlink_to("theirs")
    specs = {"a": TensorSpec(torch.float32, (2,))}
    for name in ("theirs", "link"):
        with pytest.raises(FileExistsError):
            SafetensorsWriter(tmp_path / name, specs)
    with pytest.raises(OSError, match="symbolic links"):
        SafetensorsWriter(tmp_path / "link", specs, join=True)
    assert (tmp_path / "theirs").read_text() == "precious"


# What fails in the middle leaves no open file, though somebody keeps the exception, as a notebook does.


def _open_files(folder: Path) -> list[str]:
    links = (link for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link))
    return [to for link in links if (to := str(link.readlink())).startswith(str(folder))]


def _large_and_too_large() -> TaskVector:
    """A vector with more than a megabyte, whose last values do not fit into fp16."""
    return TaskVector.from_tensors({"a": torch.ones(1000, 600), "b": torch.full((4, 4), 1e6)})


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc")


@needs_proc
def test_a_number_that_cannot_be_stored_leaves_no_open_file(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="b") as kept:
        _large_and_too_large().save(tmp_path / "out", dtype=torch.float16)
    assert _open_files(tmp_path) == [] and list(tmp_path.iterdir()) == []
    del kept


@needs_proc
@pytest.mark.parametrize("max_shard_size", [None, "20KB"])
def test_a_failed_apply_leaves_no_open_file_and_nothing_half_written(
    models: TinyModels, tmp_path: Path, max_shard_size: str | None
) -> None:
    pair = models.pair("phi")
    with pytest.raises(BadValueError) as kept:
        (pair.vector() * 1e38).apply(pair.base, tmp_path / "out", dtype="float16", max_shard_size=max_shard_size)
    assert _open_files(tmp_path) == []
    assert not list(tmp_path.rglob("*.partial")) and not (tmp_path / "out").exists()
    del kept


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _apply(pair: Pair, out: Path) -> None:
    pair.vector().apply(pair.base, out)


def _adapter(pair: Pair, out: Path) -> None:
    pair.vector().compress(rank=4).to_adapter(out, base=pair.base, dense="drop")


@needs_proc
@pytest.mark.parametrize("write", [lambda pair, out: pair.vector().save(out), _apply, _adapter])
def test_a_full_disk_is_free_again_when_the_call_has_failed(
    models: TinyModels, small_disk: Path, write: Callable[[Pair, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import hf_taskvec.application.to_checkpoint as module

    monkeypatch.setattr(module, "_check_space", lambda *_: None)  # as if the disk filled up meanwhile
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    free = shutil.disk_usage(small_disk).free
    with pytest.raises(OutputError, match="No space left on device") as kept:
        write(models.pair("phi"), small_disk / "out")
    assert _open_files(small_disk) == []
    assert free - shutil.disk_usage(small_disk).free <= 4096  # the note of an interrupted apply
    (small_disk / "other").unlink()
    write(models.pair("phi"), small_disk / "out")
    del kept
