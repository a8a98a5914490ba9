"""Distributed checkpoints of `FOLDER/tuned`, sharded in several ways: launched_distributed_checkpoint.py FOLDER."""

import sys
from pathlib import Path

import torch.distributed.checkpoint as dcp
from support.launch import leave_processes
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from hf_taskvec.distributed import processes


def main(folder: Path) -> None:
    here, model = processes(), AutoModelForCausalLM.from_pretrained(folder / "tuned")
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    ways = {"rows": (line, [Shard(0)]), "columns": (line, [Shard(1)]), "both": (square, [Shard(0), Shard(1)])}
    for way, (mesh, placements) in {**ways, "safetensors": ways["rows"]}.items():
        state = {
            f"model.{name}": distribute_tensor(
                tensor, mesh, [each if each.dim < tensor.ndim else Replicate() for each in placements]
            )
            for name, tensor in model.state_dict().items()
        }
        (folder / way).mkdir(exist_ok=True)
        writer = HuggingFaceStorageWriter(path=str(folder / way), save_distributed=True)
        dcp.save(state, **({"storage_writer": writer} if way == "safetensors" else {"checkpoint_id": folder / way}))
        if here.is_main_process:
            model.config.save_pretrained(folder / way)
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
