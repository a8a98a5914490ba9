"""Does the whole experiment fit into memory? Told before its first stage: every training, and the sweep."""

from typing import TYPE_CHECKING

import torch

from hf_taskvec.distributed import make_accelerator
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig
from hf_taskvec.sizes import memory_size
from hf_taskvec.training import TrainingSettings
from hf_taskvec.training.accelerators import check_accelerator
from hf_taskvec.training.memory_estimate import check_training_memory, free_memory
from hf_taskvec.training.trained_model import meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_experiment_memory(config: UnlearnConfig, model: "PreTrainedConfig") -> None:
    """Refuse trainings and sweeps that do not fit into memory, all of them before the first begins.

    Args:
        config (`UnlearnConfig`):
            What is made, and how.
        model (`PreTrainedConfig`):
            Of θ_0.
    """
    accelerator = make_accelerator()  # that knows of FSDP and of the precision in `accelerate config`
    trainings = _trainings(config)
    if trainings:
        check_accelerator(accelerator)
    for settings in trainings:
        check_training_memory(model, settings, config.block_length, accelerator)
    _check_sweep(config, model, accelerator.device, accelerator.num_processes)


def _trainings(config: UnlearnConfig) -> list[TrainingSettings]:
    found = []
    if config.makes_vector:
        found.append(config.training(config.method))
    if config.makes_joint or config.makes_reference:
        found.append(config.training(config.joint_method))
    if config.tunes_others:
        found.append(config.training("full"))
    if config.edit == "repair":
        found.append(config.repairing)
    return found


def _check_sweep(config: UnlearnConfig, model: "PreTrainedConfig", device: torch.device, processes: int) -> None:
    """θ_0' and the reference are held whole on each device, also where training was sharded."""
    on_cpu = device.type == "cpu"
    stored = model.dtype.itemsize if isinstance(model.dtype, torch.dtype) else 4
    made = [config.makes_joint]
    if config.reference_model or config.retrain:
        made.append(config.makes_reference)
    # On a CPU all is evaluated in fp32. Elsewhere a model is held as it is stored: in fp32 after a full fine-tune.
    each = [4 if on_cpu or (is_made and config.joint_method == "full") else stored for is_made in made]
    needed = sum(each) * sum(parameter.numel() for parameter in meta_model(model).parameters())
    sharing = processes if on_cpu else 1
    free = free_memory(device)
    if needed * sharing <= free:
        return
    what = "two models, the edited one and the reference," if len(made) == 2 else "the edited model"
    where = f" in each of {sharing} processes" if sharing > 1 else ""
    remedy = "do without the reference (--no-retrain, and no --reference-model), or " if len(made) == 2 else "or "
    raise UnsupportedError(
        f"too little memory: the sweep holds {what} whole, about {memory_size(needed)}{where}, and {memory_size(free)} "
        f"are free on {device.type}. Use a device with more memory, {remedy}take a smaller model."
    )
