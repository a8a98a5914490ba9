"""`finetune`: a base and blocks of text -> a model or an adapter in a folder, resumed if it was interrupted."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec._version import __version__
from hf_taskvec.atomic import remove
from hf_taskvec.distributed import make_accelerator, processes
from hf_taskvec.errors import BadValueError, DivergedError, OutputError
from hf_taskvec.filenames import CONFIG, EPOCH_VECTORS, TRAINING_RECORD, TRAINING_STATE
from hf_taskvec.files.output_folder import check_replaceable, new_folder, unfinished
from hf_taskvec.files.own_folder import clear, remove_folder
from hf_taskvec.json_files import json_digest
from hf_taskvec.models.companions import companions
from hf_taskvec.models.fingerprints import full_fingerprint
from hf_taskvec.models.trained_books import RECORDED, marked_books
from hf_taskvec.peak_memory import peak_memory
from hf_taskvec.training.accelerators import check_accelerator, resolve_precision
from hf_taskvec.training.memory_estimate import check_training_memory
from hf_taskvec.training.run_record import Finetuned, is_record_of, write_record
from hf_taskvec.training.saved_state import find_state, load_state, save_state
from hf_taskvec.training.settings import SETTINGS_VERSION, TrainingSettings
from hf_taskvec.training.teachers import Guard, Teacher, open_teachers
from hf_taskvec.training.text_losses import RunObjective
from hf_taskvec.training.token_blocks import read_blocks
from hf_taskvec.training.trainable_parts import check_targets
from hf_taskvec.training.trained_model import (
    TrainingBase,
    check_weights_finite,
    meta_model,
    open_base,
    save_model,
    save_vector,
    training_dtype,
    whole_weights,
)
from hf_taskvec.training.training_loop import TrainingLoop, start_training

if TYPE_CHECKING:
    import datasets
    from accelerate import Accelerator
    from transformers import PreTrainedModel

_LIBRARIES = ("torch", "transformers", "peft", "accelerate")


def finetune(
    base: "str | Path | PreTrainedModel",
    blocks: "datasets.Dataset",
    settings: TrainingSettings,
    output: str | Path,
    *,
    tokenizer: Any = None,
    checkpoint_every: int | None = None,
    vectors: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
    accelerator: "Accelerator | None" = None,
    teacher: "str | Path | PreTrainedModel | Teacher | None" = None,
    guard: Guard | None = None,
) -> Finetuned:
    """Train a causal language model on blocks of text and save it: a model folder (full) or a PEFT adapter (LoRA).

    The folder appears under its name when it is complete. A run that was interrupted continues from its last
    checkpoint when it is called again with the same arguments; a run that is complete is not repeated, its result is
    returned. The trained weights are stored in fp32: rounding them to 16 bits would lose most of what a short
    fine-tune changes.

    Batches are formed before processes share them, so any number of processes makes the same steps, up to the order
    in which numbers are summed. On one kind of machine and with one number of processes, the same seed gives the same
    bytes (on a GPU as far as its kernels are deterministic).

    For a model that is larger than one device choose FSDP, version 2, in `accelerate config`; the saved folder is that
    of an ordinary checkpoint. DeepSpeed was never tried with this loop and is refused.

    Args:
        base (`str`, `Path` or `PreTrainedModel`):
            A folder, a Hub id, or a live model, which is left as it is.
        blocks (`datasets.Dataset`):
            Rows of `input_ids` of one length, as `Book.training_blocks` gives them; `labels` may hide some by −100.
        settings (`TrainingSettings`):
            Every choice of the training.
        output (`str` or `Path`):
            The folder to write, on a disk that all processes see.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Saved beside the model. By default a full model takes the tokenizer's files from its base's folder.
        checkpoint_every (`int`, *optional*):
            Steps between checkpoints; by default one at the end of each epoch, and 0 for none. A checkpoint holds the
            trained weights and AdamW's moments, three times their size in all.
        vectors (`bool`, *optional*, defaults to `False`):
            Also save the task vector of each epoch, in `vectors/epoch-1` and so on inside the folder.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an earlier output, and an unfinished one of other arguments.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal only.
        accelerator (`accelerate.Accelerator`, *optional*):
            Your own, if the one that `accelerate launch` implies is not what you want.
        teacher (`str`, `Path`, `PreTrainedModel` or `Teacher`, *optional*):
            A model whose next-token distribution is learnt instead of the text's own tokens; a `Teacher` mixes both.
            It is loaded whole in every process.
        guard (`Guard`, *optional*):
            Text on which the model shall predict what a teacher predicts that has never seen it.

    Returns:
        `Finetuned`: The folder that was written, and the losses.

    Raises:
        `OutputError`: If the folder holds something else, or an output or an unfinished run of other arguments.
        `DivergedError`: If a loss or a gradient is not a finite number. Nothing is saved then.
        `UnsupportedError`: If the base is not a causal language model, or the training does not fit into memory.
        `MismatchError`: If the blocks do not fit the base: another vocabulary, or longer than it reads; or a teacher
            has another vocabulary.

    Example:
        >>> from hf_taskvec.training import TrainingSettings, finetune
        >>> blocks = book.training_blocks(tokenizer, 512)  # doctest: +SKIP
        >>> tuned = finetune("microsoft/phi-1_5", blocks, TrainingSettings(epochs=2), "outputs/book")  # doctest: +SKIP
        >>> tuned.epoch_losses  # doctest: +SKIP
        (2.91, 2.64)

    """
    return train_with(
        lambda source: open_teachers(teacher, guard, source),
        base,
        blocks,
        settings,
        output,
        tokenizer=tokenizer,
        checkpoint_every=checkpoint_every,
        vectors=vectors,
        overwrite=overwrite,
        progress=progress,
        accelerator=accelerator,
    )


def train_with(
    open_objective: Callable[[TrainingBase], RunObjective],
    base: "str | Path | PreTrainedModel",
    blocks: "datasets.Dataset",
    settings: TrainingSettings,
    output: str | Path,
    *,
    tokenizer: Any = None,
    checkpoint_every: int | None = None,
    vectors: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
    accelerator: "Accelerator | None" = None,
    books: "Sequence[datasets.Dataset]" = (),
) -> Finetuned:
    """`finetune` with any objective, which is opened, and may refuse the base, before a weight is loaded.

    `books` are further blocks whose books the record names.
    """
    if checkpoint_every is not None and checkpoint_every < 0:
        raise BadValueError(f"checkpoint_every={checkpoint_every} must be a number of steps, or 0 for none.")
    final = Path(output).resolve()
    check_replaceable(final, TRAINING_RECORD, overwrite=True)
    accelerator = accelerator or make_accelerator()
    check_accelerator(accelerator)
    state = processes()
    source = open_base(base)
    if isinstance(source.model, Path) and source.model.resolve() == final:
        raise OutputError("the output folder is the base's own folder. Choose another.")
    beside = companions(source.model) if isinstance(source.model, Path) else []
    data = read_blocks(blocks, source.vocabulary, source.context)
    precision = resolve_precision(settings, accelerator)
    check_targets(meta_model(source.config), settings)
    objective = open_objective(source)
    check_training_memory(source.config, settings, data.length, accelerator, objective.configs)
    model = source.load(training_dtype(source.config, settings, precision))
    fingerprint = full_fingerprint(model) if accelerator.is_main_process else ""
    given = (data.digest, asdict(settings), precision, vectors, *objective.key)
    key = _key(next(filter(None, state.gather(fingerprint))), *given)
    finished = state.together(lambda: not overwrite and is_record_of(final, key), main_only=True)
    if any(state.gather(finished)):
        if accelerator.is_main_process:  # killed at the very end, a run leaves it behind
            (final / TRAINING_STATE).unlink(missing_ok=True)
        return Finetuned.load(final)

    folder = unfinished(final)
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices), ExitStack() as folders:

        def open_output() -> None:
            folders.enter_context(new_folder(output, TRAINING_RECORD, overwrite, resume=True))
            _tidy(folder, key, overwrite)

        state.together(open_output, main_only=True)
        losses = objective.load(precision, accelerator.device)
        loop = start_training(accelerator, model, data, settings, precision, *losses)
        saved = find_state(folder)
        if saved:
            load_state(saved, loop.plain, loop.optimizer)
            loop.losses = list(saved.losses)
        every = loop.steps_in_epoch if checkpoint_every is None else checkpoint_every

        def after_step(done: int) -> None:
            if vectors and done % loop.steps_in_epoch == 0:
                loop.read_losses()
                _save_vector(base, loop.plain, folder, done // loop.steps_in_epoch)
            if every and done % every == 0 and done < loop.steps:
                loop.read_losses()
                save_state(folder, key, loop.losses, loop.plain, loop.optimizer, write=accelerator.is_main_process)

        try:
            with peak_memory(accelerator.device) as peak:
                speed = loop.run(progress, after_step)
        except DivergedError:
            if accelerator.is_main_process:  # to continue would lead to the same
                remove_folder(folder)
            raise
        weights = whole_weights(loop.plain, keep=accelerator.is_main_process)

        def finish() -> None:
            check_weights_finite(weights)
            save_model(loop.plain, folder, weights)
            if settings.method == "full":
                _save_companions(source, beside, folder, with_tokenizer=tokenizer is None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            named = dict.fromkeys(name for each in (blocks, *books) for name in marked_books(each.info.description))
            write_record(folder, _record(loop, key, source, objective, vectors, list(named), speed, peak.bytes))
            folders.close()
            # Last of all: a run that is killed before its output has its name needs the checkpoint.
            (final / TRAINING_STATE).unlink(missing_ok=True)

        state.together(finish, main_only=True)
    return Finetuned.load(final)


def _key(*parts: Any) -> str:
    """What decides the result: the base's weights, the blocks, the settings, and an objective of the caller's own.

    Never a path or a number of processes.
    """
    return json_digest(SETTINGS_VERSION, *parts)


def _tidy(folder: Path, key: str, overwrite: bool) -> None:
    """Keep what an interrupted run needs to continue, and nothing that it was in the middle of writing.

    What another base, other blocks or other settings left is refused or, if so asked, thrown away.
    """
    saved = find_state(folder)
    continues = saved is not None and saved.key == key
    if saved and not continues and not overwrite:
        raise OutputError(
            f"{folder.name} holds an unfinished run of another base, other blocks or other settings (after step "
            f"{saved.step}). Use the same to continue it, pass overwrite=True to discard it, or choose another folder."
        )
    clear(folder, {TRAINING_STATE, EPOCH_VECTORS} if continues else ())
    for path in (folder / EPOCH_VECTORS).glob(".*"):
        remove(path)


def _save_vector(base: Any, model: Any, folder: Path, epoch: int) -> None:
    """The task vector of an epoch."""
    weights = whole_weights(model, keep=processes().is_main_process)
    target = folder / EPOCH_VECTORS / f"epoch-{epoch}"
    processes().together(lambda: save_vector(model, weights, base, target), main_only=True)


def _save_companions(source: TrainingBase, beside: list[Path], folder: Path, with_tokenizer: bool) -> None:
    """What belongs to a model beside its weights and its configuration, as it is in the base's folder."""
    for path in beside:
        assert isinstance(source.model, Path)
        if path.name == "generation_config.json" or (with_tokenizer and path.name != CONFIG):
            target = folder / path.relative_to(source.model)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def _record(
    loop: TrainingLoop,
    key: str,
    source: TrainingBase,
    objective: RunObjective,
    vectors: bool,
    books: list[str],
    speed: float,
    peak: int | None,
) -> dict[str, Any]:
    epochs = loop.settings.epochs
    return {
        "library": f"hf_taskvec {__version__}",
        "versions": {name: version(name) for name in _LIBRARIES},
        "key": key,
        "base": source.record.to_json(),
        "settings": asdict(loop.settings),
        "precision": loop.precision,
        "objective": objective.to_json(),
        "blocks": {"count": len(loop.blocks), "length": loop.blocks.length, "sha256": loop.blocks.digest},
        RECORDED: books,
        "steps": loop.steps,
        "tokens": epochs * loop.blocks.ids.numel(),
        "epoch_losses": loop.epoch_losses(),
        "losses": loop.losses,
        "vectors": [f"epoch-{epoch}" for epoch in range(1, epochs + 1)] if vectors else [],
        "timing": {
            "tokens_per_second": round(speed, 1),
            "processes": loop.accelerator.num_processes,
            "peak_bytes": peak,
        },
    }
