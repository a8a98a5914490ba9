"""What fine-tuning refuses, and that it does so before any work: settings, blocks, targets, models, folders, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.folders import names
from support.launched_training import LORA, QUICK, SETTINGS
from support.tiny_models import TinyModels, make
from transformers import AutoModelForCausalLM, BertConfig, T5Config

from hf_taskvec import TaskVector
from hf_taskvec.errors import (
    BadValueError,
    DivergedError,
    MismatchError,
    MissingFileError,
    MissingNameError,
    OutputError,
    UnsupportedError,
)
from hf_taskvec.training import TrainingSettings, check_memory, estimate_memory, finetune


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
        ({"learning_rate": "1e-4"}, BadValueError, "learning_rate='1e-4' must be a number .YAML"),
        ({"weight_decay": -0.1}, BadValueError, "weight_decay=-0.1"),
        ({"warmup": 1.0}, BadValueError, "warmup=1.0"),
        ({"rank": 0}, BadValueError, "rank=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
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
def test_blocks_that_cannot_be_learnt_are_refused(
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
def test_targets_that_do_not_exist_are_refused(
    base: Path, blocks: datasets.Dataset, tmp_path: Path, targets: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        finetune(base, blocks, replace(LORA, targets=targets), tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), r".*\.[qv]_proj"])
def test_targets_that_exist_are_trained(base: Path, blocks: datasets.Dataset, tmp_path: Path, targets: Any) -> None:
    tuned = finetune(base, blocks, replace(LORA, epochs=1, targets=targets), tmp_path / "out")
    layers = {name.split(".")[-2] for name in TaskVector.from_adapter(tuned.folder)}
    assert layers == {"q_proj", "v_proj"}


def test_models_that_are_not_causal_are_refused(models: TinyModels, blocks: datasets.Dataset, tmp_path: Path) -> None:
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


def test_folders_that_are_not_ours_are_refused(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds other files"):
        finetune(base, blocks, QUICK, tmp_path, overwrite=True)
    tuned = finetune(base, blocks, QUICK, tmp_path / "out")
    with pytest.raises(OutputError, match="the base's own folder"):
        finetune(tuned.folder, blocks, QUICK, tuned.folder, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_loss_that_is_not_a_number_stops_the_run_and_leaves_nothing(
    base: Path, blocks: datasets.Dataset, tmp_path: Path
) -> None:
    wild = replace(SETTINGS, learning_rate=1e30, warmup=0.0)
    with pytest.raises(DivergedError, match=r"step \d+ of 12; nothing was saved. A lower learning_rate .it is 1e\+30"):
        finetune(base, blocks, wild, tmp_path / "out", checkpoint_every=1)
    assert not any(tmp_path.iterdir())


def test_weights_that_the_last_step_ruins_are_not_saved(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    wild = TrainingSettings(epochs=1, batch_size=21, learning_rate=1e38, weight_decay=1e3, warmup=0.0)
    with pytest.raises(DivergedError, match="not finite after the last step"):
        finetune(base, blocks, wild, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_are_not_adapted_with_dropout(models: TinyModels, blocks: datasets.Dataset, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"fused experts.*no dropout.*dropout=0, or name other layers"):
        finetune(models.pair("mixtral").base, blocks, replace(LORA, dropout=0.1), tmp_path / "out")


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
