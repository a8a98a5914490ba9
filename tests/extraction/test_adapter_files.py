"""What is read of a live model's adapters, and what is refused before its tensors are looked at."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from support.tiny_adapters import adapter
from support.tiny_models import TinyModels

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.extraction.adapter_files import Adapter, check_config

warnings.filterwarnings("ignore", module="peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_of_several_active_adapters_none_is_taken(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", save=False, target_modules=["q_proj"])
    made.live.add_adapter("second", LoraConfig(r=2, target_modules=["fc1"], init_lora_weights=False))
    assert TaskVector.from_adapter(made.live).expression == "default"
    made.live.base_model.set_adapter(["default", "second"])
    with pytest.raises(TaskVectorError, match=r"2 active adapters \(default, second\).*adapter_name="):
        TaskVector.from_adapter(made.live)
    vectors = [TaskVector.from_adapter(made.live, adapter_name=name) for name in ("default", "second")]
    assert [len(vector) for vector in vectors] == [2, 2]


def test_a_disabled_adapter_is_the_adapter(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", save=False, target_modules=["q_proj"])
    before = TaskVector.from_adapter(made.live)
    with made.live.disable_adapter():
        disabled = TaskVector.from_adapter(made.live)
    assert disabled.keys() == before.keys()
    assert all(torch.equal(disabled.dense(name), before.dense(name)) for name in before)


def test_a_base_that_another_adapter_is_merged_into_is_refused(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", save=False, target_modules=["q_proj"], use_dora=True)
    made.live.add_adapter("second", LoraConfig(r=2, target_modules=["fc1"], init_lora_weights=False))
    made.live.merge_adapter(["second"])
    with pytest.raises(TaskVectorError, match=r"second is merged into the live model.*unmerge_adapter"):
        TaskVector.from_adapter(made.live, adapter_name="default")
    made.live.unmerge_adapter()
    assert len(TaskVector.from_adapter(made.live, adapter_name="default")) == 2


def test_merged_tokens_are_refused(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(
        models.pair("phi").base,
        tmp_path / "adapter",
        save=False,
        target_modules=["q_proj"],
        layers_to_transform=[0],
        trainable_token_indices=[1, 5],
    )
    made.live.get_input_embeddings().token_adapter.merge()
    with pytest.raises(TaskVectorError, match=r"default is merged into the live model"):
        TaskVector.from_adapter(made.live)


def test_a_bias_on_a_layer_without_one_is_refused(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("llama").base, tmp_path / "adapter", target_modules=["q_proj"], lora_bias=True)
    for given in (made.folder, made.live):
        with pytest.raises(TaskVectorError, match=r"lora_bias=True on model\.layers\.0\.self_attn\.q_proj.*no bias"):
            TaskVector.from_adapter(given)


def test_tokens_of_a_head_with_a_bias_are_refused(models: TinyModels, tmp_path: Path) -> None:
    """PEFT runs such a head without its bias, and merges it with."""
    tokens = {"lm_head": [7, 3]}
    made = adapter(
        models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"], trainable_token_indices=tokens
    )
    for given in (made.folder, made.live):
        with pytest.raises(TaskVectorError, match=r"trains tokens of lm_head, which has a bias.*modules_to_save"):
            TaskVector.from_adapter(given)


def test_positions_with_an_offset_are_refused(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("opt").base, tmp_path / "adapter", target_modules=["embed_positions"])
    with pytest.raises(TaskVectorError, match=r"embed_positions\.weight.*offset that PEFT does not know"):
        made.vector()


@pytest.mark.parametrize("start", ["loftq", "corda", "lora_ga"])
def test_starts_from_a_changed_base_have_a_way_out(start: str, models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    config = made.folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"init_lora_weights": true', f'"init_lora_weights": "{start}"'))
    way_out = "from_finetuned" if start == "loftq" else "path_initial_model_for_weight_conversion"
    with pytest.raises(TaskVectorError, match=rf"init_lora_weights='{start}', which changes the base.*{way_out}"):
        made.vector()


def test_an_adapter_is_read_without_peft_and_transformers(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(
        *(models.pair("phi").base, tmp_path / "adapter"),
        target_modules=["q_proj", "fc1"],
        rank_pattern={"fc1": 2},
        alpha_pattern={r"0\..*q_proj": 3},
        use_rslora=True,
    )
    (made.folder / "adapter_config.json").write_text(
        (made.folder / "adapter_config.json").read_text().replace(str(models.pair("phi").base), "./nowhere")
    )
    expected = TaskVector.from_adapter(made.folder)
    read = f"TaskVector.from_adapter({str(made.folder)!r}).fingerprint"
    heavy = "{'peft', 'transformers'} & {*sys.modules}"
    code = f"import sys; from hf_taskvec import TaskVector; print({read}, {heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{expected.fingerprint} set()\n", done.stderr


def test_what_peft_sets_by_itself_takes_no_peft_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**vars(LoraConfig()), "peft_type": "LORA"}
    monkeypatch.setitem(sys.modules, "peft", None)  # importing it fails
    check_config(Adapter("plain", config, {}))


def test_an_option_of_a_later_peft_is_as_that_peft_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraConfig, "__post_init__", lambda self: setattr(self, "later_option", "usual"))
    check_config(Adapter("new", {"peft_type": "LORA", "later_option": "usual"}, {}))
    with pytest.raises(TaskVectorError, match=r"new uses LoRA with later_option='other'.*from_finetuned"):
        check_config(Adapter("new", {"peft_type": "LORA", "later_option": "other"}, {}))
