"""Several processes as one: setting them up, gathering what is sharded, failing together."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, parse_flag_from_env
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_taskvec.errors import BadValueError, TaskVectorError, UnsupportedError
from hf_taskvec.training.settings import TrainingSettings

Result = TypeVar("Result")

_UNTESTED = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}


def make_accelerator() -> Accelerator:
    """The processes of `accelerate launch`, or this one alone."""
    return Accelerator(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


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


def resolve_precision(settings: TrainingSettings, accelerator: Accelerator) -> str:
    """`"fp32"` or `"bf16"`."""
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


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded; every process must ask for it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assign(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write a whole tensor into a plain or a sharded one."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            value = value.to(device=target.device, dtype=target.dtype)
            target.copy_(distribute_tensor(value, target.device_mesh, target.placements))
        else:
            target.copy_(value)


def together(accelerator: Accelerator, work: Callable[[], Result], main_only: bool = False) -> Result | None:
    """What `work` gives; if it fails in any process it fails in all, so that none waits for another forever."""
    result, failure = None, None
    if accelerator.is_main_process or not main_only:
        try:
            result = work()
        except TaskVectorError as error:
            failure = error
    failures: list[Any] = gather_object([str(failure) if failure else ""])
    if failure:
        raise failure
    if any(failures):
        raise BadValueError(f"another process failed: {next(filter(None, failures))}")
    return result
