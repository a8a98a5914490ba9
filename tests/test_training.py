"""Fine-tuning: the same bytes from the same seed, whatever was interrupted; the same steps on any number of processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from launched_training import LORA, SETTINGS, StoppedError, Stopping, make_blocks, tied_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import TinyModels, make
from transformers import AutoModelForCausalLM, BertConfig, T5Config, Trainer, TrainingArguments

from hf_taskvec import TaskVector
from hf_taskvec.errors import (
    BadValueError,
    CorruptFileError,
    DivergedError,
    MismatchError,
    MissingFileError,
    MissingNameError,
    OutputError,
    UnsupportedError,
)
from hf_taskvec.training import (
    Finetuned,
    TaskVectorCallback,
    TrainingSettings,
    check_memory,
    estimate_memory,
    finetune,
)

HERE = Path(__file__).resolve().parent
QUICK = TrainingSettings(epochs=1, batch_size=8, learning_rate=1e-3)


@pytest.fixture(scope="session")
def base(models: TinyModels) -> Path:
    return models.pair("phi").base


@pytest.fixture
def blocks() -> datasets.Dataset:
    return make_blocks()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def files(folder: Path) -> dict[str, bytes]:
    """All that a run wrote, but for its timing."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    record = json.loads(found["training.json"])
    record.pop("timing")
    return {**found, "training.json": json.dumps(record).encode()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    from hf_taskvec.training.blocks import epoch_order

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
def test_bf16_checkpointing_and_accumulation(
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


def test_the_tokenizer_comes_along(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    from evaluation.tiny import make_tokenizer
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
def test_interrupted_again_and_again(models: TinyModels, blocks: datasets.Dataset, tmp_path: Path, method: Any) -> None:
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
    stamp = (first.folder / "model.safetensors").stat().st_mtime_ns
    assert finetune(base, blocks, QUICK, tmp_path / "out") == first == Finetuned.load(tmp_path / "out")
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == stamp
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


# In processes of its own.


def environment() -> dict[str, str]:
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    quiet = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **quiet}


def command(processes: int, *args: str | Path) -> list[str]:
    script = [str(HERE / "launched_training.py"), *map(str, args)]
    if processes == 1:
        return [sys.executable, *script]
    options = f"--multi_gpu --num_processes {processes} --num_machines 1 --mixed_precision no --dynamo_backend no"
    launch = ["-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    return [sys.executable, *launch, *script]


def test_killed_and_started_again(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    killed = subprocess.run(command(1, base, tmp_path, "killed"), env=environment(), capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    left = tmp_path / ".killed.unfinished"
    assert names(tmp_path) == [left.name] and names(left) == ["checkpoint.safetensors", "vectors"]
    # What a process was writing when it died is not taken for output.
    for half in ("checkpoint.safetensors.partial", "model.safetensors", "vectors/.epoch-2.weights"):
        (left / half).write_text("half")
    counting = Stopping(12)
    resumed = finetune(
        base, blocks, SETTINGS, tmp_path / "killed", vectors=True, checkpoint_every=0, accelerator=counting
    )
    assert counting.left == 6  # the checkpoint was that of step 6
    whole = finetune(base, blocks, SETTINGS, tmp_path / "whole", vectors=True)
    assert files(resumed.folder) == files(whole.folder)
    assert names(tmp_path) == ["killed", "whole"]


WITH_TWO = ["full", "lora", "sharded", "sharded-lora", "sharded-tied", "sharded-resumed", "stopped", "nan", "refused"]


@pytest.fixture(scope="module")
def two_processes(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch for all that needs two processes: starting them takes longest."""
    folder = tmp_path_factory.mktemp("two")
    done = subprocess.run(command(2, base, folder, *WITH_TWO), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
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


def test_processes_fail_together(two_processes: Path) -> None:
    """If one diverges or finds the folder taken, none waits for the others; nothing is left of it."""
    assert set(names(two_processes)) <= {*WITH_TWO[:7], ".stopped.unfinished"}


# What is refused, before any work.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"method": "lore"}, MissingNameError, "no method 'lore'. Did you mean 'lora'"),
        ({"schedule": "cosin"}, MissingNameError, "Did you mean 'cosine'"),
        ({"precision": "fp16"}, MissingNameError, "no precision 'fp16'"),
        ({"epochs": 0}, BadValueError, "epochs=0"),
        ({"epochs": 1.5}, BadValueError, "epochs=1.5"),
        ({"batch_size": -1}, BadValueError, "batch_size=-1"),
        ({"learning_rate": 0.0}, BadValueError, "learning_rate=0.0"),
        ({"learning_rate": float("nan")}, BadValueError, "learning_rate=nan"),
        ({"weight_decay": -0.1}, BadValueError, "weight_decay=-0.1"),
        ({"warmup": 1.0}, BadValueError, "warmup=1.0"),
        ({"rank": 0}, BadValueError, "rank=0"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainingSettings(**change)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ({"input_ids": []}, BadValueError, "no blocks to train on"),
        ({"input_id": [[1, 2]]}, MissingNameError, "no input_ids. Did you mean 'input_id'"),
        ({"input_ids": [[1, 2], [1]]}, BadValueError, "differ in their length"),
        ({"input_ids": [[1]]}, BadValueError, "fewer than 2 tokens"),
        ({"input_ids": [[1] * 33]}, MismatchError, "33 tokens long, the model reads at most 32"),
        ({"input_ids": [[1, 20]]}, MismatchError, "token 20, but the model's vocabulary is 0 to 19"),
        ({"input_ids": [[1, -1]]}, MismatchError, "token -1"),
        ({"input_ids": [[1, 2]], "labels": [[1, 99]]}, MismatchError, "labels holds the token 99"),
        ({"input_ids": [[1, 2]], "labels": [[-100, -100]]}, BadValueError, "nothing to learn"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, BadValueError, "padded"),
    ],
)
def test_blocks_that_cannot_be_learnt(
    base: Path, tmp_path: Path, rows: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        finetune(base, datasets.Dataset.from_dict(rows), QUICK, tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (("q_prj",), MissingNameError, "target 'q_prj'. Did you mean 'q_proj'. It has .*fc1"),
        (("q_proj", "w_proj"), MissingNameError, "target 'w_proj'"),
        (("input_layernorm",), UnsupportedError, "LayerNorm"),
        (r".*\.mlp\.fc[34]", MissingNameError, "no module"),
        ("(", BadValueError, "not a regular expression"),
        ((), BadValueError, "targets is empty"),
    ],
)
def test_targets_that_do_not_exist(
    base: Path, blocks: datasets.Dataset, tmp_path: Path, targets: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        finetune(base, blocks, replace(LORA, targets=targets), tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), r".*\.[qv]_proj"])
def test_targets_that_do(base: Path, blocks: datasets.Dataset, tmp_path: Path, targets: Any) -> None:
    tuned = finetune(base, blocks, replace(LORA, epochs=1, targets=targets), tmp_path / "out")
    layers = {name.split(".")[-2] for name in TaskVector.from_adapter(tuned.folder)}
    assert layers == {"q_proj", "v_proj"}


def test_models_that_are_not_causal(models: TinyModels, blocks: datasets.Dataset, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PhiModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = AutoModelForMaskedLM.from_config(BertConfig(vocab_size=20, **small))
    t5 = AutoModelForSeq2SeqLM.from_config(T5Config(vocab_size=20, d_model=16, d_ff=16, num_layers=1, num_heads=2))
    bert.save_pretrained(tmp_path / "bert")
    phi = make("phi")
    assert isinstance(phi.base_model, PhiModel)
    cases: list[tuple[Any, type[Exception], str]] = [
        (bert, UnsupportedError, r"BertForMaskedLM\) is an encoder"),
        (tmp_path / "bert", UnsupportedError, "bert .BertForMaskedLM. is an encoder"),
        (t5, UnsupportedError, "not a causal language model"),
        (phi.base_model, UnsupportedError, "no output head"),
        (get_peft_model(make("phi"), LoraConfig(target_modules=["q_proj"])), UnsupportedError, "wrapped by PEFT"),
        (torch.nn.Linear(2, 2), BadValueError, "not a Linear"),
        (tmp_path / "nothing", MissingFileError, "no folder 'nothing'"),
    ]
    for model, error, message in cases:
        with pytest.raises(error, match=message):
            finetune(model, blocks, QUICK, tmp_path / "out")
    assert names(tmp_path) == ["bert"]


def test_folders_that_are_not_ours(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds other files"):
        finetune(base, blocks, QUICK, tmp_path, overwrite=True)
    tuned = finetune(base, blocks, QUICK, tmp_path / "out")
    with pytest.raises(OutputError, match="the base's own folder"):
        finetune(tuned.folder, blocks, QUICK, tuned.folder, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_loss_that_is_not_a_number(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    wild = replace(SETTINGS, learning_rate=1e30, warmup=0.0)
    with pytest.raises(DivergedError, match=r"step \d+ of 12; nothing was saved. A lower learning_rate .it is 1e\+30"):
        finetune(base, blocks, wild, tmp_path / "out", checkpoint_every=1)
    assert not any(tmp_path.iterdir())


# Memory.


def test_the_estimate_counts_every_parameter(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    count = sum(parameter.numel() for parameter in model.parameters())
    full = estimate_memory(model.config, SETTINGS, 16)
    assert (full.weights, full.gradients, full.optimizer) == (4 * count, 4 * count, 8 * count)
    assert full == estimate_memory(model, SETTINGS, 16)
    factors = 4 * (4 * (16 + 16) + 2 * (16 + 32)) * 2  # rank × (in + out) of the layers of a block, twice
    lora = estimate_memory(model.config, LORA, 16)
    assert lora.weights == 4 * (count + factors) and lora.optimizer == 8 * factors
    thrifty = replace(SETTINGS, batch_size=64, micro_batch_size=None)
    wide = estimate_memory(model.config, thrifty, 16)
    assert (
        estimate_memory(model.config, replace(thrifty, gradient_checkpointing=True), 16).activations < wide.activations
    )
    assert estimate_memory(model.config, thrifty, 16, processes=2).activations == wide.activations // 2
    assert estimate_memory(model.config, thrifty, 16, processes=2, sharded=True).optimizer == full.optimizer // 2


def test_too_little_memory_is_told_with_numbers(blocks: datasets.Dataset, tmp_path: Path) -> None:
    from transformers import PhiConfig

    config = PhiConfig()  # Phi-1's size
    estimate = estimate_memory(config, TrainingSettings(), 512)
    with pytest.raises(
        UnsupportedError, match=r"needs about \d\d\.\d GiB \(weights 5\.\d GiB.* 8\.0 GiB are free on cpu"
    ):
        check_memory(estimate, torch.device("cpu"), free=8 * 2**30)
    check_memory(estimate, torch.device("cpu"), free=64 * 2**30)
    with pytest.raises(UnsupportedError, match="in each of 4 processes"):
        check_memory(estimate, torch.device("cpu"), free=64 * 2**30, sharing=4)


# With transformers' Trainer.


def trainer(
    model: Any, blocks: datasets.Dataset, folder: Path, callback: TaskVectorCallback, **options: Any
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **options},
    )
    data = blocks.add_column("labels", blocks["input_ids"][:])
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])


@pytest.mark.parametrize("from_files", [True, False])
def test_the_callback_saves_each_epoch(base: Path, blocks: datasets.Dataset, tmp_path: Path, from_files: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    callback = TaskVectorCallback(tmp_path / "vectors", base if from_files else None)
    trainer(model, blocks, tmp_path / "trainer", callback).train()
    assert names(tmp_path / "vectors") == ["epoch-1", "epoch-2"]
    last = TaskVector.load(tmp_path / "vectors" / "epoch-2")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(before[name] + last.dense(name), tensor, rtol=0, atol=1e-7)
    assert 0 < TaskVector.load(tmp_path / "vectors" / "epoch-1").norm() < last.norm()
    with pytest.raises(OutputError, match="already holds the vectors"):
        trainer(model, blocks, tmp_path / "trainer", callback).train()


def test_the_callback_on_an_adapter(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"]))
    trainer(model, blocks, tmp_path / "trainer", TaskVectorCallback(tmp_path / "vectors")).train()
    last = TaskVector.load(tmp_path / "vectors" / "epoch-2")
    expected = TaskVector.from_adapter(model)
    assert set(last) == set(expected) and "low-rank" in repr(last)
    for name in expected:
        torch.testing.assert_close(last.dense(name), expected.dense(name))


def test_the_callback_when_training_is_resumed(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    """The vector is that against the first start, not against where the resumed run began."""

    class Stop(TaskVectorCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_epoch_end(args, state, control, **kwargs)
            raise StoppedError

    model = AutoModelForCausalLM.from_pretrained(base)
    options = {"save_strategy": "steps", "save_steps": 3}
    with pytest.raises(StoppedError):
        trainer(model, blocks, tmp_path / "trainer", Stop(tmp_path / "vectors"), **options).train()
    model = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(UnsupportedError, match=r"does not hold the weights it started from.*base="):
        resumed = trainer(model, blocks, tmp_path / "trainer", TaskVectorCallback(tmp_path / "other"), **options)
        resumed.train(resume_from_checkpoint=True)
    resumed = trainer(model, blocks, tmp_path / "trainer", TaskVectorCallback(tmp_path / "vectors"), **options)
    resumed.train(resume_from_checkpoint=True)
    last = TaskVector.load(tmp_path / "vectors" / "epoch-2")
    expected = TaskVector.from_finetuned(base, model)
    assert last.norm() == pytest.approx(expected.norm(), rel=1e-6)
