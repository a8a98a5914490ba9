"""Numbers in a vector's record decide neither a loop nor an allocation: what its files hold does."""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.algebra.deltas import Dense, Rows
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Term

HUGE = 10**18


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A change to a run of rows, one to scattered rows, and one of two factors."""
    change = Dense((InMemory(torch.ones(3, 4)),))
    terms = {"run": Rows(range(2, 5), change, 9), "some": Rows((1, 4, 7), change, 9)}
    vector = TaskVector({name: [Term(1.0, delta)] for name, delta in terms.items()})
    low_rank = TaskVector.from_tensors({"w": torch.ones(6, 5)}).compress(rank=1)
    (vector + low_rank).save(tmp_path / "v")
    return tmp_path / "v"


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    document = json.loads((folder / "taskvec.json").read_text())
    edit(document["parameters"])
    del document["checksum"]
    text = json.dumps(document, sort_keys=True, ensure_ascii=False)
    document["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "taskvec.json").write_text(json.dumps(document))
    return folder


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"transposed": inner}
    return inner


def nested_rows(depth: int, change: Any) -> Any:
    for _ in range(depth):
        change = {"kind": "rows", "rows": {"start": 0, "stop": 3}, "of": 3, "change": change}
    return change


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p["run"][0].update(rows={"start": 0, "stop": HUGE}),
        lambda p: p["run"][0].update(rows={"start": -HUGE, "stop": 3}),
        lambda p: p["run"][0].update(rows={"start": 0, "stop": 10**40}),
        lambda p: p["run"][0].update(of=HUGE),
        lambda p: p["run"][0].update(rows={"start": HUGE, "stop": HUGE + 3}, of=2 * HUGE),
        lambda p: p["some"][0].update(of=HUGE),
        lambda p: p["some"][0].update(rows=[1, 1, 1]),
        lambda p: p["some"][0].update(rows=[1, 2, 3.0]),
        lambda p: p["some"][0].update(rows=[0, True, 2]),
        lambda p: p["some"][0].update(rows=list(range(10**6))),
        lambda p: p["some"][0].update(change=nested_rows(1, p["some"][0]["change"])),
        lambda p: p["some"][0].update(change=nested_rows(300, p["some"][0]["change"])),
        lambda p: p["w"][0].update(left=nested(4, p["w"][0]["left"])),
        lambda p: p["w"][0].update(left=nested(300, p["w"][0]["left"])),
        lambda p: p["w"][0].update(left={"rows": [0, HUGE], "range": True, "of": p["w"][0]["left"]}),
        lambda p: p["w"][0].update(left={"rows": [0, 6, 2], "range": True, "of": p["w"][0]["left"]}),
        lambda p: p["w"][0].update(left={"rows": [0] * 10**6, "range": False, "of": p["w"][0]["left"]}),
    ],
)
def test_what_the_files_do_not_hold_is_refused_at_once(saved: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    edited(saved, edit)
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for verify in (True, False):
        with pytest.raises(TaskVectorError) as error:
            TaskVector.load(saved, verify=verify)
        assert len(str(error.value)) < 500
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB; a million rows of JSON take 100


def test_rows_of_a_large_parameter_cost_what_they_hold(saved: Path) -> None:
    """A vector does not hold its parameter, so its record alone tells how large that is."""
    edited(saved, lambda parameters: parameters["some"][0].update(of=1 << 33, rows=[1, 4, (1 << 33) - 1]))
    edited(saved, lambda parameters: parameters["run"][0].update(of=1 << 33))
    vector = TaskVector.load(saved)
    assert vector.shape("some") == (1 << 33, 4)
    start = time.process_time()
    assert vector.norm("some") == vector.norm("run") == 12**0.5
    assert repr(vector)
    assert time.process_time() - start < 20
