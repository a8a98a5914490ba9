"""Saved vectors with sparse parts: smaller, the same to the last bit, and never silently wrong."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import added

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.algebra.deltas import Dense, Difference
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sparse_tensors import Sparse
from hf_taskvec.algebra.sums import Term
from hf_taskvec.files.save_vector import largest_saved_size

ROWS, COLUMNS = 300, 500
NAME = "layers.0.mlp.fc1.weight"


def pair_of_weights(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(ROWS, COLUMNS, generator=generator) * 0.02).to(dtype)
    tuned = (base.float() + torch.randn(ROWS, COLUMNS, generator=generator) * 0.001).to(dtype)
    return base, tuned


def vector_of(base: torch.Tensor, tuned: torch.Tensor) -> TaskVector:
    return TaskVector({NAME: [Term(1.0, Difference(InMemory(base), InMemory(tuned)))]})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return vector_of(*pair_of_weights()).save(tmp_path / "v")


def document_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "taskvec.json").read_text())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_fine_tune_comes_back_from_fewer_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    base, tuned = pair_of_weights(dtype)
    tuned[0, :3], base[0, 1] = torch.tensor([-0.0, -0.0, 1e-5]), -0.0
    tuned[0, 3] = 2 * base[0, 3]  # nothing is left of it at λ = -1
    vector = vector_of(base, tuned)
    loaded = TaskVector.load(vector.save(tmp_path / "v"))
    written = sum(path.stat().st_size for path in (tmp_path / "v").iterdir())
    assert written < 1.3 * tuned.nbytes
    assert written <= largest_saved_size(vector)
    (term,) = loaded[NAME].terms
    assert isinstance(term.delta, Dense) and isinstance(term.delta.tensors[1], Sparse)
    for scale in (1.0, -1.0, 2.0, -0.6, 0.3):
        one, other = (added(each, NAME, base.clone(), scale) for each in (vector, loaded))
        if not scale.is_integer():  # where both are -0.0, their difference is 0.0 live, and -0.0 as it is stored
            assert base[0, 1].signbit() and tuned[0, 1].signbit() and one[0, 1] == other[0, 1] == 0.0
            one[0, 1] = other[0, 1] = 0.0
        assert torch.equal(bits(one), bits(other))
        assert scale != 1.0 or torch.equal(bits(other), bits(tuned))


def test_a_loaded_vector_is_saved_as_it_is(saved: Path, tmp_path: Path) -> None:
    again = TaskVector.load(saved).save(tmp_path / "again")
    one, other = load_file(saved / "taskvec.safetensors"), load_file(again / "taskvec.safetensors")
    assert len(one) == 4
    assert one.keys() == other.keys() and all(torch.equal(bits(one[name]), bits(other[name])) for name in one)
    assert document_of(saved)["tensors"] == document_of(again)["tensors"]


def test_a_vector_of_before_is_still_read(tmp_path: Path) -> None:
    """Two dense parts under format 1, as they were written until there were sparse ones."""
    base, tuned = pair_of_weights()
    high = (tuned.double() - base.double()).to(torch.bfloat16)
    low = (tuned.double() - base.double() - high.double()).to(torch.bfloat16)
    tensors = {f"{NAME}:0.part0": high, f"{NAME}:0.part1": low}
    (tmp_path / "v").mkdir()
    save_file(tensors, tmp_path / "v" / "taskvec.safetensors")
    document = {
        "format": 1,
        "library": "0.1.0",
        "provenance": {"expression": "v", "weights": [["v", 1.0]], "origins": [{"label": "v", "how": "given"}]},
        "parameters": {NAME: [{"weight": 1.0, "kind": "dense", "parts": list(tensors)}]},
        "tensors": {
            name: {
                "file": "taskvec.safetensors",
                "dtype": "bfloat16",
                "shape": [ROWS, COLUMNS],
                "sha256": hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest(),
            }
            for name, tensor in tensors.items()
        },
    }
    seal(tmp_path / "v", document)
    assert torch.equal(TaskVector.load(tmp_path / "v").dense(NAME, "float64"), tuned.double() - base.double())


def seal(folder: Path, document: dict[str, Any]) -> None:
    """Write a record with the checksum that it must have."""
    rest = {key: value for key, value in document.items() if key != "checksum"}
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False)
    rest["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "taskvec.json").write_text(json.dumps(rest))


def damaged(folder: Path, part: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """The vector with one of its tensors changed, and every checksum right: as one who means harm would."""
    tensors = load_file(folder / "taskvec.safetensors")
    key = f"{NAME}:0.part1.{part}"
    tensors[key] = edit(tensors[key].clone())
    (folder / "taskvec.safetensors").unlink()
    save_file(tensors, folder / "taskvec.safetensors")
    document = document_of(folder)
    entry = document["tensors"][key]
    entry["sha256"] = hashlib.sha256(tensors[key].view(torch.uint8).numpy().tobytes()).hexdigest()
    entry["shape"], entry["dtype"] = list(tensors[key].shape), str(tensors[key].dtype).removeprefix("torch.")
    seal(folder, document)
    return folder


def with_value(index: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return edit


@pytest.mark.parametrize(
    ("part", "edit", "why"),
    [
        ("offsets", lambda t: t.to(torch.int32).flip(0).to(torch.uint16), "not in order"),
        ("offsets", lambda t: torch.full((len(t),), 7).to(torch.uint16), "not each there once"),
        ("offsets", with_value(-1, 65535), "beyond its 150000 elements"),
        ("offsets", lambda t: t[:-1].clone(), "do not make a tensor"),
        ("offsets", lambda t: t.to(torch.int32), "do not make a tensor"),
        ("counts", with_value(0, 2**31 - 1), "do not add up"),
        ("counts", with_value(1, -1), "do not add up"),
        ("counts", lambda t: t[:-1].clone(), "do not make a tensor"),
        ("values", lambda t: t[:0].clone(), "do not make a tensor"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_damaged_positions_are_refused_by_name(
    saved: Path, part: str, edit: Callable[[torch.Tensor], torch.Tensor], why: str, verify: bool
) -> None:
    damaged(saved, part, edit)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TaskVectorError, match=rf"fc1\.weight:0\.part1\.offsets.*{why}"):
        TaskVector.load(saved, verify=verify).dense(NAME)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_record_decides_no_allocation(saved: Path) -> None:
    """The shape of a sparse tensor stands in the record alone; the file must have the counts of so many blocks."""
    document = document_of(saved)
    parts = document["parameters"][NAME][0]["parts"]
    for shape in ([10**12], [ROWS, COLUMNS * 10**9], [1 << 40, 0], [3, 0.5], "x", [True] * 3, None, {}):
        parts[:] = [{**parts[-1], "sparse": shape}]
        seal(saved, document)
        with pytest.raises(TaskVectorError):
            TaskVector.load(saved)


def test_positions_are_no_weights(saved: Path) -> None:
    document = document_of(saved)
    document["parameters"][NAME][0]["parts"] = [f"{NAME}:0.part1.offsets"]
    seal(saved, document)
    with pytest.raises(TaskVectorError, match="not a floating dtype"):
        TaskVector.load(saved)


def test_what_is_done_with_a_vector_is_done_with_a_loaded_one(saved: Path) -> None:
    vector, loaded = vector_of(*pair_of_weights()), TaskVector.load(saved)
    assert loaded.norm() == pytest.approx(vector.norm(), rel=1e-14)
    assert torch.equal(loaded.prune_rows(0.25).dense(NAME), vector.prune_rows(0.25).dense(NAME))
    assert torch.equal((loaded + loaded).dense(NAME, "float64"), (2 * vector).dense(NAME, "float64"))
    pruned = loaded.prune_rows(0.5).save(saved.parent / "pruned")
    assert torch.equal(TaskVector.load(pruned).dense(NAME), vector.prune_rows(0.5).dense(NAME))
