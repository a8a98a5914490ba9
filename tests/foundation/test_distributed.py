"""Processes: alone without accelerate, and two real ones on the CPU."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from support import launch

from hf_taskvec import distributed
from hf_taskvec.distributed import Processes
from hf_taskvec.errors import BadValueError


def test_alone_everything_is_ones_own() -> None:
    alone = Processes()
    assert (alone.process_index, alone.num_processes, alone.is_main_process, alone.is_local_main_process) == (
        0, 1, True, True
    )  # fmt: skip
    alone.wait_for_everyone()
    value, tensor = {"any": "thing"}, torch.arange(3)
    assert alone.gather(value) == [value] and alone.gather(value)[0] is value
    assert alone.all_reduce(tensor) is tensor
    alone.broadcast(tensor)
    assert tensor.tolist() == [0, 1, 2]
    assert alone.together(lambda: 7) == alone.together(lambda: 7, main_only=True) == 7
    error = BadValueError("cannot")
    with pytest.raises(BadValueError, match=r"^cannot$") as raised:
        alone.together(lambda: (_ for _ in ()).throw(error))
    assert raised.value is error


def test_alone_accelerate_is_not_imported() -> None:
    code = (
        "import sys; from hf_taskvec.distributed import processes; p = processes(); p.gather(1); p.wait_for_everyone()"
    )
    code += "; print(p.num_processes, 'accelerate' in sys.modules)"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(launch.TESTS.parent)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1 False\n", done.stderr


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of two processes saw, under `accelerate launch` itself."""
    folder = tmp_path_factory.mktemp("two")
    launch.succeed(launch.SUPPORT / "launched_processes.py", folder, processes=2, launched=True)
    return [json.loads((folder / f"{number}.json").read_text()) for number in (0, 1)]


def test_two_processes_know_of_each_other(two: list[dict]) -> None:
    for number, seen in enumerate(two):
        assert seen["count"] == seen["accelerator"] == 2 and seen["device"].startswith("cpu")
        assert seen["main"] == seen["local main"] == (number == 0)
    assert two[0]["waited"]  # for the file that the other wrote before


def test_values_are_gathered_in_the_order_of_processes(two: list[dict]) -> None:
    for seen in two:
        assert seen["gathered"] == [{"number": 0}, {"number": 1}]


def test_tensors_are_added_and_the_own_one_stays(two: list[dict]) -> None:
    for number, seen in enumerate(two):
        assert seen["sum"] == [3.0, 30.0]
        assert seen["own tensor"] == [number + 1.0, 10.0 * (number + 1)]


def test_a_tensor_of_the_main_process_is_in_all_of_them_bit_for_bit(two: list[dict]) -> None:
    for seen in two:
        assert seen["broadcast"] == ["-0.0", "4.0", "10.0", "5.0", "3.0", "6.0"]


def test_work_is_done_by_all_or_by_the_main_process_only(two: list[dict]) -> None:
    assert [seen["together"] for seen in two] == [0, 10]
    assert [seen["main only"] for seen in two] == [7, None]


def test_what_fails_in_one_process_fails_in_all(two: list[dict]) -> None:
    for failing, word in ((0, "first"), (1, "second")):
        own = f"BadValueError: process {failing} cannot"
        other = f"BadValueError: another process failed: process {failing} cannot"
        expected = [own, other] if failing == 0 else [other, own]
        assert [seen[f"{word} fails"] for seen in two] == expected
    assert [seen["second is not asked"] for seen in two] == ["", ""]


@pytest.mark.parametrize(
    ("where", "how", "rank"),
    [("barrier", "SIGSTOP", 0), ("edit", "SIGSTOP", 1), ("edit", "SIGKILL", 1)],  # process 0 has the store
)
def test_a_process_that_dies_or_is_silent_stops_the_others(where: str, how: str, rank: int) -> None:
    """As torchrun starts them, but nobody ends the others: they have to end by themselves, soon, with a sentence."""
    assert distributed._SIGN + distributed._SILENCE < 55  # within a minute, where a test does not wait so long
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    line = [sys.executable, str(launch.SUPPORT / "launched_silence.py"), where, how, str(rank), "3"]
    started = []
    for each in range(2):
        own = {"RANK": str(each), "LOCAL_RANK": str(each), "LOCAL_WORLD_SIZE": "2"}
        environment = launch.environment() | shared | own
        started.append(subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    left = started[1 - rank]
    try:
        assert left.stdout is not None and any(b"waiting" in said for said in left.stdout)
        began = time.monotonic()
        said = left.communicate(timeout=60)[0].decode()
        assert left.returncode not in (0, None) and time.monotonic() - began < 60
    finally:
        for each in started:
            each.kill()
    reason = "no sign of life" if how == "SIGSTOP" else "another process of this run has ended"
    assert reason in said and "Start the run again" in said, said[-3000:]
