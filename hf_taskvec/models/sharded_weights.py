"""Weights of a live model that are sharded over processes: `DTensor`s, by FSDP2, tensor parallelism or by hand.

Each process sees its own part of a weight as a plain tensor, and which part that is (`block_of`). What needs the whole
weight (`Gathered`), or word from all processes (`failed_anywhere`), has to be called by all of them in one order.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from hf_taskvec.algebra.blocks import Block
from hf_taskvec.algebra.sources import Source
from hf_taskvec.algebra.sums import matrix_size, sampling_step
from hf_taskvec.distributed import others_alive, wait_watching
from hf_taskvec.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# What stands around a model and is called in its place -> the attribute that has the model.
_WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}


def without_wrappers(model: Any) -> Any:
    """The model itself, without DistributedDataParallel and `torch.compile` around it."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, attribute)
    return model


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a model, or a layer of it, was compiled: by `torch.compile`, or in place by `model.compile()`."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a `DTensor`; torch.distributed.tensor is not imported for that."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, to read and to write; a plain tensor is that itself."""
    if not is_sharded(tensor):
        return tensor.data
    part: torch.Tensor = tensor.data.to_local()  # type: ignore[attr-defined]
    return part.detach()


def reshard(model: torch.nn.Module) -> None:
    """Free what FSDP2 gathered for the last forward, as it keeps it of the root module.

    The gathered copy is what the next forward would use, whatever is written into the shards.

    Raises:
        `UnsupportedError`: If an error broke off a forward, and this torch cannot end it.
    """
    modules = _fsdp_modules(model)
    if any(module._get_fsdp_state()._training_state.name == "FORWARD" for module in modules):
        # FSDP would keep what it has gathered for the rest of a forward that does not come.
        outermost = modules[0]
        if not hasattr(outermost, "reset_iter_state"):
            raise UnsupportedError(
                "an error broke off a forward of the model, and FSDP still holds weights that it gathered for it. Call "
                "the model once more, as a whole, or use torch 2.13."
            )
        outermost.reset_iter_state()
    for module in modules:
        module.reshard()


def has_fsdp(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` sharded a part of a model."""
    return bool(_fsdp_modules(model))


def _fsdp_modules(model: torch.nn.Module) -> list[Any]:
    """The modules that `fully_shard` sharded, the outermost first."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return [] if loaded is None else [each for each in model.modules() if isinstance(each, loaded.FSDPModule)]


def block_of(tensor: "DTensor", name: str) -> Block:
    """Which elements of a sharded tensor this process has. Nothing is sent.

    Raises:
        `UnsupportedError`: If processes hold summands of it, not parts.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError(
            f"{name}: each process holds a summand of it (a Partial placement), not a part. Redistribute it first, "
            "e.g. with tensor.redistribute(placements=[Replicate()])."
        )
    positions = []
    for dimension, size in enumerate(tensor.shape):
        along = [
            _first_dimension(each) if getattr(each, "dim", None) == dimension else Replicate()
            for each in tensor.placements
        ]
        every = torch.arange(size, device=tensor.to_local().device)
        own = distribute_tensor(every, tensor.device_mesh, along, src_data_rank=None).to_local()
        positions.append(own.tolist())
    block = Block.of(positions)
    if block.shape != tuple(tensor.to_local().shape):
        raise UnsupportedError(
            f"{name}: this process holds {list(tensor.to_local().shape)} of {list(tensor.shape)}, but its placements "
            f"{tensor.placements} say {list(block.shape)}. Gather the weight first (full_tensor())."
        )
    return block


def _first_dimension(placement: Any) -> Any:
    """The same sharding of a list of numbers."""
    from torch.distributed.tensor import Shard

    if type(placement) is Shard:
        return Shard(0)
    factor = getattr(placement, "split_factor", None)  # interleaved: fused projections, or FSDP over them
    return type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)


def meshes_of(tensors: Iterable[torch.Tensor]) -> "list[DeviceMesh]":
    """The meshes that tensors are sharded over, each once, in their order."""
    return list(dict.fromkeys(each.device_mesh for each in tensors if is_sharded(each)))  # type: ignore[attr-defined]


def failed_anywhere(meshes: "Iterable[DeviceMesh]", failed: bool) -> bool:
    """Whether it failed in a process of these meshes; all of them must ask."""
    for mesh in meshes:
        flag = torch.tensor([int(failed)], device=mesh.device_type)
        for dimension in range(mesh.ndim):
            _all_reduce(flag, mesh.get_group(dimension), torch.distributed.ReduceOp.MAX)
        failed = bool(flag.item())
    return failed


def _all_reduce(tensor: torch.Tensor, group: Any, operation: Any) -> None:
    wait_watching(lambda: torch.distributed.all_reduce(tensor, operation, group, async_op=True), group)


def size_of_whole(tensor: "DTensor", shape: tuple[int, ...], block: Block, local: torch.Tensor) -> float:
    """`matrix_size` of a matrix that is sharded with a tensor, from each process's part; all of them must ask."""
    step = sampling_step(shape[0])
    kept = range(0, shape[0], step)
    local = local.to(tensor.to_local().device)
    sample = torch.zeros((len(kept), *shape[1:]), dtype=torch.float32, device=local.device)
    mine = [(number, row // step) for number, row in enumerate(block.positions[0]) if row % step == 0]
    if mine and local.numel():
        numbers, rows = (torch.tensor(each, device=local.device) for each in zip(*mine, strict=True))
        columns = Block((range(len(mine)), *block.positions[1:]))
        some = torch.zeros((len(mine), *shape[1:]), dtype=torch.float32, device=local.device)
        columns.place(local[numbers].float(), some)
        sample[rows] = some
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # the others have parts that this one does not have
            _all_reduce(sample, tensor.device_mesh.get_group(dimension), torch.distributed.ReduceOp.SUM)
    return matrix_size(sample)


@dataclass(frozen=True, eq=False)
class Gathered(Source):
    """A sharded weight, gathered when it is read: by all processes, in one order, on one thread."""

    tensor: Any

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    @override
    def is_collective(self) -> bool:
        return True

    @override
    def read(self) -> torch.Tensor:
        with others_alive():
            whole: torch.Tensor = self.tensor.detach().full_tensor().cpu()
        return whole
