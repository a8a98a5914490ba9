"""Scripts in processes of their own: one plain Python process, or several through `accelerate launch`, on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = TESTS / "support"


def command(script: str | Path, *arguments: str | Path, processes: int = 1, launched: bool = False) -> list[str]:
    """The command that runs a script. One process is plain Python, unless it is to be `launched` all the same."""
    plain = [str(script), *map(str, arguments)]
    if processes == 1 and not launched:
        return [sys.executable, *plain]
    kind = "--multi_gpu" if processes > 1 else "--cpu"
    options = f"{kind} --num_processes {processes} --num_machines 1 --mixed_precision no --dynamo_backend no"
    # Port 0: a free one, whatever other tests run at the same time.
    launch = ["-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    return [sys.executable, *launch, *plain]


def environment() -> dict[str, str]:
    """This process's environment, for CPUs with one thread each; scripts can import the package and `support`."""
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **ours}


def run(
    script: str | Path,
    *arguments: str | Path,
    processes: int = 1,
    launched: bool = False,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """What became of a script that has ended, well or not."""
    line = command(script, *arguments, processes=processes, launched=launched)
    return subprocess.run(line, env=environment(), capture_output=True, text=True, cwd=cwd)


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
