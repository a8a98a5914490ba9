"""Every file that is read, changed in many ways: the right result or one of our errors, soon and in little memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fuzzing.formats import Json
from fuzzing.mutations import Edit, draw, edited, to_json
from fuzzing.registry import EXEMPT, TARGETS, readers
from fuzzing.runner import Fuzzer, MeaninglessError, Target, difference, same
from support import launch

from hf_taskvec.errors import CorruptFileError

PACKAGE = Path(__file__).parents[2] / "hf_taskvec"
WHOLE = sum(target.share for target in TARGETS)
by_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def check(target: Target, folder: Path, cases: int, seed: int) -> None:
    fuzzer = Fuzzer(target, folder)
    assert_reaches_its_readers(fuzzer)
    outcome = fuzzer.run(max(1, round(cases * target.share / WHOLE)), seed)
    print(outcome)
    told = "\n".join(map(str, outcome.faults[:10]))
    assert not outcome.faults, f"{len(outcome.faults)} of {outcome.cases} cases:\n{told}"


@by_target
def test_a_changed_file_is_read_rightly_or_refused(target: Target, tmp_path: Path) -> None:
    check(target, tmp_path, 2_000, seed=0)


@pytest.mark.slow
@by_target
def test_a_file_changed_in_a_hundred_thousand_ways_is_read_rightly_or_refused(target: Target, tmp_path: Path) -> None:
    check(target, tmp_path, 100_000, seed=1)


# All files are covered.


def test_whoever_reads_a_file_has_a_target() -> None:
    found = set(readers(PACKAGE, "hf_taskvec"))
    known = {reader for target in TARGETS for reader in target.readers}
    assert not found - known - EXEMPT.keys(), "add a target for these (tests/README.md, Fuzzing)"
    assert not known & EXEMPT.keys()
    assert not EXEMPT.keys() - found, "these read nothing any more"
    assert not known - found, "these read nothing any more"


def assert_reaches_its_readers(fuzzer: Fuzzer) -> None:
    """Whether reading the valid file calls each function that the target is said to cover."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "hf_taskvec" in frame.f_code.co_filename:
            called.add(f"{frame.f_globals['__name__']}:{frame.f_code.co_name}")

    fuzzer.anew()
    sys.setprofile(note)
    try:
        fuzzer.target.read(fuzzer.work)
    finally:
        sys.setprofile(None)
    for reader in fuzzer.target.readers:
        module, _, function = reader.partition(":")
        assert f"{module}:{function.rpartition('.')[2]}" in called, f"{reader} is not called"


def test_a_target_that_does_not_reach_its_reader_is_found(tmp_path: Path) -> None:
    target = replace(planted(strict), readers=("hf_taskvec.json_files:read_json",))
    with pytest.raises(AssertionError, match="read_json is not called"):
        assert_reaches_its_readers(Fuzzer(target, tmp_path))


def test_a_new_reader_is_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__init__.py").write_text("import json\nTABLE = json.loads('{}')\n")
    (tmp_path / "new.py").write_text(
        "class A:\n    def b(self, path):\n        with path.open() as file:\n            return file\n\n"
        "def c(path):\n    def d():\n        return read_json(path)\n    return d\n\n"
        "def e(path):\n    path.open('wb'), os.open(path, 0), path.write_text('')\n"
    )
    assert set(readers(tmp_path, "x")) == {"x.inner:<module>", "x.new:A.b", "x.new:c.d"}


# The harness can fail.


def planted(read: Callable[[Path], Any], expected: Callable[[Any, Path], Any] | None = None) -> Target:
    def make(folder: Path) -> None:
        (folder / "x.json").write_text(json.dumps({"scale": 0.5, "names": ["a", "b"], "size": 3}))

    return Target("planted", (), "x.json", Json(), make, read, expected)


def strict(folder: Path) -> Any:
    """Reads only what is right."""
    try:
        found = json.loads((folder / "x.json").read_text("utf-8"))
    except (ValueError, RecursionError):
        raise CorruptFileError("no JSON") from None
    if not same(found, {"scale": 0.5, "names": ["a", "b"], "size": 3}):
        raise CorruptFileError("another file")
    return found


def plain(folder: Path) -> Any:
    """Believes everything, and lets errors through."""
    return json.loads((folder / "x.json").read_text("utf-8"))


def slow(folder: Path) -> Any:
    return strict_or(folder, lambda: sum(1 for _ in range(10**10)))


def large(folder: Path) -> Any:
    return strict_or(folder, lambda: len(b"x" * 300_000_000))


def strict_or(folder: Path, otherwise: Callable[[], Any]) -> Any:
    try:
        return strict(folder)
    except CorruptFileError:
        otherwise()
        raise


def outside(folder: Path) -> Any:
    return strict_or(folder, lambda: (folder.parent / "outside.json").write_text("x"))


def anything(document: Any, folder: Path) -> Any:
    raise MeaninglessError("a test")


def test_a_reader_without_fault_passes(tmp_path: Path) -> None:
    outcome = Fuzzer(planted(strict), tmp_path).run(300)
    assert not outcome.faults and outcome.cases == 300 and outcome.counts["refused"] > 200


@pytest.mark.parametrize(
    ("read", "expected", "problem"),
    [
        (plain, None, "JSONDecodeError"),
        (plain, None, "gave another result"),
        (plain, anything, "was accepted: a test"),
        (plain, lambda document, folder: {"scale": 2}, "gave a wrong result"),
        (slow, None, "took too long: 1.0 s in"),
        (large, None, "took 2"),
    ],
    ids=["another error", "another result", "accepted", "wrong result", "slow", "memory"],
)
def test_a_planted_fault_is_found(
    tmp_path: Path, read: Callable[[Path], Any], expected: Callable[[Any, Path], Any] | None, problem: str
) -> None:
    outcome = Fuzzer(planted(read, expected), tmp_path).run(60 if read is plain else 2)
    assert any(problem in fault.problem for fault in outcome.faults), outcome.faults[:3]


def test_writing_outside_the_folder_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="planted wrote outside its folder"):
        Fuzzer(planted(outside), tmp_path).run(5)


def test_a_fault_is_told_by_path_and_change_and_comes_again_by_its_numbers(tmp_path: Path) -> None:
    def misled(folder: Path) -> Any:
        found = plain_or_refused(folder)
        return {**found, "scale": 0.5} if found.get("size") != 3 else {**found, "names": ["a", "b"]}

    def plain_or_refused(folder: Path) -> Any:
        found = strict_or_refused(folder)
        if not isinstance(found, dict):
            raise CorruptFileError("no object")
        return found

    def strict_or_refused(folder: Path) -> Any:
        try:
            return plain(folder)
        except (ValueError, RecursionError):
            raise CorruptFileError("no JSON") from None

    fuzzer = Fuzzer(planted(misled), tmp_path)
    fault = next(fault for fault in fuzzer.run(200, seed=7).faults if fault.change.startswith("size"))
    assert "; " not in fault.change
    assert fuzzer.case(7, fault.number)[1] == fault
    assert str(fault).startswith(f"planted case {fault.number} of seed 7: size: ")


def test_changes_are_many_and_each_changes_something() -> None:
    import random

    document = {"a": [1, 2.5, {"b": "text"}], "c": None, "d": True}
    texts = {to_json(edited(document, draw(document, random.Random(n)))) for n in range(500)}
    assert len(texts) > 250
    assert edited(document, [Edit(("a", 2, "b"), "becomes", 7)])["a"][2] == {"b": 7}
    assert to_json(edited({"a": 1}, [Edit(("a",), "doubled", 2)])) == '{"a": 1, "a": 2}'
    assert document == {"a": [1, 2.5, {"b": "text"}], "c": None, "d": True}


def test_results_are_compared_by_type() -> None:
    assert same({"a": (1, 2.0)}, {"a": [1.0, 2]})
    assert not same(True, 1) and not same("1", 1) and not same(None, 0) and not same([1], [1, 1])
    assert difference({"a": [1, 2]}, {"a": [1, 3]}) == "a: 1: 2 instead of 3"


def test_the_script_tells_counts_and_fails_on_faults() -> None:
    done = launch.run(Path(__file__).with_name("run.py"), "--target", "store of a sweep", "--cases", "20")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("store of a sweep: 20 cases, ") and done.stdout.endswith("20 cases, 0 wrong\n")
