"""Safetensors files that are written in place."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
    path.write_bytes(b"something longer than a header" * 10_000)
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
