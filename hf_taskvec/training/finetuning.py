"""`finetune`: a base and blocks of text -> a model or an adapter in a folder, resumed if it was interrupted."""

import contextlib
import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec._version import __version__
from hf_taskvec.errors import BadValueError, OutputError
from hf_taskvec.evaluation.fingerprint import model_fingerprint
from hf_taskvec.output import check_replaceable, new_folder, unfinished
from hf_taskvec.training import parallel
from hf_taskvec.training.blocks import read_blocks
from hf_taskvec.training.loop import Loop, NotFiniteError, make_optimizer
from hf_taskvec.training.models import Base, add_lora, check_targets, open_base, save_model, whole_weights
from hf_taskvec.training.record import RECORD, VECTORS, Finetuned, write_record
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.state import FILE as STATE
from hf_taskvec.training.state import find_state, load_state, save_state
from hf_taskvec.vector import TaskVector

if TYPE_CHECKING:
    import datasets
    from accelerate import Accelerator
    from transformers import PreTrainedModel


def finetune(
    base: "str | Path | PreTrainedModel",
    blocks: "datasets.Dataset",
    settings: TrainingSettings,
    save_to: str | Path,
    *,
    tokenizer: Any = None,
    checkpoint_every: int | None = None,
    vectors: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
    accelerator: "Accelerator | None" = None,
) -> Finetuned:
    """Train a causal language model on blocks of text and save it: a model folder (full) or a PEFT adapter (LoRA).

    The folder appears under its name when it is complete. A run that was interrupted continues from its last
    checkpoint when it is called again with the same arguments; a run that is complete is not repeated.

    Args:
        base: a folder, a Hub id, or a live model, which is left as it is.
        blocks: rows of `input_ids` of one length, as `Book.training_blocks` gives them; `labels` may hide some by −100.
        settings: every choice of the training.
        save_to: the folder to write.
        tokenizer: saved beside the model.
        checkpoint_every: steps between checkpoints; by default one at the end of each epoch. 0 for none.
        vectors: also save the task vector of each epoch, in `vectors/epoch-1` and so on inside the folder.
        overwrite: replace an earlier output, and an unfinished one of other arguments.
        progress: show a progress bar; by default on a terminal.
        accelerator: your own, if the one that `accelerate launch` implies is not what you want.
    """
    if checkpoint_every is not None and checkpoint_every < 0:
        raise BadValueError(f"checkpoint_every={checkpoint_every} must be a number of steps, or 0 for none.")
    final = Path(save_to).resolve()
    accelerator = accelerator or parallel.make_accelerator()
    parallel.check_accelerator(accelerator)
    source = open_base(base)
    data = read_blocks(blocks, source.vocabulary, source.context)
    precision = parallel.resolve_precision(settings, accelerator)
    model = source.load("auto" if settings.method == "lora" and precision == "bf16" else torch.float32)
    check_targets(model, settings.targets)
    key = _key(accelerator, model, data.digest, settings, precision)

    def is_finished() -> bool:
        if not overwrite and (final / RECORD).exists() and json.loads((final / RECORD).read_text())["key"] == key:
            (final / STATE).unlink(missing_ok=True)
            return True
        check_replaceable(final, RECORD, overwrite)
        return False

    if any(parallel.gather_object([parallel.together(accelerator, is_finished, main_only=True)])):
        return Finetuned.load(final)
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        folder = unfinished(final)
        parallel.together(
            accelerator,
            lambda: stack.enter_context(new_folder(final, RECORD, overwrite, resume=True)),
            main_only=True,
        )
        parallel.together(accelerator, lambda: _discard_foreign(folder, key, overwrite), main_only=True)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if settings.method == "lora":
            model = add_lora(model, settings)
        model, optimizer = accelerator.prepare(model, make_optimizer(model, settings))
        plain = accelerator.unwrap_model(model)
        loop = Loop(accelerator, model, optimizer, data, settings, precision)
        saved = find_state(folder)
        if saved:
            load_state(saved, plain, optimizer)
            loop.losses = list(saved.losses)
        every = loop.steps_in_epoch if checkpoint_every is None else checkpoint_every

        def after_step(done: int) -> None:
            ends_epoch = done % loop.steps_in_epoch == 0
            if vectors and ends_epoch:
                loop.read_losses()
                _save_vector(accelerator, source, base, plain, folder, done // loop.steps_in_epoch)
            if every and done % every == 0 and done < loop.steps:
                loop.read_losses()
                save_state(folder, key, loop.losses, plain, optimizer, accelerator.is_main_process)

        try:
            speed = loop.run(len(loop.losses), progress, after_step)
        except NotFiniteError:
            if accelerator.is_main_process:  # the same would come of it again
                shutil.rmtree(folder)
                folder.mkdir()
            raise
        weights = whole_weights(plain, accelerator.is_main_process)
        names = [f"epoch-{epoch}" for epoch in range(1, settings.epochs + 1)] if vectors else []

        def finish() -> None:
            save_model(plain, folder, weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            record = {
                "library": f"hf_taskvec {__version__}",
                "key": key,
                "settings": asdict(settings),
                "precision": precision,
                "steps": loop.steps,
                "tokens": settings.epochs * data.ids.numel(),
                "losses": loop.losses,
                "epoch_losses": loop.epoch_losses(),
                "vectors": names,
                "timing": {"tokens_per_second": speed, "processes": accelerator.num_processes},
            }
            write_record(folder, record)
            stack.close()
            (final / STATE).unlink(missing_ok=True)

        parallel.together(accelerator, finish, main_only=True)
    return Finetuned.load(final)


def _key(
    accelerator: "Accelerator", model: "PreTrainedModel", blocks: str, settings: TrainingSettings, precision: str
) -> str:
    """What decides the result: the base's weights, the blocks and the settings; never a path or a number of processes."""
    base = model_fingerprint(model) if accelerator.is_main_process else ""
    base = next(filter(None, parallel.gather_object([base])))
    parts = [1, base, blocks, asdict(settings), precision]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _discard_foreign(folder: Path, key: str, overwrite: bool) -> None:
    """Refuse (or, if asked to, throw away) what another base, other blocks or other settings left unfinished."""
    saved = find_state(folder)
    if saved and saved.key == key:
        return
    if saved and not overwrite:
        raise OutputError(
            f"{folder.name} holds an unfinished run of another base, other blocks or other settings (step {saved.step}). "
            "Use the same to continue it, pass overwrite=True to discard it, or choose another folder."
        )
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _save_vector(accelerator: "Accelerator", source: Base, base: Any, model: Any, folder: Path, epoch: int) -> None:
    """The task vector of an epoch: its weights go through the disk, so that memory holds no second model."""
    weights = whole_weights(model, accelerator.is_main_process)

    def write() -> None:
        trial = folder / f"epoch-{epoch}"
        save_model(model, trial, weights)
        is_adapter = (trial / "adapter_config.json").exists()
        make = TaskVector.from_adapter(trial, base) if is_adapter else TaskVector.from_finetuned(base, trial)
        make.save(folder / VECTORS / trial.name, overwrite=True)
        shutil.rmtree(trial)

    parallel.together(accelerator, write, main_only=True)
