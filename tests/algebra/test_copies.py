"""Copied and pickled vectors: what can be is the same vector, and the rest is refused with what to do."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_adapters import adapter
from support.tiny_models import Pair, TinyModels

from hf_taskvec import TaskVector, combine
from hf_taskvec.errors import ChangedSourceError, UnsupportedError

FACTORS = (torch.ones(2, 1), torch.ones(1, 2))


@pytest.fixture
def pair(models: TinyModels) -> Pair:
    return models.pair("phi")


def made(kind: str, pair: Pair, folder: Path) -> TaskVector:
    builds: dict[str, Callable[[], TaskVector]] = {
        "tensors": lambda: 0.5 * TaskVector.from_tensors({"w": torch.arange(3.0), "f": FACTORS}),
        "files": lambda: pair.vector().filter(include="*.mlp.*"),
        "saved": lambda: TaskVector.load(pair.vector().save(folder / "saved")),
        "a reference": lambda: TaskVector.load(pair.vector().save(folder / "reference", reference=True)),
        "factors": lambda: pair.vector().filter(include="*.fc1.weight").compress(rank=2),
        "an adapter": lambda: adapter(pair.base, folder / "adapter", use_dora=True, target_modules=["q_proj"]).vector(),
        "rows": lambda: pair.vector().prune_rows(0.5),
    }
    return builds[kind]()


@pytest.mark.parametrize("kind", ["tensors", "files", "saved", "a reference", "factors", "an adapter", "rows"])
def test_a_pickled_vector_is_the_same(pair: Pair, tmp_path: Path, kind: str) -> None:
    vector = made(kind, pair, tmp_path)
    again, twice = pickle.loads(pickle.dumps((vector, 2 * vector)))
    assert again.expression == vector.expression and again.provenance == vector.provenance
    assert again.fingerprint == vector.fingerprint
    assert all(torch.equal(again.dense(name, "float64"), vector.dense(name, "float64")) for name in vector)
    assert (again - vector).expression == "0" and (twice - 2 * again).expression == "0"
    assert not len(twice - 2 * again)


def test_a_copy_is_the_vector_itself(pair: Pair) -> None:
    vector = combine([pair.vector(), pair.vector()], "ties")
    assert copy.copy(vector) is vector and copy.deepcopy([vector])[0] is vector


def test_a_new_process_opens_the_files_again(pair: Pair, tmp_path: Path) -> None:
    vector = pair.vector()
    (tmp_path / "vector.pickle").write_bytes(pickle.dumps(vector))
    code = "import pickle, sys; print(repr(pickle.load(open(sys.argv[1], 'rb')).norm()))"
    command = [sys.executable, "-c", code, str(tmp_path / "vector.pickle")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) == vector.norm()
    assert (tmp_path / "vector.pickle").stat().st_size < 100_000  # places, not weights


def test_files_that_changed_are_refused(pair: Pair, tmp_path: Path) -> None:
    folder = pair.vector().save(tmp_path / "vector")
    vector = TaskVector.load(folder)
    pickled = pickle.dumps(vector)
    pair.vector().filter(include="*.mlp.*").save(folder, overwrite=True)
    with pytest.raises(ChangedSourceError, match="not the file that it was"):
        pickle.loads(pickled)
    with pytest.raises(ChangedSourceError, match="replaced or removed"):
        pickle.dumps(vector)


@pytest.mark.parametrize("rule", ["ties", "tsv"])
def test_what_a_rule_computes_is_refused(rule: str) -> None:
    a, b = (TaskVector.from_tensors({"w": torch.randn(4, 4)}, name=name) for name in "ab")
    with pytest.raises(UnsupportedError, match=r"cannot be pickled. Save the vector"):
        pickle.dumps(combine([a, b], rule))
