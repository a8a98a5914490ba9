"""`recipes/multitask.py` for `accelerate launch`, each process in a folder of its own that has its own books only:
launched_multitask.py FOLDERS FLAGS..."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from accelerate import PartialState

from hf_taskvec.distributed import processes
from hf_taskvec.errors import TaskVectorError

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "multitask.py"


def main(folders: Path, *flags: str) -> None:
    rank = processes().process_index
    os.chdir(folders / f"rank-{rank}")
    try:
        runpy.run_path(str(RECIPE))["main"](list(flags))
    except TaskVectorError as error:
        (folders / f"refused-{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    processes().wait_for_everyone()
    PartialState().destroy_process_group()  # or a thread of it may outlive the interpreter
