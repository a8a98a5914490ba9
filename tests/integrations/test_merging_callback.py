"""`MergeModelCallback` in a real `Trainer`, and beside what TRL's own makes of the same options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.folders import names
from support.tiny_books import make_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.integrations import MergeConfig, MergeModelCallback, open_merge


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callback") / "base"
    tiny_llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def train(base: Path, folder: Path, callback: MergeModelCallback, adapter: bool = False, **options: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, **options}
    arguments = TrainingArguments(
        str(folder), learning_rate=1e-2, per_device_train_batch_size=2, report_to="none", disable_tqdm=True,
        use_cpu=True, **settings,
    )  # fmt: skip
    rows = torch.arange(64).reshape(8, 8).tolist()
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_last_checkpoint_is_merged_with_the_start(base: Path, tmp_path: Path) -> None:
    seen: list[Path] = []
    train(
        base,
        tmp_path,
        MergeModelCallback(MergeConfig(policy_model_weight=0.75, target_model_weight=0.25), after=seen.append),
    )
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"] and not (tmp_path / "checkpoint-2" / "merged").exists()
    merged = tmp_path / "checkpoint-3" / "merged"
    assert seen == [merged]
    before, after, found = weights(base), weights(tmp_path / "checkpoint-3"), weights(merged)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for name, value in found.items():
        assert torch.equal(value, (0.75 * after[name].double() + 0.25 * before[name].double()).float()), name


def test_each_checkpoint_is_merged_by_a_yaml(base: Path, tmp_path: Path) -> None:
    models = [{"model": "policy", "parameters": {"weight": 1.0, "density": [0.9, 0.3]}}]
    ties = {"merge_method": "ties", "base_model": "target", "models": models}
    train(base, tmp_path / "run", MergeModelCallback(ties, merge_at_every_checkpoint=True))
    for number in (2, 3):
        checkpoint = tmp_path / "run" / f"checkpoint-{number}"
        paths = {**ties, "base_model": str(base), "models": [{**models[0], "model": str(checkpoint)}]}
        expected = weights(open_merge(paths).apply(tmp_path / f"expected-{number}"))
        found = weights(checkpoint / "merged")
        assert all(torch.equal(each, expected[name]) for name, each in found.items())


def test_an_adapter_is_put_onto_its_base_first(base: Path, tmp_path: Path) -> None:
    train(base, tmp_path, MergeModelCallback(MergeConfig("ties")), adapter=True)
    checkpoint = tmp_path / "checkpoint-3"
    vector = TaskVector.from_adapter(checkpoint, base=base)
    before, policy = weights(base), weights(checkpoint / "policy")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(policy[name], before[name] + vector.dense(name), atol=1e-7) and vector.norm() > 0
    assert torch.allclose(weights(checkpoint / "merged")[name], before[name], atol=1e-7)  # all of the target's change


@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties", "slerp"])
def test_each_method_of_trls_reads_as_mergekits_yaml(method: str, base: Path, tmp_path: Path) -> None:
    """The options as `MergeConfig.create_merge_config_*` of TRL 1.16 writes them."""
    made = MergeConfig(method).create()
    policy, target = {"model": "policy"}, {"model": "target"}
    density = [{"density": [1.0, 0.7, 0.1], "weight": 1.0}, {"density": [1.0], "weight": 1.0}]
    elected = {
        "merge_method": method, "base_model": "policy", "parameters": {"normalize": True},
        "models": [{**target, "parameters": density[1]}, {**policy, "parameters": density[0]}],
    }  # fmt: skip
    expected = {
        "linear": {
            "merge_method": "linear",
            "models": [{**each, "parameters": {"weight": 0.5}} for each in (policy, target)],
        },
        "slerp": {"merge_method": "slerp", "base_model": "policy", "models": [target], "parameters": {"t": 0.5}},
    }.get(method, elected)
    assert made == expected
    train(base, tmp_path, MergeModelCallback(MergeConfig(method)))
    assert (tmp_path / "checkpoint-3" / "merged" / "model.safetensors").exists()


def test_what_could_not_be_merged_is_refused_before_training(base: Path, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="save_strategy='no' leaves no checkpoint"):
        train(base, tmp_path, MergeModelCallback(), save_strategy="no")
    with pytest.raises(BadValueError, match=r"method='tied' is none of.*Did you mean 'ties'.*YAML"):
        MergeConfig("tied")
    with pytest.raises(MissingNameError, match="no parameter 'densty'"):
        MergeModelCallback({"merge_method": "ties", "models": [{"model": "policy"}], "parameters": {"densty": 1}})
