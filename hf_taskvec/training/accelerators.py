"""What training needs of an accelerator, which ones are accepted, and tensors that they have sharded."""

import contextlib
from typing import Any, Literal, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.training.settings import ComputePrecision, TrainingSettings

_UNTESTED = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}


class TrainingAccelerator(Protocol):
    """What the training loop needs of an accelerator: accelerate's `Accelerator` has it, and `SingleProcess`."""

    @property
    def process_index(self) -> int:
        """The number of this process among those that share a batch."""

    @property
    def num_processes(self) -> int:
        """How many processes share a batch."""

    @property
    def is_main_process(self) -> bool:
        """Whether this process shows the progress."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which gradients are accumulated, not exchanged."""

    def clip_grad_norm_(self, parameters: Any, max_norm: Any) -> Any:
        """Clip the gradients to a norm, and give the norm that they had."""

    def reduce(self, tensor: Any, reduction: Literal["sum"]) -> Any:
        """The sum of a tensor over the processes that share a batch."""

    def unwrap_model(self, model: Any, *, keep_torch_compile: bool) -> Any:
        """The model without what was put around it for training."""


class SingleProcess:
    """The accelerator of a process that trains by itself, though there may be others.

    Under `accelerate launch` a real `Accelerator` would share each batch with the other processes, which may be busy
    with other tasks.
    """

    process_index = 0
    num_processes = 1

    def __init__(self) -> None:
        state = processes()
        self.device = state.device
        self.is_main_process = state.is_main_process

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Nothing is exchanged, so there is nothing to hold back."""
        return contextlib.nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: Any) -> Any:
        """As torch does it."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def reduce(self, tensor: Any, reduction: Literal["sum"]) -> Any:
        """The tensor: it is the sum of one."""
        return tensor

    def unwrap_model(self, model: Any, *, keep_torch_compile: bool) -> Any:
        """The model: nothing was put around it."""
        return model


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse what this loop was never tried with."""
    untested = _UNTESTED.get(accelerator.distributed_type)
    if untested:
        raise UnsupportedError(
            f"fine-tuning was not tested with {untested}. Choose FSDP (version 2) in `accelerate config` for a model "
            "that is larger than one device."
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UnsupportedError("FSDP of version 1 cannot be gathered here. Set fsdp_version: 2 in `accelerate config`.")
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UnsupportedError(
            f"mixed_precision={accelerator.mixed_precision!r} was not tested. Use bf16 or no in `accelerate config`."
        )


def resolve_precision(settings: TrainingSettings, accelerator: Accelerator) -> ComputePrecision:
    """What the forward and backward passes are computed in, where `precision` may be `"auto"`."""
    launched = accelerator.mixed_precision
    if launched == "bf16":
        if settings.precision == "fp32":
            raise BadValueError(
                "precision='fp32', but accelerate was configured with mixed_precision=bf16. Change one of the two."
            )
        return "bf16"
    if settings.precision != "auto":
        return settings.precision
    on_gpu = accelerator.device.type == "cuda" and torch.cuda.is_bf16_supported()
    return "bf16" if on_gpu else "fp32"


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded; every process must ask for it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assign_tensor(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write a whole tensor into a plain or a sharded one."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            value = value.to(device=target.device, dtype=target.dtype)
            target.copy_(distribute_tensor(value, target.device_mesh, target.placements))
        else:
            target.copy_(value)
