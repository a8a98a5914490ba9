"""Fine-tuning: the same bytes from the same seed, though interrupted; the same steps on any number of processes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support import launch
from support.folders import names
from support.launched_training import LORA, QUICK, SETTINGS, StoppedError, Stopping, make_blocks, tied_model
from support.tiny_models import ARCHITECTURES, EXPERTS, TinyModels, make
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import (
    CorruptFileError,
    OutputError,
)
from hf_taskvec.files.own_folder import MARK
from hf_taskvec.training import (
    Finetuned,
    TrainingSettings,
    finetune,
)

SCRIPT = launch.SUPPORT / "launched_training.py"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def files(folder: Path) -> dict[str, bytes]:
    """All that a run wrote, but for its timing."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    record = json.loads(found["training.json"])
    record.pop("timing")
    return {**found, "training.json": json.dumps(record).encode()}


def largest_difference(one: Path, two: Path) -> float:
    a, b = weights(one), weights(two)
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


# What comes out.


def test_a_full_fine_tune_is_a_model_like_any_other(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    settings = replace(SETTINGS, epochs=4, learning_rate=1e-2)
    tuned = finetune(base, blocks, settings, tmp_path / "out", vectors=True)
    assert tuned.steps == len(tuned.losses) == 4 * 6 and len(tuned.epoch_losses) == 4
    assert tuned.epoch_losses[-1] < tuned.epoch_losses[0] - 0.05
    assert tuned.tokens_per_second > 0
    model = AutoModelForCausalLM.from_pretrained(tuned.folder)
    assert model.dtype == torch.float32 and model.config.use_cache
    vector = TaskVector.from_finetuned(base, tuned.folder)
    assert len(vector) == len(weights(base))
    assert [path.name for path in tuned.vectors] == ["epoch-1", "epoch-2", "epoch-3", "epoch-4"]
    first, last = TaskVector.load(tuned.vectors[0]), TaskVector.load(tuned.vectors[-1])
    for name in vector:
        torch.testing.assert_close(last.dense(name), vector.dense(name), rtol=0, atol=0)
    assert 0 < first.norm() < last.norm()
    expected = ["config.json", "generation_config.json", "model.safetensors", "training.json", "vectors"]
    assert names(tuned.folder) == expected
    assert names(tmp_path) == ["out"]
    assert str(tmp_path) not in (tuned.folder / "training.json").read_text()


def test_an_adapter_is_one_that_peft_loads(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    tuned = finetune(base, blocks, replace(LORA, learning_rate=1e-2), tmp_path / "out", vectors=True)
    config = json.loads((tuned.folder / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8
    assert config["base_model_name_or_path"] is None  # a folder of this machine means nothing elsewhere
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tuned.folder)
    vector = TaskVector.from_adapter(tuned.folder)
    assert len(vector) == 2 * 6  # every linear layer, and not the head
    last = TaskVector.load(tuned.vectors[-1])
    merged = dict(adapted.merge_and_unload().named_parameters())
    before = weights(base)
    for name in vector:
        torch.testing.assert_close(merged[name].detach(), before[name] + vector.dense(name))
        torch.testing.assert_close(last.dense(name), vector.dense(name), rtol=0, atol=0)
    assert not (tuned.folder / "README.md").exists()
    assert str(tmp_path) not in "".join(path.read_text() for path in tuned.folder.glob("*.json"))


def test_the_loop_does_what_a_plain_one_does(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    """AdamW by hand, one whole batch at a time, in the order that the record's seed implies."""
    from hf_taskvec.training.token_blocks import epoch_order

    tuned = finetune(base, blocks, SETTINGS, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(base).train()
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    ids = torch.tensor(blocks["input_ids"])
    losses = []
    for epoch in range(2):
        for rows in epoch_order(len(ids), 0, epoch).split(4):
            step = len(losses)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (0.5 if step == 0 else 0.5 * (1 + math.cos(math.pi * (step - 1) / 11)))
            loss = model(input_ids=ids[rows], labels=ids[rows]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert tuned.losses == pytest.approx(losses, rel=1e-5)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights(tuned.folder)[name], tensor, rtol=0, atol=1e-5)


def test_a_live_model_is_left_as_it_is(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.random.get_rng_state()
    live = finetune(model, blocks, QUICK, tmp_path / "live", vectors=True)
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    stored = finetune(base, blocks, QUICK, tmp_path / "stored")
    assert largest_difference(live.folder, stored.folder) == 0
    assert TaskVector.load(live.vectors[0]) is not None


def test_sixteen_bit_weights_are_trained_in_fp32(models: TinyModels, blocks: datasets.Dataset, tmp_path: Path) -> None:
    base = models.pair("llama", torch.bfloat16).base
    tuned = finetune(base, blocks, replace(QUICK, learning_rate=1e-6), tmp_path / "out")
    before, after = weights(base), weights(tuned.folder)
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    name = "model.layers.0.mlp.up_proj.weight"
    changed = before[name].float() != after[name]
    vanishing = before[name] == after[name].bfloat16()
    assert changed.float().mean() > 0.9 and vanishing.float().mean() > 0.9  # a step so small is nothing in bf16


@pytest.mark.parametrize("method", ["full", "lora"])
def test_bf16_checkpointing_and_accumulation_train_the_same_but_for_rounding(
    models: TinyModels, blocks: datasets.Dataset, tmp_path: Path, method: Any
) -> None:
    base = models.pair("llama", torch.bfloat16).base
    plain = replace(QUICK, method=method, rank=4, precision="fp32")
    reference = finetune(base, blocks, plain, tmp_path / "plain")
    thrifty = replace(plain, gradient_checkpointing=True, micro_batch_size=3)
    same = finetune(base, blocks, thrifty, tmp_path / "thrifty")
    assert largest_difference(reference.folder, same.folder) < 1e-5
    rough = finetune(base, blocks, replace(thrifty, precision="bf16"), tmp_path / "bf16")
    assert rough.losses == pytest.approx(reference.losses, abs=0.02)
    assert all(tensor.dtype == torch.float32 for tensor in weights(rough.folder).values())


def test_tied_weights_are_stored_once(models: TinyModels, blocks: datasets.Dataset, tmp_path: Path) -> None:
    base = models.pair("gpt2").base
    tuned = finetune(base, blocks, QUICK, tmp_path / "out", vectors=True)
    assert weights(tuned.folder).keys() == weights(base).keys()
    assert len(TaskVector.load(tuned.vectors[0])) == len(weights(base))


def test_hidden_labels_teach_nothing(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    ids = torch.tensor(blocks["input_ids"])
    other = ids.clone()
    other[:, -4:] = 5  # what follows the last visible label has no effect on anything before it
    runs = []
    for name, tokens in (("a", ids), ("b", other)):
        labels = tokens.clone()
        labels[:, -4:] = -100
        data = datasets.Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels.tolist()})
        runs.append(finetune(base, data, QUICK, tmp_path / name))
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)


def test_the_tokenizer_is_saved_beside_the_model(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    from support.tiny_books import make_tokenizer
    from transformers import AutoTokenizer

    first = finetune(base, blocks, QUICK, tmp_path / "first", tokenizer=make_tokenizer())
    second = finetune(first.folder, blocks, QUICK, tmp_path / "second")
    assert AutoTokenizer.from_pretrained(second.folder).get_vocab() == make_tokenizer().get_vocab()
    assert json.loads((second.folder / "training.json").read_text())["base"]["name"] == "first"


def test_a_base_from_the_hub_is_named(hub: Any, base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    HfApi().create_repo("me/tiny-phi")
    HfApi().upload_folder(repo_id="me/tiny-phi", folder_path=base)
    tuned = finetune("me/tiny-phi", blocks, replace(LORA, epochs=1), tmp_path / "out")
    assert json.loads((tuned.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/tiny-phi"
    assert str(Path.home()) not in "".join(path.read_text() for path in tuned.folder.glob("*.json"))


def test_books_become_a_fine_tune(tmp_path: Path) -> None:
    from support.tiny_books import make_books, make_tokenizer, tiny_gpt2

    tokenizer = make_tokenizer()
    both = datasets.concatenate_datasets([book.training_blocks(tokenizer, 64) for book in make_books()])
    settings = TrainingSettings(epochs=1, learning_rate=3e-3)
    tuned = finetune(tiny_gpt2(), both, settings, tmp_path / "out", tokenizer=tokenizer)
    assert tuned.losses[-1] < tuned.losses[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_architecture_can_be_trained_by_both_methods(
    models: TinyModels, blocks: datasets.Dataset, tmp_path: Path, architecture: str, method: Any
) -> None:
    experts = architecture in EXPERTS
    base = models.pair(architecture, **({"num_experts_per_tok": 1} if experts else {})).base
    settings = replace(QUICK, method=method, rank=4, gradient_checkpointing=True)
    tuned = finetune(base, blocks, settings, tmp_path / "out", vectors=True)
    if method == "full":
        expected = TaskVector.from_finetuned(base, tuned.folder)
        assert weights(tuned.folder).keys() == weights(base).keys()
    else:
        expected = TaskVector.from_adapter(tuned.folder, base=base)
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tuned.folder)
    assert (TaskVector.load(tuned.vectors[-1]) - expected).norm() < 1e-6 < expected.norm()


@pytest.mark.parametrize("progress", [None, False, True])
def test_a_progress_bar_is_shown_only_when_asked_for_or_on_a_terminal(
    base: Path, blocks: datasets.Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str], progress: bool | None
) -> None:
    finetune(base, blocks, QUICK, tmp_path / "out", progress=progress)
    shown = capfd.readouterr()
    assert shown.out == ""
    if progress:
        assert re.search(r"Training: 100%.* 3/3 .*epoch 1, loss \d\.\d+, [\d,]+ tokens/s", shown.err)
    else:  # not asked for, and not a terminal
        assert shown.err == ""


# The same again.


@pytest.mark.parametrize("settings", [SETTINGS, LORA], ids=["full", "lora"])
def test_the_same_seed_gives_the_same_bytes(
    base: Path, blocks: datasets.Dataset, tmp_path: Path, settings: TrainingSettings
) -> None:
    torch.manual_seed(1)
    first = finetune(base, blocks, settings, tmp_path / "a")
    torch.manual_seed(2)
    second = finetune(base, blocks, settings, tmp_path / "b")
    assert files(first.folder) == files(second.folder)
    third = finetune(base, blocks, replace(settings, seed=1), tmp_path / "c")
    assert files(first.folder) != files(third.folder)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_interrupted_again_and_again_gives_the_same_bytes(
    models: TinyModels, blocks: datasets.Dataset, tmp_path: Path, method: Any
) -> None:
    """A model with dropout, stopped in every second step: the bytes of a run that nothing stopped."""
    base = models.pair("gpt2").base
    assert AutoModelForCausalLM.from_pretrained(base).config.resid_pdrop > 0
    settings = replace(SETTINGS, method=method, rank=4, dropout=0.1)
    whole = finetune(base, blocks, settings, tmp_path / "whole", vectors=True)
    attempts = 0
    while not (tmp_path / "pieces").exists():
        attempts += 1
        try:
            finetune(
                base,
                blocks,
                settings,
                tmp_path / "pieces",
                vectors=True,
                checkpoint_every=1,
                accelerator=Stopping(2),
            )
        except StoppedError:
            assert names(tmp_path) == [".pieces.unfinished", "whole"]
    assert attempts == 6  # of twelve steps
    assert files(tmp_path / "pieces") == files(whole.folder)
    assert names(tmp_path) == ["pieces", "whole"]


def test_a_finished_run_is_not_repeated(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    first = finetune(base, blocks, QUICK, tmp_path / "out")
    stray = first.folder / "checkpoint.safetensors"
    stray.touch()  # as if killed between giving the output its name and removing this
    stamp = (first.folder / "model.safetensors").stat().st_mtime_ns
    assert finetune(base, blocks, QUICK, tmp_path / "out") == first == Finetuned.load(tmp_path / "out")
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert not stray.exists()
    with pytest.raises(OutputError, match=r"already holds an output.*overwrite=True"):
        finetune(base, blocks, replace(QUICK, seed=1), tmp_path / "out")
    again = finetune(base, blocks, replace(QUICK, seed=1), tmp_path / "out", overwrite=True)
    assert again.losses != first.losses


def test_an_unfinished_run_of_other_settings_is_not_continued(
    base: Path, blocks: datasets.Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    others = {
        "settings": (base, blocks, replace(SETTINGS, learning_rate=2e-3)),
        "blocks": (base, make_blocks(seed=1), SETTINGS),
        "base": (make("phi", seed=3), blocks, SETTINGS),
    }
    with pytest.raises(StoppedError):
        finetune(base, blocks, SETTINGS, out, checkpoint_every=1, accelerator=Stopping(2))
    for other in others.values():
        with pytest.raises(
            OutputError, match=r"unfinished run of another base, other blocks or other settings \(after"
        ):
            finetune(*other, out)
    finetune(*others["settings"], out, overwrite=True)
    finetune(*others["settings"], tmp_path / "alone")
    assert files(out) == files(tmp_path / "alone")


def test_a_damaged_checkpoint_is_an_error(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        finetune(base, blocks, SETTINGS, tmp_path / "out", checkpoint_every=1, accelerator=Stopping(2))
    checkpoint = tmp_path / ".out.unfinished" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-10])
    with pytest.raises(CorruptFileError, match=r"checkpoint in .out.unfinished is damaged"):
        finetune(base, blocks, SETTINGS, tmp_path / "out")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_an_error_that_keeps_the_last_checkpoint(
    base: Path, blocks: datasets.Dataset, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    try:  # a checkpoint takes 75 kB: the second one, written beside the first, does not fit
        with pytest.raises(OutputError, match=r"No space left on device.*continues from the last checkpoint"):
            finetune(base, blocks, SETTINGS, small / "out", checkpoint_every=4)
        assert names(small) == [".out.unfinished"]
        counting = Stopping(12)
        finetune(base, blocks, SETTINGS, small / "out", checkpoint_every=0, accelerator=counting)
        assert counting.left == 4
    finally:
        subprocess.run(["umount", str(small)], check=True)


# In processes of its own.


def test_a_killed_run_continues_from_its_last_checkpoint(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    killed = launch.run(SCRIPT, base, tmp_path, "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    left = tmp_path / ".killed.unfinished"
    assert names(tmp_path) == [".killed.lock", left.name]
    assert names(left) == [MARK, "checkpoint.safetensors", "vectors"]
    # What a process was writing when it died is not taken for output.
    for half in (".checkpoint.safetensors.partial", "model.safetensors", "vectors/.epoch-2.weights"):
        (left / half).write_text("half")
    counting = Stopping(12)
    resumed = finetune(
        base, blocks, SETTINGS, tmp_path / "killed", vectors=True, checkpoint_every=0, accelerator=counting
    )
    assert counting.left == 6  # the checkpoint was that of step 6
    whole = finetune(base, blocks, SETTINGS, tmp_path / "whole", vectors=True)
    assert files(resumed.folder) == files(whole.folder)
    assert names(tmp_path) == ["killed", "whole"]


WITH_TWO = [
    "full",
    "lora",
    "sharded",
    "sharded-lora",
    "sharded-tied",
    "sharded-resumed",
    "stopped",
    "nan",
    "refused",
    "estimated",
    "converted",
]


@pytest.fixture(scope="module")
def two_processes(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch for all that needs two processes: starting them takes longest."""
    folder = tmp_path_factory.mktemp("two")
    launch.succeed(SCRIPT, base, folder, *WITH_TWO, processes=2)
    return folder


@pytest.mark.parametrize("job", WITH_TWO[:7])
def test_two_processes_make_the_steps_of_one(
    base: Path, blocks: datasets.Dataset, tmp_path: Path, two_processes: Path, job: str
) -> None:
    """Gradients are summed in another order: about 1e-7 of each. AdamW divides by their own size, so where a gradient
    is nearly zero a weight may differ by a visible part of a step; 2e-5 is 2 % of one step of the learning rate."""
    start = tied_model() if job == "sharded-tied" else base
    settings = LORA if "lora" in job else SETTINGS
    one = finetune(start, blocks, settings, tmp_path / "one", vectors=True)
    if job == "stopped":  # begun by two processes, ended by one
        two = finetune(start, blocks, settings, two_processes / job, vectors=True, accelerator=Stopping(6))
    else:
        two = Finetuned.load(two_processes / job)
        assert json.loads((two.folder / "training.json").read_text())["timing"]["processes"] == 2
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert two.epoch_losses == pytest.approx(one.epoch_losses, rel=1e-5)
    assert largest_difference(one.folder, two.folder) < 2e-5
    assert files(two.folder).keys() == files(one.folder).keys()
    for ours, theirs in zip(one.vectors, two.vectors, strict=True):
        vector = TaskVector.load(theirs)
        assert set(vector) == set(TaskVector.load(ours))
        assert vector.norm() > 1e-2 and (vector - TaskVector.load(ours)).norm() < 1e-2 * vector.norm()


@pytest.mark.slow
def test_four_processes_that_share_the_weights_make_the_steps_of_one(
    base: Path, blocks: datasets.Dataset, tmp_path: Path
) -> None:
    """See `test_two_processes_make_the_steps_of_one`. Not all tensors have a row for each of four."""
    launch.succeed(SCRIPT, base, tmp_path, "sharded", "sharded-lora", processes=4)
    for job in ("sharded", "sharded-lora"):
        one = finetune(base, blocks, LORA if "lora" in job else SETTINGS, tmp_path / f"{job}-one")
        four = Finetuned.load(tmp_path / job)
        assert json.loads((four.folder / "training.json").read_text())["timing"]["processes"] == 4
        assert four.losses == pytest.approx(one.losses, rel=1e-5)
        assert largest_difference(one.folder, four.folder) < 2e-5


def test_processes_fail_together(two_processes: Path) -> None:
    """If one diverges or finds the folder taken, none waits for the others; nothing is left of it."""
    assert set(names(two_processes)) <= {*WITH_TWO[:7], ".stopped.unfinished"}
