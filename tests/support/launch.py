"""Scripts in processes of their own, on CPUs: one process, or several that know of each other.

To import torch and transformers takes longer than what most scripts do. So processes are forked from one that has
imported them: `multiprocessing`'s fork server, one for each worker of the tests. What they see of each other is what
`torchrun` shows them, under `accelerate launch` as well; `launched=True` starts that one itself, as a user does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = TESTS / "support"
# Nothing of ours: a script imports the package anew.
_IMPORTED = ["torch", "transformers", "accelerate", "datasets", "peft", "matplotlib.pyplot"]


def command(script: str | Path, *arguments: str | Path, processes: int = 1) -> list[str]:
    """The command by which a user runs a script with `accelerate launch`."""
    kind = "--multi_gpu" if processes > 1 else "--cpu"
    options = f"{kind} --num_processes {processes} --num_machines 1 --mixed_precision no --dynamo_backend no"
    # Port 0: a free one, whatever other tests run at the same time.
    launch = ["-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    return [sys.executable, *launch, str(script), *map(str, arguments)]


def environment() -> dict[str, str]:
    """This process's environment, for CPUs with one thread each; scripts can import the package and `support`."""
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **ours}


def forks() -> ForkServerContext:
    """Where processes come from that have torch and transformers imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


@dataclass(frozen=True)
class Started:
    """The processes of a script that is running."""

    processes: tuple[ForkServerProcess, ...]
    store: object  # where they meet; it must live as long as they do

    def running(self) -> bool:
        """Whether some have not ended, and none has ended badly."""
        codes = [process.exitcode for process in self.processes]
        return None in codes and not any(codes)

    def kill(self) -> None:
        """With SIGKILL, all of them; and wait until they are gone."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def wait(self) -> int:
        """0, or how the first process ended that did not end well: the others are killed then."""
        left = list(self.processes)
        while left:
            wait([process.sentinel for process in left])
            ended = [process for process in left if process.exitcode is not None]
            failed = [process.exitcode for process in ended if process.exitcode]
            if failed:
                self.kill()
                return failed[0]
            left = [process for process in left if process not in ended]
        return 0


def start(
    script: str | Path,
    *arguments: str | Path,
    processes: int = 1,
    cwd: Path | None = None,
    stdout: str | Path = os.devnull,
    stderr: str | Path = os.devnull,
) -> Started:
    """A script that runs; what it prints goes to the end of a file, which may be a terminal."""
    store, shared = None, environment()
    if processes > 1:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a free port
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(processes)}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        shared |= {"ACCELERATE_MIXED_PRECISION": "no", "LOCAL_WORLD_SIZE": str(processes)}
    line = [str(script), *map(str, arguments)]
    started = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        given = (line, shared | own, cwd or Path.cwd(), str(stdout), str(stderr))
        started.append(forks().Process(target=_run, args=given))
        started[-1].start()
    return Started(tuple(started), store)


def _run(line: list[str], variables: Mapping[str, str], cwd: Path, stdout: str, stderr: str) -> None:
    """In the forked process: the script, as Python runs it."""
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, stream.fileno())
        os.close(file)
        stream.reconfigure(line_buffering=True, write_through=False)  # whole lines, whichever process writes them
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = line
    sys.path[:0] = [str(Path(line[0]).resolve().parent), str(TESTS.parent), str(TESTS)]
    runpy.run_path(line[0], run_name="__main__")


def run(
    script: str | Path,
    *arguments: str | Path,
    processes: int = 1,
    launched: bool = False,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """What became of a script that has ended, well or not."""
    if launched:
        line = command(script, *arguments, processes=processes)
        return subprocess.run(line, env=environment(), capture_output=True, text=True, cwd=cwd)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        code = start(script, *arguments, processes=processes, cwd=cwd, stdout=out, stderr=err).wait()
        return subprocess.CompletedProcess([script, *arguments], code, out.read_text("utf-8"), err.read_text("utf-8"))


def succeed(
    script: str | Path,
    *arguments: str | Path,
    processes: int = 1,
    launched: bool = False,
    cwd: Path | None = None,
) -> str:
    """What a script printed, which must have ended well; the end of its error output otherwise."""
    done = run(script, *arguments, processes=processes, launched=launched, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def leave_processes() -> None:
    """The last call of a launched script: without it a thread of the process group may outlive the interpreter."""
    from accelerate import PartialState

    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()
