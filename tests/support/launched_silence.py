"""Processes of which one is killed or frozen while the others wait for it: in a barrier, or in a sharded edit.

launched_silence.py barrier|edit SIGKILL|SIGSTOP rank seconds
"""

import os
import signal
import sys

import torch

from hf_taskvec import TaskVector, distributed
from hf_taskvec.application import merged_edit
from hf_taskvec.distributed import processes


def main(where: str, how: str, rank: int, seconds: float) -> None:
    distributed._SIGN, distributed._SILENCE = seconds / 10, seconds
    group = processes()
    group.wait_for_everyone()
    if where == "edit":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        model = torch.nn.Linear(8, 8, bias=False)
        mesh = init_device_mesh("cpu", (group.num_processes,))
        model.weight = torch.nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
        edit = TaskVector.from_tensors({"weight": torch.ones(8, 8)}).edit(model, 0.5)
    group.wait_for_everyone()
    print("waiting", flush=True)

    def stop() -> None:
        if group.process_index == rank:
            os.kill(os.getpid(), getattr(signal, how))

    if where == "edit":
        real = merged_edit.MergedEdit._write

        def write(self: merged_edit.MergedEdit, scale: float) -> None:
            stop()
            real(self, scale)

        merged_edit.MergedEdit._write = write  # type: ignore[method-assign]
        edit.set_scale(-0.5)
    else:
        stop()
        group.wait_for_everyone()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
