"""`TaskVectorCallback` in a real `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.folders import names
from support.launched_training import StoppedError
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_taskvec import TaskVector
from hf_taskvec.errors import (
    OutputError,
    UnsupportedError,
)
from hf_taskvec.files.output_folder import unfinished
from hf_taskvec.files.own_folder import take_folder
from hf_taskvec.training import TaskVectorCallback


def trainer(
    model: Any,
    blocks: datasets.Dataset | datasets.IterableDataset,
    folder: Path,
    callback: TaskVectorCallback,
    **options: Any,
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
    data = blocks.map(lambda block: {"labels": block["input_ids"]})
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])


@pytest.mark.parametrize("from_files", [True, False])
def test_the_callback_saves_each_epoch(base: Path, blocks: datasets.Dataset, tmp_path: Path, from_files: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    callback = TaskVectorCallback(tmp_path / "vectors", base if from_files else None)
    if not from_files:  # as a run leaves it that was killed while it kept the starting weights
        half = unfinished(tmp_path / "vectors" / ".start")
        take_folder(half)
        (half / "model.safetensors").write_text("half")
    trainer(model, blocks, tmp_path / "trainer", callback).train()
    assert names(tmp_path / "vectors") == ["epoch-1", "epoch-2"]
    last = TaskVector.load(tmp_path / "vectors" / "epoch-2")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(before[name] + last.dense(name), tensor, rtol=0, atol=1e-7)
    assert 0 < TaskVector.load(tmp_path / "vectors" / "epoch-1").norm() < last.norm()
    with pytest.raises(OutputError, match="already holds the vectors"):
        trainer(model, blocks, tmp_path / "trainer", callback).train()


@pytest.mark.parametrize("is_length_known", [True, False])
def test_no_epoch_replaces_the_vector_of_another(
    base: Path, blocks: datasets.Dataset, tmp_path: Path, is_length_known: bool
) -> None:
    """Without a known length the trainer counts epochs as 0.4, 1.4, 2.2: rounded, two of them are the second."""
    batches = -(-len(blocks) // 4)
    steps = 2 * batches + 1  # the third epoch is cut off
    data = blocks if is_length_known else blocks.to_iterable_dataset()
    model = AutoModelForCausalLM.from_pretrained(base)
    callback = TaskVectorCallback(tmp_path / "vectors", base)
    trainer(model, data, tmp_path / "trainer", callback, max_steps=steps).train()
    whole = ["epoch-1", "epoch-2"] if is_length_known else [f"step-{batches}", f"step-{2 * batches}"]
    assert set(names(tmp_path / "vectors")) == {*whole, f"step-{steps}"}
    norms = [TaskVector.load(tmp_path / "vectors" / name).norm() for name in (*whole, f"step-{steps}")]
    assert len(set(norms)) == 3
    assert norms[-1] == pytest.approx(TaskVector.from_finetuned(base, model).norm(), rel=1e-6)
    with pytest.raises(OutputError, match="already holds the vectors"):
        trainer(model, data, tmp_path / "trainer", callback, max_steps=steps).train()


def test_the_callback_saves_an_adapter_as_low_rank_factors(
    base: Path, blocks: datasets.Dataset, tmp_path: Path
) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"]))
    trainer(model, blocks, tmp_path / "trainer", TaskVectorCallback(tmp_path / "vectors")).train()
    last = TaskVector.load(tmp_path / "vectors" / "epoch-2")
    expected = TaskVector.from_adapter(model)
    assert set(last) == set(expected) and "low-rank" in repr(last)
    for name in expected:
        torch.testing.assert_close(last.dense(name), expected.dense(name))


def test_the_callback_measures_from_the_first_start_when_training_is_resumed(
    base: Path, blocks: datasets.Dataset, tmp_path: Path
) -> None:
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
