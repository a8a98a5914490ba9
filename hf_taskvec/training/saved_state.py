"""A run in its middle: trained weights, the optimiser's moments and the losses, as one file that is replaced whole.

The file is safetensors, so nothing of it is executed when it is read. Everything else that a run depends on, the
learning rate, the order of the blocks, the random numbers, is a function of the settings and the step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_taskvec import atomic
from hf_taskvec.errors import CorruptFileError, OutputError
from hf_taskvec.filenames import TRAINING_STATE
from hf_taskvec.training.accelerators import assign_tensor, whole_tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class SavedState:
    """A checkpoint on disk: whose it is and how far it got."""

    path: Path
    key: str
    losses: tuple[float, ...]

    @property
    def step(self) -> int:
        """How many steps were done."""
        return len(self.losses)


def find_state(folder: Path) -> SavedState | None:
    """The checkpoint of a folder, if there is one."""
    path = folder / TRAINING_STATE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            losses = _checked(file.get_tensor("losses"), (None,), torch.float64, "losses")
            if not bool(losses.isfinite().all()):
                raise CorruptFileError("losses are not finite")
            return SavedState(path, file.metadata()["key"], tuple(losses.tolist()))
    except (SafetensorError, OSError, KeyError, TypeError, CorruptFileError) as error:
        raise _damaged(folder, error) from None


def _damaged(folder: Path, error: Exception) -> CorruptFileError:
    return CorruptFileError(f"the checkpoint in {folder.name} is damaged ({error}). Delete that folder to start anew.")


def _checked(tensor: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    """A tensor of the file, refused if it is not what was saved; None stands for any length."""
    fits = len(shape) == tensor.dim() and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype:
        raise CorruptFileError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}")
    return tensor


def save_state(
    folder: Path,
    key: str,
    losses: list[float],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    write: bool,
) -> None:
    """Write a checkpoint over the last one. All processes take part in gathering; one of them writes."""
    tensors = {"losses": torch.tensor(losses, dtype=torch.float64)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        found = {"weight": parameter.data, **optimizer.state[parameter]}
        for part, tensor in found.items():
            value = whole_tensor(tensor)
            if write:
                tensors[f"{part}/{name}"] = value.cpu().contiguous()
    if not write:
        return
    with writing_safetensors(folder), atomic.replacing(folder / TRAINING_STATE) as partial:
        save_file(tensors, partial, metadata={"key": key})


@contextmanager
def writing_safetensors(folder: Path) -> Iterator[None]:
    """Turn what safetensors raises, on a full disk for instance, into one of our errors."""
    try:
        yield
    except SafetensorError as error:
        raise OutputError(
            f"writing {folder.name} failed: {error}. Free some space; a new run continues from the last checkpoint."
        ) from error


def load_state(saved: SavedState, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put model and optimiser where the checkpoint was, whatever the number of processes then and now."""
    try:
        with safe_open(saved.path, framework="pt") as file:
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                like = tuple(parameter.shape), parameter.dtype
                found = {part: file.get_tensor(f"{part}/{name}") for part in ("weight", "step", *_MOMENTS)}
                for part, tensor in found.items():
                    _checked(tensor, *(((), torch.float32) if part == "step" else like), f"{part}/{name}")
                assign_tensor(parameter.data, found["weight"])
                state = optimizer.state[parameter]
                state["step"] = found["step"].clone().to(parameter.device)  # what is read is a mapped file
                for part in _MOMENTS:
                    state[part] = torch.zeros_like(parameter.data)
                    assign_tensor(state[part], found[part])
    except (SafetensorError, OSError, CorruptFileError) as error:
        raise _damaged(saved.path.parent, error) from None
