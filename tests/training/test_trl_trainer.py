"""`TaskVectorCallback` in TRL's own `SFTTrainer`."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
from peft import LoraConfig
from support.folders import names
from support.tiny_books import STORY, make_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from hf_taskvec import TaskVector
from hf_taskvec.training import TaskVectorCallback


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])])
def test_sft_saves_a_vector_for_each_epoch(tmp_path: Path, adapter: LoraConfig | None) -> None:
    """The vector is what training changed: of the weights, or the adapter's own factors."""
    tokenizer, base = make_tokenizer(), tmp_path / "base"
    tokenizer.pad_token = tokenizer.eos_token
    tiny_llama().save_pretrained(base)
    tokenizer.save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    settings = SFTConfig(
        str(tmp_path / "trainer"),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=32,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    texts = datasets.Dataset.from_dict({"text": [STORY[at : at + 100] for at in range(0, 800, 100)]})
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=texts,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[TaskVectorCallback(tmp_path / "vectors", base)],
    )
    trainer.train()
    assert names(tmp_path / "vectors") == ["epoch-1", "epoch-2"]
    first, last = (TaskVector.load(tmp_path / "vectors" / name) for name in ("epoch-1", "epoch-2"))
    assert 0 < first.norm() < last.norm()
    assert ("low-rank" in repr(last)) == (adapter is not None)
    trained = trainer.model if adapter is None else trainer.model.merge_and_unload()
    changed = {name for name, weight in trained.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed and changed <= set(last)
    for name, weight in trained.state_dict().items():
        found = before[name] + last.dense(name) if name in last else before[name]
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-6)
