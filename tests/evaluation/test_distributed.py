"""One process or two, interrupted or not: the same report, and nothing is generated twice."""

import contextlib
import fcntl
import json
import os
import pty
import struct
import termios
import time
from pathlib import Path

import pytest
from support import launch

SCRIPT = launch.SUPPORT / "launched_sweep.py"


def run(processes: int, *args: str) -> None:
    done = launch.run(SCRIPT, *args, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "batches" not in done.stdout + done.stderr  # no progress bar where there is no terminal


def without_timing(folder: Path) -> dict:
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    report.pop("timing")
    return report


def timing(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))["timing"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """What one process does without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    run(1, str(folder), "2")
    return folder


def assert_same_bytes(one: Path, two: Path) -> None:
    assert timing(two)["processes"] == 2 and timing(one)["processes"] == 1
    assert timing(two)["generated"] == timing(one)["generated"] > 0  # shared, not repeated
    assert json.dumps(without_timing(one)) == json.dumps(without_timing(two))
    for name in ("report.md", "scores.svg", "pareto.svg", "samples.svg", "scores.png"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_two_processes_give_the_bytes_of_one(whole, tmp_path):
    run(2, str(tmp_path), "2")
    assert_same_bytes(whole, tmp_path)


def test_memory_that_runs_out_in_one_process_halves_the_batches_of_all(whole, tmp_path):
    run(2, str(tmp_path), "9", "memory=2")  # 9 → 4 → 2: the first process could have kept its batches of 9
    assert_same_bytes(whole, tmp_path)
    assert timing(tmp_path)["halved_batches"] == 0  # the plan itself was made smaller
    stored = [json.loads(path.read_text())["records"] for path in (tmp_path / "store").glob("*.json")]
    assert max(len(records) for records in stored) == 2


def test_a_later_shortage_halves_one_batch_and_the_plan_says_so(whole, tmp_path):
    run(1, str(tmp_path), "5", "late=3")
    found, expected = without_timing(tmp_path), without_timing(whole)
    assert timing(tmp_path)["halved_batches"] > 0
    assert found["settings"]["batch_size"] == 5 and found["settings"]["plan"] != expected["settings"]["plan"]
    stored = [json.loads(path.read_text())["records"] for path in (tmp_path / "store").glob("*.json")]
    assert found["settings"]["batches"] == len(stored)
    assert sorted({len(records) for records in stored}) == [2, 3, 5]
    for one, other in zip(found["passages"], expected["passages"], strict=True):
        assert [at["output"] for at in one["at"]] == [at["output"] for at in other["at"]]


@pytest.mark.slow
def test_two_processes_give_the_bytes_of_one_when_sampling_rows_beside_a_reference(tmp_path):
    for processes in (1, 2):
        run(processes, str(tmp_path / str(processes)), "4", "sampled", "rows", "reference")
    assert_same_bytes(tmp_path / "1", tmp_path / "2")


def on_a_terminal(processes: int, *args: str) -> str:
    """What a sweep writes to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # a bar needs some width
    terminal = os.ttyname(theirs)
    sweep = launch.start(SCRIPT, *args, processes=processes, stdout=terminal, stderr=terminal)
    os.set_blocking(ours, False)
    written, running = b"", True
    while running:
        running = sweep.running()  # before the last look at what was written
        with contextlib.suppress(BlockingIOError):
            while part := os.read(ours, 1 << 16):
                written += part
        time.sleep(0.01)
    os.close(ours)
    os.close(theirs)
    assert sweep.wait() == 0, written.decode()[-3000:]
    return written.decode()


def test_one_progress_bar_is_shown_on_a_terminal(whole, tmp_path):
    batches = json.loads((whole / "report.json").read_text())["settings"]["batches"]
    seen = on_a_terminal(2, str(tmp_path), "2", "reference")
    mine = (batches + 1) // 2
    assert f"{mine}/{mine}" in seen and "batches (process 1 of 2): 100%" in seen
    assert "batches of another seed (process 1 of 2): 100%" in seen
    lines = {line.split("%")[0] for line in seen.replace("\r", "\n").splitlines() if "100%" in line}
    assert len(lines) == 2  # one bar for the sweep and one for the reference: the other process shows none


def test_a_killed_sweep_continues_with_what_was_finished(whole, tmp_path):
    sweep = launch.start(SCRIPT, tmp_path, "2")
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "store").glob("*.json"))) < 5 and time.monotonic() < deadline:
        assert sweep.running(), "the sweep ended before it could be killed"
        time.sleep(0.005)
    sweep.kill()
    files = [json.loads(path.read_text()) for path in (tmp_path / "store").glob("*.json")]
    kept = sum(len(file["records"]) for file in files)
    assert kept >= 10 and not (tmp_path / "report.json").exists()
    run(2, str(tmp_path), "2")  # continued with another number of processes, even
    assert timing(tmp_path)["reused"] == kept
    assert timing(tmp_path)["generated"] == timing(whole)["generated"] - kept
    assert without_timing(tmp_path) == without_timing(whole)
