"""Fine-tuning for `accelerate launch`: launched_training.py BASE OUTPUT JOB [JOB ...], each into OUTPUT/JOB."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from support.tiny_models import make
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_taskvec.errors import DivergedError, TaskVectorError
from hf_taskvec.training import TrainingSettings, finetune

# 21 blocks in batches of 4: the last batch of an epoch has one block, so the second process has none for it.
SETTINGS = TrainingSettings(epochs=2, batch_size=4, learning_rate=1e-3, micro_batch_size=1)
QUICK = TrainingSettings(epochs=1, batch_size=8, learning_rate=1e-3)
LORA = TrainingSettings(method="lora", rank=4, epochs=2, batch_size=4, learning_rate=1e-3)


def make_blocks(count: int = 21, length: int = 16, vocabulary: int = 20, seed: int = 0) -> datasets.Dataset:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (count, length), generator=draw)
    return datasets.Dataset.from_dict({"input_ids": ids.tolist()})


def sharding() -> Accelerator:
    """An accelerator as `accelerate config` sets it up for FSDP2 on GPUs.

    With CPUs alone accelerate does not take this path by itself; told that it is on it, it shards like on GPUs.
    """
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return accelerator


def tied_model() -> PreTrainedModel:
    return make("llama", tie_word_embeddings=True)


class StoppedError(Exception):
    pass


class Stopping(Accelerator):
    """Fails after a number of steps, as if the power had gone."""

    def __init__(self, steps: int) -> None:
        super().__init__(cpu=True)
        self.left = steps

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        if self.left == 0:
            raise StoppedError
        self.left -= 1
        return super().clip_grad_norm_(*args, **kwargs)


class Killed(Accelerator):
    """In the eighth step: no exception, no clean-up, the process is gone."""

    steps = 0

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.steps == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().clip_grad_norm_(*args, **kwargs)


class Broken(Accelerator):
    """Gradients that are not numbers, in one process only, from the third step on."""

    steps = 0

    def clip_grad_norm_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        norm = super().clip_grad_norm_(parameters, *args, **kwargs)
        return norm * float("nan") if self.steps > 2 and self.is_main_process else norm


def run(job: str, base: Path, folder: Path) -> None:
    blocks = make_blocks()
    often: dict[str, Any] = {"vectors": True, "checkpoint_every": 3}
    if job in ("full", "lora"):
        finetune(base, blocks, LORA if job == "lora" else SETTINGS, folder, **often)
    elif job in ("sharded", "sharded-lora", "sharded-tied"):
        accelerator = sharding()
        settings = LORA if job == "sharded-lora" else SETTINGS
        finetune(
            tied_model() if job == "sharded-tied" else base, blocks, settings, folder, **often, accelerator=accelerator
        )
        assert any(isinstance(weight, DTensor) for weight in accelerator._models[-1].parameters())
        AcceleratorState._reset_state()
    elif job == "sharded-resumed":  # begun with whole weights in each process, ended with shards
        expect(StoppedError, lambda: finetune(base, blocks, SETTINGS, folder, **often, accelerator=Stopping(8)))
        finetune(base, blocks, SETTINGS, folder, **often, accelerator=sharding())
        AcceleratorState._reset_state()
    elif job == "stopped":
        expect(StoppedError, lambda: finetune(base, blocks, SETTINGS, folder, **often, accelerator=Stopping(8)))
    elif job == "killed":
        finetune(base, blocks, SETTINGS, folder, **often, accelerator=Killed(cpu=True))
    elif job == "nan":
        error = expect(DivergedError, lambda: finetune(base, blocks, SETTINGS, folder, accelerator=Broken(cpu=True)))
        assert "step 3 of 12" in str(error), error
    elif job == "refused":  # in the main process only, which alone looks for earlier output
        other = replace(SETTINGS, seed=5)
        error = expect(TaskVectorError, lambda: finetune(base, blocks, other, folder.parent / "full"))
        assert "already holds an output" in str(error), error
    elif job == "estimated":
        estimated()
    elif job == "converted":
        converted(folder.parent)
    else:
        raise AssertionError(job)


def estimated() -> None:
    """Phi-1.5 needs 27 GiB in each of two processes, or 14 of what FSDP shards: seen before anything is trained."""
    from accelerate import PartialState
    from transformers import PhiConfig

    from hf_taskvec.experiments.unlearning import memory_check
    from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig
    from hf_taskvec.training import memory_estimate

    books = ["forget=one.txt", "retain=two.txt"]
    config = UnlearnConfig(base_model="phi", books=books, batch_size=2, gradient_checkpointing=True)
    memory_estimate.free_memory = memory_check.free_memory = lambda device: 40 * 2**30
    error = expect(TaskVectorError, lambda: memory_check.check_experiment_memory(config, PhiConfig()))
    assert "in each of 2 processes" in str(error), error
    # The processes as they are on GPUs before an Accelerator has looked at what `accelerate launch` says of FSDP.
    AcceleratorState._reset_state()
    PartialState().distributed_type = DistributedType.MULTI_GPU
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    memory_check.check_experiment_memory(config, PhiConfig())
    del os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_VERSION"]
    AcceleratorState._reset_state()
    PartialState().distributed_type = DistributedType.MULTI_CPU


def converted(cache: Path) -> None:
    """Two processes need the model of the PyPI package for the first time: one converts it, both find it."""
    from hf_taskvec.distributed import processes
    from hf_taskvec.experiments import smollm
    from hf_taskvec.files.output_folder import new_folder

    calls = []

    def convert(file: Path, folder: Path) -> None:
        calls.append(file)
        with new_folder(folder, "config.json") as part:
            (part / "config.json").write_text("{}")

    def missing() -> Path:
        raise TaskVectorError("not installed")

    smollm._gguf = missing
    error = expect(TaskVectorError, lambda: smollm.smollm_folder(cache))  # told by all, and none waits
    assert "not installed" in str(error), error
    smollm._gguf, smollm._convert = lambda: Path("model.gguf"), convert
    folder = smollm.smollm_folder(cache)
    assert (folder / "config.json").exists() and sum(processes().gather(len(calls))) == 1
    smollm.smollm_folder(cache)  # and the package is not needed again
    shutil.rmtree(folder, ignore_errors=True)


def expect(kind: type[Exception], work: Callable[[], Any]) -> Exception:
    try:
        work()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    for name in sys.argv[3:]:
        run(name, Path(sys.argv[1]), Path(sys.argv[2]) / name)
