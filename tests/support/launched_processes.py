"""What `hf_taskvec.distributed` gives in each process of an `accelerate launch`: launched_processes.py FOLDER.

Each process writes what it saw to `FOLDER/NUMBER.json`.
"""

import json
import sys
from pathlib import Path

import torch

from hf_taskvec.distributed import make_accelerator, processes
from hf_taskvec.errors import BadValueError, TaskVectorError


def failure(work, main_only=False) -> str:
    """The error that `together` raises here."""
    try:
        processes().together(work, main_only=main_only)
    except TaskVectorError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path) -> None:
    here = processes()
    number = here.process_index

    def fails_in(wrong: int):
        def work() -> int:
            if number == wrong:
                raise BadValueError(f"process {wrong} cannot")
            return number

        return work

    tensor = torch.tensor([1.0, 10.0]) * (number + 1)
    # Not contiguous, and with a sign that a sum would lose.
    weight = torch.nn.Parameter((torch.tensor([[-0.0, 10.0, 3.0], [4.0, 5.0, 6.0]]) * (1 - 2 * number)).T)
    here.broadcast(weight)
    seen = {
        "broadcast": [str(value) for value in weight.flatten().tolist()],
        "count": here.num_processes,
        "main": here.is_main_process,
        "local main": here.is_local_main_process,
        "device": str(here.device),
        "gathered": here.gather({"number": number}),
        "sum": here.all_reduce(tensor).tolist(),
        "own tensor": tensor.tolist(),
        "together": here.together(lambda: 10 * number),
        "main only": here.together(lambda: 10 * number + 7, main_only=True),
        "first fails": failure(fails_in(0)),
        "second fails": failure(fails_in(1)),
        "second is not asked": failure(fails_in(1), main_only=True),
        "accelerator": make_accelerator().num_processes,
    }
    if number:
        (folder / f"{number}.json").write_text(json.dumps(seen))
    here.wait_for_everyone()
    if here.is_main_process:
        seen["waited"] = (folder / "1.json").exists()
        (folder / "0.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
